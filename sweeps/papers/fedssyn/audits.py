"""Table, CSVs and pictures of the audit of a pool of synthetic images, from the stored audits of all seeds."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedcommons.audits.exposed import SHARE
from fedcommons.audits.membership import Attack
from fedcommons.audits.nearest_neighbours import Compared
from fedcommons.cli import parse
from fedcommons.reports import tables
from fedcommons.reports.plots import finish, panels, save
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import grid
from fedcommons.tune.study import Report

PAIRS = 12
"""Number of pairs in the picture: synthetic images, each with its closest training image."""

ATTACKERS = {"pool": "attacker has the pool", "loss": "attacker has the generator"}
"""What the attacker has, as text in tables and pictures, by the attack's name."""

GRID = np.union1d(np.linspace(0, 1, 101), np.geomspace(1e-3, 1, 91)).round(6)
"""False positive rates at which each ROC curve is stored; they are fixed, so that curves can be averaged over seeds."""

Record = Mapping[str, Any]
"""The audit of a seed as JSON values, with the keys that ``attacks.audited`` returns."""


def curve(attack: Attack) -> list[float]:
    """Return the attack's true positive rates at the false positive rates of ``GRID``."""
    last = np.searchsorted(attack.fpr, GRID + 1e-9, side="right") - 1
    return attack.tpr[last].round(6).tolist()


