"""MNIST-like files that are damaged or do not fit each other: refused in one sentence, before any work."""

import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from idx_files import FILES, idx

from fedcommons.config import presets
from fedcommons.config.schema import Data
from fedcommons.errors import UserError
from fedcommons.runs import build
from fedcommons.runs.build import load


def images(n: int, side: int = 28) -> np.ndarray:
    return np.arange(n * side * side).reshape(n, side, side) % 256


def labels(n: int, classes: int = 10) -> np.ndarray:
    return np.arange(n) % classes


WHOLE = {"train_images": idx(images(50)), "train_labels": idx(labels(50)),
         "test_images": idx(images(20)), "test_labels": idx(labels(20))}  # fmt: skip


def mnist(root: Path, **changed: bytes | None) -> Data:
    """MNIST's four files with 50 and 20 images, some of them changed; None: not there."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in {**WHOLE, **changed}.items():
        if content is not None:
            (raw / FILES[name]).write_bytes(content)
    return Data(name="mnist", dir=str(root))


def refused(data: Data) -> str:
    with pytest.raises(UserError, match=f"data set {data.name} ") as error:
        load(data)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_whole_files_are_read_and_images_too_small_for_the_network_refused(tmp_path: Path) -> None:
    dataset = load(mnist(tmp_path / "whole"))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (45, 5, 20)
    assert dataset.test.x[0, 0].numpy().tolist() == images(1)[0].tolist()
    data = mnist(tmp_path / "small", train_images=idx(images(50, 3)), test_images=idx(images(20, 3)))
    fields = {"data.name": "mnist", "data.dir": data.dir, "data.limit": 40}
    with pytest.raises(UserError, match=r"model\.name cnn .*4x4"):
        build.build(presets.experiment("smoke", "mnist", fields))


BAD: dict[str, tuple[dict[str, bytes | None], str]] = {
    "train images truncated": ({"train_images": idx(images(50))[:-9]}, "delete that folder and get it"),
    "no such file": ({"test_images": None}, "is damaged"),
    "an immense header": ({"train_images": struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3)}, "is damaged"),
    "labels for images": ({"train_images": idx(labels(50))}, "is damaged"),
    "float images": ({"train_images": idx(images(50), 13)}, "torch.uint8"),
    "fewer labels": ({"train_labels": idx(labels(49))}, "50 training images and 49 labels"),
    "a test label of 10": ({"test_labels": idx(labels(20, 11))}, "test labels lie in [0, 10]"),
    "other test shapes": ({"test_images": idx(images(20, 20))}, "test images (1, 20, 20)"),
    "not square": ({"train_images": idx(images(50)[:, :20]), "test_images": idx(images(20)[:, :20])}, "20x28"),
    "no images": ({"train_images": idx(images(0)), "train_labels": idx(labels(0))}, "is damaged"),
    "no pixels": ({"train_images": idx(images(50, 0)), "test_images": idx(images(20, 0))}, "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "part"), BAD.values(), ids=BAD)
def test_damaged_files_are_refused_in_one_sentence(changed: dict[str, bytes | None], part: str, tmp_path: Path) -> None:
    assert part in refused(mnist(tmp_path, **changed))


ODD: dict[str, Callable[[Path], object]] = {
    "another object": lambda path: path.write_bytes(pickle.dumps([1, 2])), "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"), "a FIFO": os.mkfifo,
    "a sparse file of a terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
}  # fmt: skip
CIFAR = {
    "cifar10": ("cifar-10-batches-py", [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]),
    "cifar100": ("cifar-100-python", ["train", "test", "meta"]),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_file_of_the_data_set_is_not_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    """In the place of a file, of a folder, and of CIFAR's first file."""
    messages = []
    for name in ("MNIST/raw/train-images-idx3-ubyte", "MNIST"):
        data = mnist(root := tmp_path / str(len(messages)))
        (root / name).unlink() if not messages else shutil.rmtree(root / name)
        make(root / name)
        messages.append(refused(data))
    for name, (folder, (first, *_)) in CIFAR.items():
        (tmp_path / folder).mkdir()
        make(tmp_path / folder / first)
        messages.append(refused(Data(name=name, dir=str(tmp_path))))
    assert all("is damaged" in text or "is not there" in text for text in messages)
    if make is ODD["a sparse file of a terabyte"]:
        assert "train-images-idx3-ubyte has 1,099,511,627,776 bytes" in messages[0]


def test_a_folder_that_cannot_be_read_is_refused(as_nobody: Callable[[Callable[[], None]], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        data = mnist(Path(folder))
        Path(folder, "MNIST", "raw").chmod(0)
        as_nobody(lambda: None if "is damaged" in refused(data) else pytest.fail("read"))
        Path(folder, "MNIST", "raw").chmod(0o755)


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_no_strangers_pickle_is_run(tmp_path: Path) -> None:
    """CIFAR's files are pickles; and torchvision reads MNIST from ``processed``, where it is, as it once wrote it."""
    written = tmp_path / "written"
    for folder, names in CIFAR.values():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_bytes(pickle.dumps(Runs(written)))
    (tmp_path / "MNIST" / "processed").mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save(Runs(written), tmp_path / "MNIST" / "processed" / name)
    for name in (*CIFAR, "mnist"):
        refused(Data(name=name, dir=str(tmp_path)))
    assert not written.exists()
