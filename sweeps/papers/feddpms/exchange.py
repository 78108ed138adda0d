"""What FedDPMS's clients exchanged in a run, read from its last checkpoint, and a picture of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from fedcommons.federation import checkpoint
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import data
from fedcommons.reports.plots import panels, save
from fedcommons.tracking.run_folder import read_class_counts, read_config

SHOWN = 6  # decoded images of a class
NAMES = {
    "fmnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
"""Classes whose numbers say nothing to a reader."""


@dataclass(frozen=True)
class Exchange:
    """before, after: (clients, classes) numbers of examples; images: (m, C, H, W) decoded ones, by class.

    kept: how many codes all clients gave. model, decoder: numbers in encoder and classifier, and in the decoder.
    latent: l. preliminary: T_p.
    """

    before: np.ndarray
    after: np.ndarray
    images: Mapping[int, np.ndarray]
    kept: int
    model: int
    decoder: int
    latent: int
    preliminary: int


def read(run: Path) -> Exchange | None:
    """Of a run folder of FedDPMS; None for another method, without a checkpoint, or before stage II."""
    if read_config(run).algorithm != "feddpms":
        return None
    last = checkpoint.load_latest(run / "checkpoints", ClientMemory(folder=run / "memory"))
    given = [data(x) for name, x in last.state.items() if name.startswith("codes/")] if last else []
    if last is None or not given:
        return None
    before = np.array(read_class_counts(run))
    after, images = before.copy(), {}
    for client, kept in last.memory.items():
        if "images" in kept:
            for image, c in zip(data(kept["images"]).numpy(), data(kept["labels"]).tolist(), strict=True):
                after[client, c] += 1
                images.setdefault(c, []).append(image)
    decoder = sum(part.numel() for name, part in last.model.items() if name.startswith("decoder."))
    return Exchange(
        before, after, {c: np.stack(images[c]) for c in sorted(images)}, sum(map(len, given)),
        last.model.buffer.numel() - decoder, decoder, given[0].shape[1], int(data(last.state["last"])),
    )  # fmt: skip


def picture(path: Path, exchange: Exchange, dataset: str, smoke: bool) -> None:
    """What clients hold of each class before and after, with what was received marked, and decoded images."""
    classes = exchange.before.shape[1]
    names = NAMES.get(dataset, tuple(map(str, range(classes))))
    figure, ((left, middle, right),) = panels(1, 3, (13.5, 5.2))
    received = exchange.after - exchange.before
    for axes, counts, title in (
        (left, exchange.before, "before the exchange"),
        (middle, exchange.after, "after it (red: received)"),
    ):
        axes.imshow(counts, cmap="Blues", aspect="auto", vmax=exchange.after.max())
        axes.set(xlabel="class", ylabel="client", title=f"images of each client, {title}")
        if classes <= 20 and len(counts) <= 20:
            turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if dataset in NAMES else {}
            axes.set_xticks(range(classes), names, **turned)
            axes.set_yticks(range(len(counts)))
            for (i, c), n in np.ndenumerate(counts):
                colour = "w" if n > exchange.after.max() / 2 else "k"
                axes.text(c, i, str(n) if n else "", ha="center", va="center", fontsize=7, color=colour)
    for i, c in zip(*np.nonzero(received), strict=True):
        middle.add_patch(Rectangle((c - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor="#c0392b", linewidth=1.5))
    rows = [np.concatenate(list(_padded(exchange.images[c])), axis=2) for c in exchange.images]
    if rows:
        shown = np.concatenate(rows, axis=1).transpose(1, 2, 0).astype(float)
        shown /= max(shown.max(), 1)
        right.imshow(shown.squeeze(-1) if shown.shape[2] == 1 else shown, cmap="gray")
        height = rows[0].shape[1]
        right.set_yticks([height * (i + 0.5) for i in range(len(rows))], [names[c] for c in exchange.images])
        right.set_xticks([])
        for i in range(1, len(rows)):
            right.axhline(height * i - 0.5, color="w", linewidth=1)
    right.set(title=f"decoded, received: first {SHOWN} of each class")
    save(figure, path, 110, smoke)


def _padded(images: np.ndarray) -> np.ndarray:
    """The first ``SHOWN`` images, black ones in place of those that are missing."""
    some = images[:SHOWN]
    return np.concatenate([some, np.zeros((SHOWN - len(some), *images.shape[1:]), images.dtype)])
