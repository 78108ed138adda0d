"""The style of all pictures, and functions that draw and save pictures with matplotlib.

Colours by method: ``series.looks``. Accuracies are in percent. The legend stands outside the axes.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from fedcommons.config.presets import SMOKE
from fedcommons.reports.series import Spread, looks
from fedcommons.storage.atomic_files import write_bytes
from fedcommons.tracking.run_folder import read_class_counts


def panels(
    rows: int, columns: int, size: tuple[float, float], sharey: bool | Literal["row"] = False
) -> tuple[Figure, Any]:
    """Return an empty figure and its axes as an array (rows, columns). size: width and height in inches."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def percent(axis: Axis) -> str:
    """Label an axis of shares in percent; return the unit for the axis' title."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g}"))
    return ", %"


def covered(lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[int]:
    """Count for each line (x, y) the later lines that coincide with it in at least half of the points."""

    def is_near(line: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
        at, heights = dict(zip(*line, strict=True)), dict(zip(*other, strict=True))
        reach = max(at.values(), default=0) - min(at.values(), default=0)
        near = [abs(at[x] - heights[x]) <= 0.005 * reach for x in at.keys() & heights.keys()]
        return bool(near) and 2 * sum(near) >= len(at)

    return [sum(is_near(line, later) for later in lines[i + 1 :]) for i, line in enumerate(lines)]


def curves(axes: Axes, courses: Mapping[str, Mapping[Any, Spread]], names: Iterable[str]) -> None:
    """Draw a line and a band for each series; a line that later lines cover is broader, so that all can be seen.

    courses: mean, minimum and maximum by x, for each series. names: all series of the picture (``series.looks``).
    """
    look, present = looks(names), {name: course for name, course in courses.items() if course}
    lines = [(list(course), [mean for mean, _, _ in course.values()]) for course in present.values()]
    for name, (x, mean), more in zip(present, lines, covered(lines), strict=True):
        (colour, _, dash), (_, low, high) = look[name], zip(*present[name].values(), strict=True)
        axes.plot(x, mean, color=colour, linestyle=dash, linewidth=1.5 + 2 * more, label=name)
        if low != high:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def finish(
    figure: Figure, title: str, key: str = "", loc: Any = "outside lower center", last: str = "",
    more: Iterable[Artist] = (),
) -> None:  # fmt: skip
    """Add title, grid lines and a legend outside the axes.

    Args:
        key: title of the legend.
        loc: where the legend stands; ``panels``: a legend below each panel.
        last: how the label of the last entry begins.
        more: further entries.
    """
    handles: dict[str, Any] = {}
    look: dict[str, Any] = {"fontsize": 8, "title": key or None, "title_fontsize": 8, "frameon": False}
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
        if loc == "panels" and (labels := axes.get_legend_handles_labels()[1]):
            columns = 2 if max(map(len, labels)) < 30 else 1
            below = axes.transAxes + ScaledTranslation(0, -0.45, figure.dpi_scale_trans)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, ncols=columns, **look)
    handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith(last)))
    handles |= {str(handle.get_label()): handle for handle in more}
    is_right, width = "right" in loc, figure.get_figwidth()
    wide = 0.7 + 0.065 * max(map(len, handles), default=0)  # of a column of the legend, in inches
    if handles and loc != "panels":
        columns = 1 if is_right else min(max(1, int(width / wide)), len(handles))
        figure.legend([*handles.values()], [*handles], loc=loc, ncols=columns, **look)
    lines = [fill(line, int(13 * (width - wide * is_right))) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=10, **({"x": 0.01, "ha": "left"} if is_right else {}))


def png(figure: Figure, dpi: int, smoke: bool = False) -> bytes:
    """Return the figure as bytes of a PNG. smoke: print across the figure that it comes from a smoke test."""
    if smoke:
        figure.text(0.5, 0.5, SMOKE, ha="center", va="center", rotation=20, fontsize=22, color="r", alpha=0.5)
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, pil_kwargs={"optimize": True})
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
    image = class_counts(axes, counts, counts.max(), "training images of each client")
    figure.colorbar(image, label="training images of the class")
    save(figure, folder / "partition.png", 100)


def class_counts(axes: Axes, counts: np.ndarray, most: int, title: str) -> Any:
    """Draw numbers of examples, (clients, classes), as coloured squares; most: number that has the darkest colour."""
    image = axes.imshow(counts, cmap="Blues", aspect="auto", vmax=most)
    axes.set(xlabel="class", ylabel="client", title=title)
    if max(counts.shape) <= 20:
        axes.set(xticks=range(counts.shape[1]), yticks=range(counts.shape[0]))
        for (i, c), n in np.ndenumerate(counts):
            if n:
                colour = "w" if n > most / 2 else "k"
                axes.text(c, i, str(n), ha="center", va="center", fontsize=7, color=colour)
    return image


def image_grid(
    path: Path, rows: Sequence[tuple[str, Sequence[np.ndarray | None]]], columns: Sequence[str], title: str = "",
    smoke: bool = False,
) -> None:  # fmt: skip
    """Write a PNG with rows of small images: uint8 arrays (channels, height, width); None leaves a gap.

    columns: labels of the columns. If a row has k times more images than there are labels, a label covers k images.
    """
    wide, labels = max(len(images) for _, images in rows), max(len(label) for label, _ in rows)
    each, side = wide // len(columns), min(0.62, 11 / wide)  # side of an image in inches
    figure, grid = panels(len(rows), wide, (side * wide + 0.3 + 0.075 * labels, (side + 0.02) * len(rows) + 0.5))
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