def pairs(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the ``PAIRS`` closest pairs of a synthetic image and a training image of its generator."""
    near = [(float(c.nearest.to_seen[i] / max(c.limit, 1e-9)), c, i) for c in compared for i in range(len(c.near))]
    return [
        {"distance": distance, "client": c.subject.client, "made": c.subject.synthetic.x[i].tolist(),
         "seen": c.subject.training.x[int(c.nearest.closest_seen[i])].tolist()}
        for distance, c, i in sorted(near, key=lambda pair: pair[0])[:PAIRS]
    ]  # fmt: skip


def report(records: Mapping[int, Record], options: parse.Options, out: Path) -> str:
    """Write the table, the CSVs and the pictures; return the table with its footnotes. records: audits by seed."""
    write_text(out / "audit_pool_attacks.csv", tables.to_csv(attacks(records)))
    seeds, smoke = ", ".join(map(str, records)), grid.is_smoke(options)
    title = f"Was this image trained on? {options.shadows} generators a seed, {options.config.data.name}, seeds {seeds}"
    pictures = {
        "audit_pool_roc.png": lambda path: roc(path, list(records.values()), title, smoke),
        "audit_pool_pairs.png": lambda path: closest_pairs(path, records, smoke),
    }
    text = table(records) + words(records, options.shadows)
    return Report(text, closeness(records), None, pictures).write("audit_pool", options, out)


def table(records: Mapping[int, Record]) -> str:
    """Return a Markdown table with a line per quantity, a column per seed and, with several seeds, their mean."""
    audits, first = list(records.values()), next(iter(records.values()))
    lines: list[list[str]] = []

    def add(name: str, texts: Sequence[str], values: Sequence[float] = (), digits: int = 1) -> None:
        lines.append([name, *texts, *([_mean(values, digits) if values else ""] if len(audits) > 1 else [])])

    for space in first["spaces"]:
        all_of = [r["spaces"][space]["all"] for r in audits]
        shares = [tuple(100 * f[name] for name in ("closer", "low", "high")) for f in all_of]
        add(f"{space}: closer to a seen image, %", [_interval(*s) for s in shares], [s[0] for s in shares])
        add(f"{space}: near-copies (at most expected)", [f"{f['near_copies']} ({f['expected']:.1f})" for f in all_of],
            [f["near_copies"] for f in all_of])  # fmt: skip
        add(f"{space}: copied", [f"{f['copied']} : {f['control']}, {f['copied_half']} : {f['control_half']}"
                                 for f in all_of])  # fmt: skip
        add(f"{space}: verdict", [_verdict(f) for f in all_of])
    for name in first["attacks"]:
        results = [r["attacks"][name] for r in audits]
        texts = [_interval(a["auc"], *a["auc_interval"], digits=3) for a in results]
        add(f"{ATTACKERS[name]}: AUC", texts, [a["auc"] for a in results], 3)
        rates = [tuple(100 * v for v in (a["tpr_at_1_percent_fpr"], *a["tpr_interval"])) for a in results]
        add(f"{ATTACKERS[name]}: TPR at 1 % FPR, %", [_interval(*v) for v in rates],
            [v[0] for v in rates])  # fmt: skip
        if worst := _worst(audits, name):
            texts = [_interval(w["auc"], *w["auc_interval"], digits=3) for w in worst]
            add(f"{ATTACKERS[name]}: AUC, most exposed images", texts, [w["auc"] for w in worst], 3)
    bounds = [r["epsilon"] for r in audits]
    add("canaries: guesses right", [f"{e['right']} of {e['guesses']}" for e in bounds])
    add("epsilon is at least (if all were right)", [f"{e['at_least']:.3g} ({e['ceiling']:.3g})" for e in bounds],
        [e["at_least"] for e in bounds], 2)  # fmt: skip
    add("epsilon reported", ["none" if e["reported"] is None else f"{e['reported']:.3g}: {e['verdict']}"
                             for e in bounds])  # fmt: skip
    head = ["", *(f"seed {seed}" for seed in records), *(["mean [lowest, highest]"] if len(audits) > 1 else [])]
    return tables.markdown(head, lines)


def _worst(audits: Sequence[Record], name: str) -> list[Record]:
    """Return each seed's attack ``name`` on the most exposed images; nothing if a seed has too few shadows for it."""
    results = [r["attacks"][name].get("worst") for r in audits]
    return results if all(results) else []


def _interval(value: float, low: float, high: float, digits: int = 1) -> str:
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _mean(values: Sequence[float], digits: int) -> str:
    return _interval(fmean(values), min(values), max(values), digits)


def _verdict(facts: Record) -> str:
    if facts["memorised"]:
        return "**memorised**"
    return "not shown; finds no share" if facts["finds"] is None else f"not shown; finds {100 * facts['finds']:.2g} %"


def words(records: Mapping[int, Record], shadows: int) -> str:
    """Return the footnotes that explain the table's quantities; shadows: number of shadow generators per seed."""
    audits = list(records.values())
    few, many = min(r["validation"] for r in audits), max(r["validation"] for r in audits)
    n = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    trained = f"trained on {n} validation images" if many else "untrained, as there are no validation images"

    def either(values: Iterable[int]) -> str:
        return " or ".join(f"{value:,}" for value in sorted(set(values)))

    images = either(r["spaces"]["pixels"]["all"]["images"] for r in audits)
    clients, canaries = either(r["client"] for r in audits), either(r["epsilon"]["canaries"] for r in audits)
    exposed = (
        f" Most exposed images: the {100 * SHARE:g} % that half of these generators identify best; the other half "
        "judges the attack on them."
    ) * any(_worst(audits, name) for name in audits[0]["attacks"])
    notes = [
        f"[ ]: 95 % interval within a seed; in the last column minimum and maximum over seeds. Partition, generators "
        f"and attacks depend on the seed. Synthetic images: {images}.",
        "Closer: share of synthetic images that are closer to an image their generator saw than to any of an equal "
        "number of held-out images of the same classes; 50 % if nothing was memorised. Near-copies: synthetic images "
        "within a small distance of a seen image; in brackets the largest number expected of fresh images. Copied: "
        "seen images with a synthetic image within this distance : held-out images with one; then the same at half of "
        "the distance. An image that is moved by a pixel or mirrored counts as the same. Finds: the smallest share of "
        "copies (exact, moved by a pixel or mirrored) among the synthetic images that the verdict detects with "
        "probability 0.9, measured by planting copies; no share: not even if all are copies.",
        f"Features: the embedding of the model, {trained}. Held-out: test images, and the client's real images that "
        "its generator did not see.",
        "Attacks: was this image a training image of the generator? An attacker with the pool uses the distance to the "
        "closest synthetic image; an attacker with the generator uses its loss. Each seed has "
        f"{shadows} generators, trained like the generator of client {clients}.{exposed}",
        f"Canaries: {canaries} test images; one more generator is trained with a random half of them, and one without "
        "canaries, for comparison. Epsilon is at least this number with confidence 95 %; in brackets the largest "
        "number that the guesses could show. No epsilon is reported if the images have no privacy guarantee.",
    ]
    return tables.numbered(notes)


def closeness(records: Mapping[int, Record]) -> list[dict[str, Any]]:
    """Return CSV lines per seed and space (pixels, features): memorisation overall, per client and per class."""
    lines = []
    for seed, record in records.items():
        for space, verdicts in record["spaces"].items():
            groups = {"all": verdicts["all"], **{f"client {c}": f for c, f in verdicts["clients"].items()},
                      **{f"class {c}": f for c, f in verdicts["classes"].items()}}  # fmt: skip
            lines += [{"seed": seed, "space": space, "group": group, **f} for group, f in groups.items()]
    return lines


def attacks(records: Mapping[int, Record]) -> list[dict[str, Any]]:
    """Return a CSV line for each seed and membership attack, with the seed's lower bound on epsilon."""
    lines = []
    for seed, record in records.items():
        for name, a in record["attacks"].items():
            (low, high), (least, most), e = a["auc_interval"], a["tpr_interval"], record["epsilon"]
            worst = a.get("worst") or {}
            ends = worst.get("auc_interval", (None, None))
            lines.append(
                {"seed": seed, "client": record["client"], "attack": name, "auc": a["auc"], "auc_low": low,
                 "auc_high": high, "tpr_at_1_percent_fpr": a["tpr_at_1_percent_fpr"], "tpr_low": least,
                 "tpr_high": most, "worst_images": worst.get("images"), "worst_auc": worst.get("auc"),
                 "worst_auc_low": ends[0], "worst_auc_high": ends[1], "worst_tpr_at_1_percent_fpr": worst.get("tpr_at"),
                 **{f"epsilon_{key}": value for key, value in e.items()}}
            )  # fmt: skip
    return lines


def roc(path: Path, records: Sequence[Record], title: str, smoke: bool) -> None:
    """Draw the ROC curve of each membership attack, mean and range over seeds, on linear and on logarithmic axes."""
    figure, ((linear, logarithmic),) = panels(1, 2, (9.4, 5.2))
    for name in records[0]["attacks"]:
        results = [r["attacks"][name] for r in records]
        rates = np.array([a["roc"] for a in results])
        areas = [a["auc"] for a in results]
        (low, high) = (min(areas), max(areas)) if len(results) > 1 else results[0]["auc_interval"]
        label = f"{ATTACKERS[name]}: AUC {fmean(areas):.3f} [{low:.3f}, {high:.3f}]"
        for axes in (linear, logarithmic):
            colour, dash = ("#0072b2", "-") if name == "pool" else ("#e69f00", "--")
            axes.plot(GRID, rates.mean(0), dash, color=colour, drawstyle="steps-post", label=label)
            axes.fill_between(GRID, rates.min(0), rates.max(0), step="post", alpha=0.25, color=colour, linewidth=0)
    for axes in (linear, logarithmic):
        axes.plot([1e-3, 1], [1e-3, 1], ":", color="0.4", linewidth=1.2, label="guessing")
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
    logarithmic.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1), title="the same, both axes (log)")
    linear.set(xlim=(0, 1), ylim=(0, 1))
    many = len(records) > 1
    finish(figure, title, f"line: mean over {len(records)} seeds; band and [ ]: minimum to maximum over seeds" if many
           else "one seed; [ ]: 95 % interval of the AUC")  # fmt: skip
    save(figure, path, 120, smoke)


def closest_pairs(path: Path, records: Mapping[int, Record], smoke: bool) -> None:
    """Draw the ``PAIRS`` closest pairs of a synthetic image and a training image, over all seeds."""
    every = [(pair["distance"], seed, pair) for seed, record in records.items() for pair in record["pairs"]]
    closest = sorted(every, key=lambda item: item[:2])[:PAIRS]
    figure, axes = panels(2, max(1, len(closest)), (1.1 * max(4, len(closest)), 3.2))
    for column, (distance, seed, pair) in zip(axes.T, closest, strict=True):
        column[0].set_title(f"{distance:.2f}\nseed {seed}\nclient {pair['client']}", fontsize=8)
        for place, name in zip(column, ("made", "seen"), strict=True):
            x = np.array(pair[name])
            place.imshow(x[0] if len(x) == 1 else np.moveaxis(x, 0, -1), cmap="gray", vmin=0, vmax=255)
            place.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("synthetic", fontsize=9)
    axes[1, 0].set_ylabel("real, trained on", fontsize=9)
    figure.suptitle(
        "Closest pairs of a synthetic and a real image. Number: their distance; a near-copy has at most 1", fontsize=9
    )
    save(figure, path, 120, smoke)
