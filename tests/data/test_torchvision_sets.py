"""``torchvision:NAME``: tiny files in torchvision's own formats are read; what is missing or unknown is refused."""

import csv
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from idx_files import FILES, idx
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from fedcommons import experiment
from fedcommons.data.torchvision_sets import N_CLASSES, names
from fedcommons.runs.build import load

DRAWS = np.random.default_rng(0)
Sets = tuple[tuple[np.ndarray, np.ndarray], ...]
"""Images (n, H, W, C) or (n, H, W), and classes (n,), of the training and the test set."""


def draw_images(shape: tuple[int, ...], first: int = 0) -> Sets:
    """Return 30 training and 10 test images, whose classes are first, ..., first + 9."""
    return tuple((DRAWS.integers(0, 256, (n, *shape), np.uint8), np.arange(n) % 10 + first) for n in (30, 10))


def _sum(path: Path) -> str:
    return md5(path.read_bytes()).hexdigest()


def svhn(root: Path, patch: pytest.MonkeyPatch) -> Sets:
    sets = draw_images((32, 32, 3))
    for which, (x, y) in zip(("train", "test"), sets, strict=True):
        savemat(path := root / f"{which}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": np.where(y, y, 10)[:, None]})
        patch.setitem(datasets.SVHN.split_list, which, ["", path.name, _sum(path)])
    return sets


def stl10(root: Path, patch: pytest.MonkeyPatch) -> Sets:
    sets, folder = draw_images((96, 96, 3)), root / "stl10_binary"
    folder.mkdir()
    for which, (x, y) in zip(("train", "test"), sets, strict=True):
        (folder / f"{which}_X.bin").write_bytes(x.transpose(0, 3, 2, 1).tobytes())
        (folder / f"{which}_y.bin").write_bytes((y + 1).astype(np.uint8).tobytes())
    for listed in ("train_list", "test_list"):
        files = [folder / name for name, _ in getattr(datasets.STL10, listed)]
        files[-1].touch()
        patch.setattr(datasets.STL10, listed, [[path.name, _sum(path)] for path in files])
    (folder / "fold_indices.txt").write_text("0 1 2 3 4 5 6 7 8 9\n" * 10)
    return sets


def gtsrb(root: Path, patch: pytest.MonkeyPatch) -> Sets:
    (sets, base), rows = (draw_images((20, 20, 3)), root / "gtsrb"), []
    for which, (x, y) in zip(("GTSRB/Training", "GTSRB/Final_Test/Images"), sets, strict=True):
        for i, (image, label) in enumerate(zip(x, y, strict=True)):
            path = base / which / (f"{label:05}/{i:05}.ppm" if "Training" in which else f"{i:05}.ppm")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            rows.append({"Filename": path.name, "ClassId": label})
    with (base / "GT-final_test.csv").open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, ("Filename", "ClassId"), delimiter=";")
        table.writeheader()
        table.writerows(rows[-10:])
    (x, y), test = sets
    order = np.lexsort((np.arange(len(y)), y))  # torchvision reads class by class
    return (x[order], y[order]), test


def flowers102(root: Path, patch: pytest.MonkeyPatch) -> Sets:
    sets, base = draw_images((20, 20, 3)), root / "flowers-102"
    (base / "jpg").mkdir(parents=True)
    for i, image in enumerate(np.concatenate([x for x, _ in sets])):
        Image.fromarray(image).save(base / f"jpg/image_{i + 1:05}.jpg", format="png")  # compressed without loss
    savemat(base / "imagelabels.mat", {"labels": np.concatenate([y for _, y in sets]) + 1})
    savemat(base / "setid.mat", {"trnid": np.arange(1, 31), "tstid": np.arange(31, 41)})
    files = {which: (name, _sum(base / name)) for which, name in (("label", "imagelabels.mat"), ("setid", "setid.mat"))}
    patch.setattr(datasets.Flowers102, "_file_dict", files)
    return sets


def idx_files(kind: str, prefix: str = "", first: int = 0) -> Callable[[Path, pytest.MonkeyPatch], Sets]:
    def write(root: Path, patch: pytest.MonkeyPatch) -> Sets:
        sets, folder = draw_images((28, 28), first), root / kind / "raw"
        folder.mkdir(parents=True)
        for which, (x, y) in zip(("train", "test"), sets, strict=True):
            for what, array in (("images", x), ("labels", y)):
                name = FILES[f"{which}_{what}"]
                (folder / (prefix + name.replace("t10k", "test") if prefix else name)).write_bytes(idx(array))
        return sets

    return write


