"""Pictures."""

import io
from pathlib import Path

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
    axes.set(xlabel="class", ylabel="client", title="training images")
    if clients <= 20 and classes <= 20:
        axes.set(xticks=range(classes), yticks=range(clients))
        for (i, c), n in np.ndenumerate(counts):
            if n:
                axes.text(
                    c, i, str(n), ha="center", va="center", fontsize=7, color="w" if n > counts.max() / 2 else "k"
                )
    figure.colorbar(image)
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
