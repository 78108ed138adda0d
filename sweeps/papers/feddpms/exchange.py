"""The codes and images that clients exchanged in a FedDPMS run, read from its last checkpoint, and their picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle

from fedcommons.federation import checkpoint
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import data
from fedcommons.reports.plots import class_counts, panels, save
from fedcommons.tracking.run_folder import read_class_counts, read_config

IMAGES = 6  # number of decoded images per class in the picture
NAMES = {
    "fmnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    "cifar10": ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
"""Class names, for the data sets whose class numbers mean nothing to a reader."""


@dataclass(frozen=True)
class Exchange:
    """What the clients of one FedDPMS run exchanged.

    before, after: (clients, classes) numbers of examples before and after the exchange. images: received images by
    class, (m, C, H, W), decoded from codes. n_own: number of codes (latent vectors) that all clients sent. model:
    number of parameters of encoder and classifier. decoder: number of parameters of the decoder. latent: dimension of a
    code. preliminary: number of rounds of stage I, before the exchange.
    """

    before: np.ndarray
    after: np.ndarray
    images: Mapping[int, np.ndarray]
    n_own: int
    model: int
    decoder: int
    latent: int
    preliminary: int


def read(run: Path) -> Exchange | None:
    """Read the exchange from a FedDPMS run folder; None for other methods, and for runs that are still in stage I."""
    if read_config(run).algorithm != "feddpms":
        return None
    last = checkpoint.load_latest(run / "checkpoints", ClientMemory(folder=run / "memory"))
    codes = [data(x) for name, x in last.state.items() if name.startswith("codes/")] if last else []
    if last is None or not codes:
        return None
    before = np.array(read_class_counts(run))
    after, images = before.copy(), {}
    for client, memory in last.memory.items():
        if "images" in memory:
            for image, c in zip(data(memory["images"]).numpy(), data(memory["labels"]).tolist(), strict=True):
                after[client, c] += 1
                images.setdefault(c, []).append(image)
    decoder = sum(part.numel() for name, part in last.model.items() if name.startswith("decoder."))
    return Exchange(
        before, after, {c: np.stack(images[c]) for c in sorted(images)}, sum(map(len, codes)),
        last.model.buffer.numel() - decoder, decoder, codes[0].shape[1], int(data(last.state["last"])),
    )  # fmt: skip


def picture(path: Path, exchange: Exchange, dataset: str, smoke: bool) -> None:
    """Draw images per client and class before and after the exchange (red: received), and some decoded images."""
    classes = exchange.before.shape[1]
    names = NAMES.get(dataset, tuple(map(str, range(classes))))
    figure, ((left, middle, right),) = panels(1, 3, (13.5, 5.2))
    received = exchange.after - exchange.before
    for axes, counts, title in ((left, exchange.before, "before the exchange"),
                                (middle, exchange.after, "after it (red: received)")):  # fmt: skip
        class_counts(axes, counts, exchange.after.max(), f"images of each client, {title}")
        if max(counts.shape) <= 20 and dataset in NAMES:
            axes.set_xticks(range(classes), names, rotation=45, ha="right", rotation_mode="anchor")
    for i, c in zip(*np.nonzero(received), strict=True):
        middle.add_patch(Rectangle((c - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor="#c0392b", linewidth=1.5))
    rows = [np.concatenate(list(_padded(exchange.images[c])), axis=2) for c in exchange.images]
    if rows:
        canvas = np.concatenate(rows, axis=1).transpose(1, 2, 0).astype(float)
        canvas /= max(np.nanmax(canvas), 1)
        right.imshow(canvas.squeeze(-1) if canvas.shape[2] == 1 else canvas, cmap="gray")
        height = rows[0].shape[1]
        right.set_yticks([height * (i + 0.5) for i in range(len(rows))], [names[c] for c in exchange.images])
        right.set_xticks([])
        for i in range(1, max(IMAGES, len(rows))):
            right.axhline(height * i - 0.5, color="w", linewidth=2)
            right.axvline(height * i - 0.5, color="w", linewidth=2)
        right.set(xlim=(-0.5, canvas.shape[1] - 0.5), ylim=(canvas.shape[0] - 0.5, -0.5), ylabel="class, if any came")
    right.set(title=f"decoded images, {IMAGES} of a class")
    figure.suptitle(f"FedDPMS, {dataset}: what each client has, and the images that clients decoded from codes")
    save(figure, path, 110, smoke)


def _padded(images: np.ndarray) -> np.ndarray:
    """Return the first ``IMAGES`` images; blank images (NaN) stand in place of missing images."""
    some = images[:IMAGES]
    return np.concatenate([some, np.full((IMAGES - len(some), *images.shape[1:]), np.nan)])
