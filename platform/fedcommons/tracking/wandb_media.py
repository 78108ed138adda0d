"""Small pictures of a run for W&B: its pool, who holds which classes, how many examples clients hold.

Who may read the W&B project sees them, so each says what it gives away, and what a run protects is not given away:

- ``media/pool``: images that generators of ours drew and that left the clients before round 1 for the server or other
  clients. Real images are never shown: no stage but those of ``POOLS``, no generator but ours, no real row. A generator
  can have learned an image by heart: ``sharing.audit`` measures it, and ``sharing.withhold`` keeps near copies back.
  Where a run has noise that protects anything, they are shown only if an epsilon covers the pool. Over each column: how
  many images of the class the pool has, so a noisy number with ``generator.label_noise``.
- ``media/partition``: how many training examples of each class each client holds. Not where a run has noise that
  protects anything, as no epsilon covers these counts.
- ``media/sizes``: how many training examples clients hold, a number that counts as public (see ``statement``).

What is protected is known from the statement in the run's summary, so they are made once, at the run's end.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.config import registry
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # it takes a while to import
    from PIL.Image import Image

KEYS = ("media/pool", "media/partition", "media/sizes")

POOLS = ("shuffled_synthetic", "server_synthetic")
"""Stages of ours by which images that generators drew leave the clients."""

EXAMPLES, CLASSES, CLIENTS = 4, 10, 40
"""The most images of a class, classes and clients in a picture."""

SIDE = 32
"""Pixels: the largest side of an image. So 10 x 4 images are at most 123 kB, however noisy."""

_CELL, _LINE = 48, 14

Columns = Sequence[tuple[str, Sequence[np.ndarray]]]
"""By class: what stands over its images, and some of them, (C, H, W) uint8."""


def pool_images(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> Columns:
    """Some images of each class of a pool; none where one of its rows is real, or without images and classes.

    x, y: the made examples; rows: those that are in the pool, below 0 for a real one.
    """
    has_images = x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3)
    if (rows < 0).any() or not has_images or y.ndim != 1 or y.dtype.kind != "i":
        return ()
    classes, counts = np.unique(y[rows], return_counts=True)
    told = [*zip(classes.tolist(), counts.tolist(), strict=True)][:CLASSES]
    return [(f"{c} ({n})", list(x[rows[y[rows] == c][:EXAMPLES]])) for c, n in told]


def allowed(summary: Mapping[str, Any]) -> set[str]:
    """Those of ``KEYS`` that may be shown of a finished run."""
    config, privacy = summary["config"], summary["privacy"]
    is_open = privacy["noise"] is None and config["dp.noise"] == "seeded"
    is_ours = config["sharing.setting"] in POOLS and not registry.is_own(config["generator.name"])
    asked = (is_ours and (is_open or privacy["commons"] == "covered"), is_open, True)
    return {key for key, may in zip(KEYS, asked, strict=True) if may}


def pictures(folder: Path, summary: Mapping[str, Any], pool: Columns) -> dict[str, "Image"]:
    """Of a finished run, those that there are and that may be shown."""
    facts = safe_read.json_of(folder / "partition.json") or {}
    made: dict[str, Callable[[], Image]] = {}
    if pool:
        title = f"{summary['config']['sharing.setting']}: made images of each class (of how many)"
        made["media/pool"] = partial(grid, pool, title)
    if counts := facts.get("class_counts"):
        made["media/partition"] = partial(heat_map, np.array(counts))
    if sizes := facts.get("sizes"):
        made["media/sizes"] = partial(histogram, sizes)
    return {key: made[key]() for key in made if key in allowed(summary)}


def grid(columns: Columns, title: str) -> "Image":
    """A column of images for each class."""
    from PIL import Image

    picture, draw = _canvas(_CELL * len(columns), (_CELL + 2) * EXAMPLES + _LINE, title)
    for i, (label, images) in enumerate(columns):
        draw.text((_CELL * i + 2, _LINE), label, "black")
        for j, x in enumerate(images):
            one = Image.fromarray(x[0] if len(x) == 1 else np.moveaxis(x, 0, -1))
            one.thumbnail((SIDE, SIDE))
            times = max(1, (_CELL - 2) // max(one.size))
            one = one.resize((one.width * times, one.height * times), Image.Resampling.NEAREST)
            picture.paste(one.convert("RGB"), (_CELL * i, 2 * _LINE + (_CELL + 2) * j))
    return picture


def heat_map(counts: np.ndarray) -> "Image":
    """Training examples by client (rows) and class (columns); counts: (clients, classes)."""
    n, shown = len(counts), counts[:CLIENTS, : 2 * CLASSES]
    cut = "" if shown.shape == counts.shape else f", {shown.shape[0]} of {n} clients, {shown.shape[1]} classes"
    wide, high = _CELL * (shown.shape[1] + 1), _LINE * (len(shown) + 1)
    picture, draw = _canvas(wide, high, f"training examples by client and class{cut}")
    for c in range(shown.shape[1]):
        draw.text((_CELL * (c + 1) + 2, _LINE), f"class {c}", "black")
    for i, row in enumerate(shown):
        y = _LINE * (i + 2)
        draw.text((2, y), f"client {i}", "black")
        for c, count in enumerate(row.tolist()):
            x, share = _CELL * (c + 1), count / max(1, shown.max())
            draw.rectangle((x, y, x + _CELL - 2, y + _LINE - 2), fill=_blue(share))
            if count:
                draw.text((x + 4, y), str(count), "white" if share > 0.5 else "black")
    return picture


def histogram(sizes: Sequence[int]) -> "Image":
    """How many clients hold how many training examples."""
    counts, edges = np.histogram(sizes, bins=min(10, len(set(sizes))))
    picture, draw = _canvas(_CELL * len(counts), 8 * _LINE, f"training examples of each of {len(sizes)} clients")
    for i, count in enumerate(counts.tolist()):
        x, foot = _CELL * i, 8 * _LINE
        top = foot - 5 * _LINE * count // max(counts.tolist())
        draw.rectangle((x, top, x + _CELL - 3, foot), fill=_blue(0.8))
        if count:
            draw.text((x + 2, top - _LINE), str(count), "black")
        draw.text((x + 2, foot + 1), str(ceil(edges[i])) + ("-" if len(counts) > 1 else ""), "black")
    return picture


def _canvas(wide: int, high: int, title: str):
    """A white picture with a title, and what draws on it."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (max(wide, 6 * len(title)) + 4, high + 2 * _LINE), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((2, 0), title, "black")
    return picture, draw


def _blue(share: float) -> tuple[int, int, int]:
    """From white to dark blue."""
    return round(247 - 239 * share), round(251 - 203 * share), round(255 - 148 * share)
