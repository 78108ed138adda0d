"""Pictures."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedcommons.files import write_bytes


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a PNG, whole or not at all, and forget the figure."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi)
    plt.close(figure)
    write_bytes(path, content.getvalue())


def class_heatmap(counts: np.ndarray, path: Path) -> None:
    """How many images of each class each client holds; counts: (clients, classes)."""
    clients, classes = counts.shape
    figure, axes = plt.subplots(figsize=(1.5 + 0.35 * min(classes, 30), 1.2 + 0.3 * min(clients, 40)))
    image = axes.imshow(counts, cmap="Blues", aspect="auto")
    axes.set(xlabel="class", ylabel="client", title="training images of each client")
    if clients <= 20 and classes <= 20:
        axes.set(xticks=range(classes), yticks=range(clients))
        for (i, c), n in np.ndenumerate(counts):
            if n:
                axes.text(
                    c, i, str(n), ha="center", va="center", fontsize=7, color="w" if n > counts.max() / 2 else "k"
                )
    figure.colorbar(image, label="training images of the class")
    figure.tight_layout()
    save(figure, path, 100)


def round_bars(path: Path, groups: list[tuple[str, list[tuple[str, float, bool]]]], rounds: int) -> None:
    """The bars of Table 1, in groups: (label, [(setting, rounds to the target, whether it was not reached)]).

    Grey without synthetic data, red with the shuffled pool, light red with local synthetic data; hatched: not reached.
    """
    colours = {"real": "0.6", "shuffled_synthetic": "#c0392b", "local_synthetic": "#e8a29a", "shuffled_real": "#2e6da4"}
    height = 0.8
    figure, axes = plt.subplots(figsize=(7, 1 + 0.3 * sum(len(bars) + 1 for _, bars in groups)))
    y, ticks = 0.0, []
    for label, bars in groups:
        ticks.append((y + (len(bars) - 1) / 2, label))
        for setting, value, censored in bars:
            axes.barh(y, value, height, color=colours[setting], hatch="//" if censored else None, edgecolor="w")
            axes.text(value + rounds * 0.01, y, f">{value:g}" if censored else f"{value:.3g}", va="center", fontsize=8)
            y += 1
        y += 0.7
    axes.set(yticks=[t for t, _ in ticks], yticklabels=[name for _, name in ticks], xlim=(0, rounds * 1.1))
    axes.set_xlabel("rounds to the target accuracy (hatched: not reached)")
    axes.invert_yaxis()
    shown = dict.fromkeys(setting for _, bars in groups for setting, _, _ in bars)
    axes.legend([Patch(color=colours[s]) for s in shown], list(shown), fontsize=8, loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(figure, path, 120)


def metric_against_fields(records: Sequence[Mapping[str, Any]], fields: Sequence[str], metric: str, path: Path) -> None:
    """A panel for each swept field: every run's metric against the field's value; a cross on top where not reached."""
    figure, panels = plt.subplots(1, len(fields), figsize=(4 * len(fields), 3.2), squeeze=False, sharey=True)
    top = max(r["rounds"] for r in records)
    for axes, field in zip(panels[0], fields, strict=True):
        values = [r[field] for r in records]
        if all(isinstance(v, int | float) for v in values) and min(values) > 0 and max(values) / min(values) >= 10:
            axes.set_xscale("log")
        reached = [(v, r[metric]) for v, r in zip(values, records, strict=True) if r[metric] is not None]
        missed = [v for v, r in zip(values, records, strict=True) if r[metric] is None]
        if reached:
            axes.scatter(*zip(*reached, strict=True), color="#c0392b", s=24)
        if missed:
            axes.scatter(missed, [top] * len(missed), marker="x", color="0.5", s=28, label="not reached")
            axes.legend(fontsize=8)
        axes.set_xlabel(field)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(metric)
    figure.tight_layout()
    save(figure, path, 120)
