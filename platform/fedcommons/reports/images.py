"""Grids of small pictures with labels over their columns and beside their rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcommons.reports.plots import panels, save


def image_grid(
    path: Path,
    rows: Sequence[tuple[str, Sequence[np.ndarray | None]]],
    columns: Sequence[str],
    title: str = "",
    smoke: bool = False,
) -> None:
    """Write a PNG: a row of images (C, H, W) uint8 beside each label, an empty place for None.

    columns: labels; where a row has more images than there are labels, each label stands over as many of them.
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
