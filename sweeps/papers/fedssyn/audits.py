"""Tables and pictures of an audit of a pool."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcommons.audits.closeness import Compared
from fedcommons.audits.membership import Attack
from fedcommons.reports import tables
from fedcommons.reports.plots import panels, save

COLUMNS = ("closer", "near (expected)", "copied", "finds")
PAIRS = 12
"""How many of the closest pairs are shown."""


def table(record: Mapping[str, Any]) -> str:
    """A line for all, for each client and for each class; ``record``: see ``Audit.record``."""
    names = list(record)
    head = ["", "images", *(f"{name}: {what}" for name in names for what in COLUMNS)]
    first = record[names[0]]
    groups = [("all", ("all",)), *((f"client {c}", ("clients", c)) for c in first["clients"]),
              *((f"class {c}", ("classes", c)) for c in first["classes"])]  # fmt: skip
    lines = []
    for said, path in groups:
        found = [_at(record[name], path) for name in names]
        lines.append([said, str(found[0]["images"]), *(cell for of in found for cell in _cells(of))])
    return tables.markdown(head, lines)


def _at(record: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    for name in path:
        record = record[name]
    return record


def _cells(found: Mapping[str, Any]) -> list[str]:
    closer = f"{100 * found['closer']:.1f} [{100 * found['low']:.0f}, {100 * found['high']:.0f}] %"
    mark = " **memorised**" if found["memorised"] else ""
    return [
        closer + mark,
        f"{found['near_copies']} ({found['expected']:.1f})",
        f"{found['copied']} : {found['control']}, {found['copied_half']} : {found['control_half']}",
        "" if found["memorised"] else "none" if found["finds"] is None else f"{100 * found['finds']:.2g} %",
    ]


def words(record: Mapping[str, Any], shadows: int) -> str:
    """What a reader must know to read the numbers, and what the attacks have found."""
    e, n = record["epsilon"], record["validation"]
    trained = f"trained on {n:,} validation images" if n else "untrained, as there are no validation images"
    reported = "none, as nothing protects it" if e["reported"] is None else f"{e['reported']:.3g}"
    attacks = [
        f"{name}: AUC {a['auc']:.3f} [{a['auc_interval'][0]:.3f}, {a['auc_interval'][1]:.3f}], TPR "
        f"{100 * a['tpr_at_1_percent_fpr']:.1f} % [{100 * a['tpr_interval'][0]:.1f}, "
        f"{100 * a['tpr_interval'][1]:.1f}] at 1 % FPR"
        for name, a in record["attacks"].items()
    ]
    notes = [
        "closer: share of made images that are closer to an image their generator saw than to any of as many held-out "
        "ones of the same classes, with a 95 % interval; 50 % if nothing was memorised. near: images below a distance "
        "that at most the expected number of fresh images would be below. copied: seen images with a made one that "
        "near, against held-out images with one; then the same at half of that distance. An image that is moved by a "
        "pixel or mirrored is the same image. "
        "finds: the smallest share of copies (exact, moved by a pixel or mirrored) among the made images that the "
        "verdict finds with probability 0.9, by planting them; none: not even if all are copies.",
        f"features: the embedding of the model, {trained}. Held-out: test images, and the client's own that its "
        "generator did not see.",
        f"Membership, generators like client {record['client']}'s, {shadows} of them: {'; '.join(attacks)}.",
        f"One run with {e['canaries']} test images as canaries, {e['right']} of {e['guesses']} guesses right: epsilon "
        f"is at least {e['at_least']:.3g} (95 %; were all right, {e['ceiling']:.3g}), reported: {reported}"
        f"{_verdict(e)}.",
    ]
    return tables.numbered(notes)


def roc(path: Path, attacks: Mapping[str, Attack], title: str, smoke: bool) -> None:
    """The ROC of every kind of score, both axes linear and both logarithmic."""
    figure, ((linear, logarithmic),) = panels(1, 2, (9, 4.2))
    for axes in (linear, logarithmic):
        for name, found in attacks.items():
            low, high = found.auc_interval
            label = f"{name}: AUC {found.auc:.3f} [{low:.3f}, {high:.3f}]"
            axes.plot(found.fpr, found.tpr, drawstyle="steps-post", label=label)
        axes.plot([1e-3, 1], [1e-3, 1], "--", color="0.6", linewidth=1, label="guessing")
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
    logarithmic.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    linear.legend(fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=10)
    save(figure, path, 120, smoke)


def closest_pairs(path: Path, compared: Sequence[Compared], smoke: bool) -> None:
    """The made images that are closest to one that was seen, by the limit; below each the one that was seen."""
    near = [(c.made.to_seen[i] / max(c.limit, 1e-9), c, i) for c in compared for i in range(len(c.near))]
    shown = sorted(near, key=lambda found: float(found[0]))[:PAIRS]
    figure, axes = panels(2, max(1, len(shown)), (1.1 * max(2, len(shown)), 2.9))
    for column, (distance, c, i) in zip(axes.T, shown, strict=True):
        column[0].set_title(f"{distance:.2f}\nclient {c.of.client}", fontsize=8)
        for place, x in zip(column, (c.of.made.x[i], c.of.seen.x[int(c.made.closest_seen[i])]), strict=True):
            place.imshow(_pixels(x.numpy()), cmap="gray", vmin=0, vmax=255)
            place.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("made", fontsize=9)
    axes[1, 0].set_ylabel("seen", fontsize=9)
    figure.suptitle("closest pairs; the distance in units of that below which an image is a near-copy", fontsize=9)
    save(figure, path, 120, smoke)


def _verdict(epsilon: Mapping[str, Any]) -> str:
    """What the bound says of the reported epsilon, where there is one."""
    return "" if epsilon["reported"] is None else f"; verdict: {epsilon['verdict']}"


def _pixels(x: np.ndarray) -> np.ndarray:
    """An image (C, H, W) as matplotlib has it."""
    return x[0] if len(x) == 1 else np.moveaxis(x, 0, -1)
