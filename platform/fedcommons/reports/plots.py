"""Functions that draw and save pictures with matplotlib: heat maps of partitions and grids of images."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from fedcommons.config.presets import SMOKE
from fedcommons.storage.atomic_files import write_bytes
from fedcommons.tracking.run_folder import read_class_counts

COLOURS = {
    "no sharing": "0.6", "local_synthetic": "#e8a29a", "shuffled_synthetic": "#c0392b", "shuffled_real": "#2e6da4",
}  # fmt: skip
"""Colours of the built-in sharing strategies, as in the Fedssyn paper, by the strategy's name in tables."""

_MORE = ("#2e8b57", "#8e44ad", "#d68910", "#16a2b8")


def colour_of(setting: str, settings: Sequence[str]) -> str:
    """Return the colour of a sharing strategy. settings: all strategies of the picture, in their order."""
    user_defined = [s for s in settings if s not in COLOURS]
    return COLOURS[setting] if setting in COLOURS else _MORE[user_defined.index(setting) % len(_MORE)]


def panels(rows: int, columns: int, size: tuple[float, float], sharey: bool = False) -> tuple[Figure, Any]:
    """Return an empty figure and its axes as an array (rows, columns). size: width and height in inches."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def png(figure: Figure, dpi: int, smoke: bool = False) -> bytes:
    """Return the figure as bytes of a PNG. smoke: print across the figure that it comes from a smoke test."""
    if smoke:
        figure.text(0.5, 0.5, SMOKE, ha="center", va="center", rotation=20, fontsize=22, color="r", alpha=0.5)
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi)
    return content.getvalue()


def save(figure: Figure, path: Path, dpi: int, smoke: bool = False) -> None:
    """Write the figure to a PNG file, atomically, as ``png`` draws it."""
    write_bytes(path, png(figure, dpi, smoke))


def plain_ticks(axis: Axis) -> None:
    """Set ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, with labels such as ``0.02``."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def partition_of(folder: Path) -> None:
    """Draw ``partition.png``, training images per client and class, in a run folder from its ``partition.json``."""
    if not (lists := read_class_counts(folder)):  # the labels are not classes
        return
    counts = np.array(lists)
    clients, classes = counts.shape
    figure, ((axes,),) = panels(1, 1, (1.5 + 0.35 * min(classes, 30), 1.2 + 0.3 * min(clients, 40)))
    image = axes.imshow(counts, cmap="Blues", aspect="auto")
    axes.set(xlabel="class", ylabel="client", title="training images of each client")
    if clients <= 20 and classes <= 20:
        axes.set(xticks=range(classes), yticks=range(clients))
        for (i, c), n in np.ndenumerate(counts):
            if n:
                colour = "w" if n > counts.max() / 2 else "k"
                axes.text(c, i, str(n), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, label="training images of the class")
    save(figure, folder / "partition.png", 100)


def image_grid(
    path: Path, rows: Sequence[tuple[str, Sequence[np.ndarray | None]]], columns: Sequence[str], title: str = "",
    smoke: bool = False,
) -> None:  # fmt: skip
    """Write a PNG with rows of small images: uint8 arrays (channels, height, width); None leaves a gap.

    columns: labels of the columns. If a row has k times more images than there are labels, a label covers k images.
    """
    wide, labels = max(len(images) for _, images in rows), max(len(label) for label, _ in rows)
    each = wide // len(columns)
    figure, grid = panels(len(rows), wide, (0.62 * wide + 0.3 + 0.075 * labels, 0.64 * len(rows) + 0.5))
    for (label, images), places in zip(rows, grid, strict=True):
        for i, axes in enumerate(places):
            axes.set(xticks=[], yticks=[])
            axes.set_frame_on(False)
            if i < len(images) and (x := images[i]) is not None:
                axes.imshow(x[0] if len(x) == 1 else np.moveaxis(x, 0, -1), cmap="gray", vmin=0, vmax=255)
        places[0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    for i, name in enumerate(columns):
        grid[0, i * each].set_title(name, fontsize=8, loc="left" if each > 1 else "center")
    figure.suptitle(title, fontsize=9)
    save(figure, path, 120, smoke)