SETS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], Sets], dict[str, Any], int]] = {
    "SVHN": (svhn, {}, 10), "STL10": (stl10, {}, 10), "GTSRB": (gtsrb, {}, 43),
    "Flowers102": (flowers102, {}, 102), "KMNIST": (idx_files("KMNIST"), {}, 10),
    "EMNIST": (idx_files("EMNIST", "emnist-letters-", 1), {"data.subset": "letters"}, 27),
}  # fmt: skip


@pytest.mark.parametrize(("write", "fields", "n_classes"), SETS.values(), ids=SETS)
def test_files_in_torchvisions_format_are_read(
    write: Callable[[Path, pytest.MonkeyPatch], Sets], fields: dict[str, Any], n_classes: int,
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = f"torchvision:{request.node.callspec.id}"
    sets = write(tmp_path, monkeypatch)
    values = {"data": name, "data.dir": str(tmp_path), "data.validation": 0.0, "data.limit": None, **fields}
    data = load(experiment("smoke", values=values).data)
    assert (data.name, data.n_classes) == (name, n_classes)
    for part, (x, y) in zip((data.train, data.test), sets, strict=True):
        wanted = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
        assert (part.x.numpy() == wanted).all()
        assert part.y.tolist() == y.tolist()
    half = load(experiment("smoke", values={**values, "data.side": 14}).data)
    assert half.shape == (data.shape[0], 14, 14)


@pytest.mark.long
def test_a_command_trains_on_svhn_and_on_one_fold_of_stl10(
    command: Callable[..., CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    svhn(tmp_path, monkeypatch)
    stl10(tmp_path, monkeypatch)
    quick = [
        "--preset=smoke", "--rounds=1", "--clients=2", "--partition=iid", "--model=linear", "--wandb=off",
        "--data.limit=null",
    ]  # fmt: skip
    for words in (["--data=torchvision:SVHN"], ["--data=torchvision:STL10", "--stl10.folds=0", "--data.side=8"]):
        ended = command("run", *quick, *words, "--data.dir=.", f"--out=run{len(words)}", cwd=tmp_path)
        assert not ended.returncode, ended.stderr
        assert "source" not in (tmp_path / f"run{len(words)}/config.yaml").read_text(encoding="utf-8")


def test_every_named_set_is_one_of_torchvisions_and_has_fields() -> None:
    for name in names():
        assert "data.side" in experiment("smoke", values={"data": f"torchvision:{name}"}).flat
    assert all(hasattr(datasets, name) for name in N_CLASSES)


REFUSED = {
    "no such set": (["--data=torchvision:Nonsense"], ("data.name", "Nonsense", "SVHN")),
    "the nearest name": (["--data=torchvision:SVNH"], ("'torchvision:SVHN'",)),
    "other capitals": (["--data=svhn"], ("'torchvision:SVHN'",)),
    "no files": (["--data=torchvision:SVHN"], ("torchvision:SVHN", "--download", "{folder}")),
    "no such group": (["--data=torchvision:EMNIST", "--data.subset=leters"], ("data.subset", "'letters'")),
    "no such kind": (["--partition=torchvision:SVHN"], ("partition.name", "data")),
    "several shapes": (["--data=torchvision:GTSRB"], ("torchvision:GTSRB", "--data.side", "(20, 20, 3)")),
}


@pytest.mark.parametrize(("words", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    words: list[str], parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., CompletedProcess[str]],
) -> None:  # fmt: skip
    gtsrb(tmp_path, monkeypatch)
    Image.new("RGB", (9, 8)).save(tmp_path / "gtsrb/GTSRB/Training/00001/00001.ppm")
    ended = command("run", "--preset=smoke", *words, "--data.dir=.", "--out=run", cwd=tmp_path)
    assert (ended.returncode, len(ended.stderr.strip().splitlines())) == (2, 1), ended.stderr
    for part in parts:
        assert part.format(folder=tmp_path) in ended.stderr
    assert not (tmp_path / "run").exists()
