"""Folders of images that are damaged, and data sets of one's own of odd types."""

import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from faults import cases, damage, places
from faults.cases import Case
from faults.places import TINY
from faults.processes import Ended
from faults.right import HEAD
from faults.runs import Script
from faults.verdicts import Fault, last

X = {
    "uint8": "np.arange(60 * 64, dtype=np.uint8).reshape(60, 8, 8)", "float32": "n.astype('f4')",
    "images in float": "np.random.default_rng(0).normal(size=(60, 3, 8, 8)).astype('f4')",
    "tokens": "np.arange(300).reshape(60, 5) % 7",
}  # fmt: skip
"""Right examples."""

TO_REFUSE_X = {
    "all nan": "np.full((60, 5), np.nan, 'f4')",
    "a nan": "[a := np.zeros((60, 5), 'f4'), a.__setitem__((3, 3), np.nan)][0]",
    "inf": "[a := np.zeros((60, 5), 'f4'), a.__setitem__((3, 3), np.inf)][0]", "object": "np.array([object()] * 60)",
    "objects of numbers": "np.ones((60, 5), dtype=object) * 10**400", "strings": "np.array(['a'] * 60)",
    "bytes": "np.array([b'a'] * 60)",
    "dates": "np.zeros((60, 5), 'M8[s]')", "complex": "np.zeros((60, 5), complex)",
    "structured": "np.zeros(60, [('a', 'f4'), ('b', 'i4')])",
    "no numbers": "np.zeros((60, 0), 'f4')", "0-d": "np.float32(3)", "none": "np.zeros((0, 5), 'f4')",
    "meta": "torch.zeros(60, 5, device='meta')",
    "None": "None", "a text": "'x' * 60", "an int": "3", "huge": "np.broadcast_to(np.float32(0), (10**9, 1000))",
    "a dict": "{i: [0.0] for i in range(60)}",
    "huge pixels": "np.broadcast_to(np.uint8(0), (60, 10**5, 10**5))",
    "5-D uint8": "np.zeros((60, 1, 1, 8, 8), np.uint8)", "1-D uint8": "np.zeros(60, np.uint8)",
    "NaN in float16": "np.full((60, 5), np.nan, 'f2')", "ragged": "[[1.0] * (i % 3 + 1) for i in range(60)]",
    "an iterator": "iter([[1.0]] * 60)",
    "sparse": "torch.eye(60).to_sparse()",
    "quantised": "torch.quantize_per_tensor(torch.zeros(60, 5), 0.1, 0, torch.quint8)",
}  # fmt: skip
"""Examples that nobody can train on."""

TO_TAKE_X = {
    "big-endian": "n.astype('>f4')", "negative strides": "n.astype('f4')[::-1]", "float64": "n",
    "float16": "n.astype('f2')",
    "bool": "n > 0", "masked": "np.ma.masked_array(n, n > 1)",
    "not writable": "[a := n.astype('f4'), a.setflags(write=False)][0]",
    "requires grad": "torch.tensor(n, requires_grad=True)", "bfloat16": "torch.tensor(n).bfloat16()",
    "uint16": "np.zeros((60, 5), 'u2')", "int8": "np.zeros((60, 5), 'i1')",
    "uint64": "np.full((60, 5), 2**63, 'u8')", "a list": "n.tolist()", "Fortran": "np.asfortranarray(n, 'f4')",
    "pandas": "__import__('pandas').DataFrame(n)",
    "huge values": "n.astype('f4') * 3e37", "denormal": "n.astype('f4') * 1e-40", "a matrix": "np.matrix(n)",
    "longdouble": "n.astype(np.longdouble)",
    "2 channels": "np.zeros((60, 2, 8, 8), np.uint8)", "channels last": "np.zeros((60, 8, 8, 3), np.uint8)",
    "one pixel": "np.zeros((60, 1, 1), np.uint8)", "subclass": "torch.nn.Parameter(torch.tensor(n))",
    "negative tokens": "np.full((60, 5), -1)", "large tokens": "np.full((60, 5), 10**12)",
    "expanded": "torch.tensor(n)[:, :1].expand(60, 5)", "conjugate": "torch.tensor(n).conj()",
}  # fmt: skip
"""Examples that may be refused, or trained on."""

TO_REFUSE_Y = {
    "10**9": "np.arange(60) % 3 + 10**9", "2**63": "np.full(60, 2**63, 'u8')", "10**30": "[10**30] * 60",
    "negative": "np.arange(60) % 3 - 1", "floats": "np.arange(60) % 3 + 0.5",
    "nan": "np.full(60, np.nan)", "strings": "np.array(['a', 'b', 'c'] * 20)", "objects": "np.array([None] * 60)",
    "2-D": "np.zeros((60, 2), int)", "0-d": "np.int64(1)", "shorter": "np.arange(59) % 3",
    "longer": "np.arange(61) % 3", "none": "np.zeros(0, int)", "None": "None", "a text": "'012' * 20",
    "complex": "np.zeros(60, complex)", "dates": "np.zeros(60, 'M8[s]')",
    "meta": "torch.zeros(60, dtype=torch.int64, device='meta')",
    "a dict": "{i: 0 for i in range(60)}", "one-hot": "np.eye(3)[np.arange(60) % 3]",
    "10**7": "np.arange(60) % 3 + 10**7",
}  # fmt: skip

TO_TAKE_Y = {
    "right": "np.arange(60) % 3", "bool": "np.arange(60) % 2 == 0", "uint8": "(np.arange(60) % 3).astype('u1')",
    "big-endian": "(np.arange(60) % 3).astype('>i8')", "one class": "np.zeros(60, int)",
    "a gap": "np.arange(60) % 2 * 5", "a list": "[i % 3 for i in range(60)]",
    "negative strides": "(np.arange(60) % 3)[::-1]", "uint64": "(np.arange(60) % 3).astype('u8')",
    "whole floats": "(np.arange(60) % 3).astype(float)",
    "every other": "(np.arange(120) % 3)[::2]", "1000 classes": "np.arange(60) * 17",
}  # fmt: skip

RETURNS = (
    "x, y", "(x, y), (x, y)", "(x, y), (x[:0], y[:0])", "type('D', (), {'train': (x, y), 'test': (x, y)})()", "[x, y]",
    "{'train': (x, y), 'test': (x, y)}", "x, y, 3", "x", "(x,)",
    "(x, y), (x[:, :1], y)", "(x, y), (x, y), (x, y)",
    "torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))", "list(zip(x, y))", "zip(x, y)",
    "iter([(x, y)])", "(x, y), None",
)  # fmt: skip
"""What a data set may give with them."""

ATTRIBUTES = (
    "mean=(0.5,), std=(-1.0,)", "mean=(0.5,), std=(0.0,)", "mean=(0.5,), std=(float('inf'),)",
    "mean=(float('nan'),), std=(1.0,)", "mean=(0.5,) * 3, std=(1.0,) * 3", "mean=(0.5,), std=(1.0, 1.0)",
    "mean='x', std='y'", "mean=None, std=(1.0,)", "mean=0.5, std=1.0", "mean=(), std=()", "n_classes=2", "n_classes=0",
    "n_classes=-1", "n_classes='3'", "n_classes=3.5", "n_classes=10**9",
    "n_classes=float('nan')", "n_classes=None", "n_classes=True", "n_classes=[3]", "normalised='no'", "normalised=1",
    "flip='x'", "mean=torch.zeros(1), std=torch.ones(1)", "mean=(1e308,), std=(1e-308,)",
    "mean=np.zeros((2, 2)), std=np.ones((2, 2))", "mean=(0.5j,), std=(1.0,)", "mean=('0.5',), std=('1',)",
    "n_classes=10**30", "n_classes=3", "mean=(0.0,), std=(1.0,)",
)  # fmt: skip
"""What an object with train and test may say besides."""


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number."""
    rng = random.Random(f"data {seed} {number}")
    return rng.choice((_own, _own, _own, _own, _own, _mnist, _mnist, _cifar))(rng, scripts)


def _own(rng: random.Random, scripts: Mapping[str, Script]) -> Case:
    xs, ys = {**X, **TO_REFUSE_X, **TO_TAKE_X}, {**TO_REFUSE_Y, **TO_TAKE_Y}
    way = rng.random()
    x = rng.choice([*(xs if way < 0.5 else X)])
    y = "right" if way < 0.5 else rng.choice([*ys]) if way < 0.75 else "right"
    returned, must = ("x, y", x in TO_REFUSE_X or y in TO_REFUSE_Y) if way < 0.75 else (rng.choice(RETURNS), False)
    if way > 0.87:
        returned = f"type('D', (), dict(train=(x, y), test=(x, y), {rng.choice(ATTRIBUTES)}))()"
    fields = {
        **TINY,
        "data.name": "part.py:Mine",
        "model.name": "linear",
        "partition.name": "iid",
        "partition.n_clients": "2",
    }
    fields |= rng.choice(
        (
            {},
            {},
            {"dp.local": "true"},
            {"algorithm": "fedmix"},
            {"model.name": "convnet"},
            {"partition.name": "dirichlet_niid"},
        )
    )
    drawn = "n = np.random.default_rng(0).normal(size=(60, 5))"
    source = f"{HEAD}\ndef Mine():\n    {drawn}\n    x, y = {xs[x]}, {ys[y]}\n    return {returned}\n"

    def judge(here: Path, ended: Ended) -> list[Fault]:
        return (
            [Fault("silent", f"taken: examples {x}, labels {y}", last(ended.out))] if must else cases.whole(here, ended)
        )

    def write(here: Path) -> None:
        (here / "part.py").write_text(source)

    argv = [t for n, v in fields.items() for t in (f"--{n}", v)]
    what = f"examples {x}, labels {y}, {returned}, {' '.join(argv[-4:])}"
    return Case(what, cases.line(scripts["run"], *argv), write, judge)


def _wild(folder: Path, rng: random.Random) -> str:
    """Something else in the place of a file or folder of a data set."""
    found = sorted(folder.rglob("*"))
    path = rng.choice([*found, folder])
    way = rng.choice(damage.ANY)
    way(path, rng)
    return f"{path.relative_to(folder.parent)}{way.__name__}"


def _itself(folder: Path, rng: random.Random) -> str:
    inner = rng.choice([p for p in folder.rglob("*") if p.is_dir()])
    (inner / "again").symlink_to(folder)
    if rng.random() < 0.5:
        shutil.move(inner, folder.with_name("moved"))
        inner.symlink_to(rng.choice((folder, folder.with_name("moved") / "again", inner)))
        return "linked to itself"
    return "with a link to itself"


def _mnist(rng: random.Random, scripts: Mapping[str, Script]) -> Case:
    again, download = rng.randrange(10**9), rng.random() < 0.1

    def furnish(here: Path) -> str:
        draw, images = random.Random(again), here / "images"
        places.write_images(images)
        wild = draw.random() < 0.6
        return (draw.choice((_wild, _wild, _wild, _itself)) if wild else places.damage_images)(images, draw)

    return _folder("mnist", furnish, rng, scripts, download)


class _Runs:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ('touch "$PWNED"',)


def write_cifar(folder: Path) -> None:
    """Few images in CIFAR-10's format; their checksums cannot be CIFAR-10's."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = {"data": np.zeros((20, 3072), np.uint8), "labels": [i % 10 for i in range(20)]}
        (inner / name).write_bytes(pickle.dumps(batch))
    (inner / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def _cifar(rng: random.Random, scripts: Mapping[str, Script]) -> Case:
    again = rng.randrange(10**9)

    def furnish(here: Path) -> str:
        draw, images = random.Random(again), here / "images"
        write_cifar(images)
        path = draw.choice(sorted((images / "cifar-10-batches-py").iterdir()))
        way = draw.choice(("wild", "wild", "pickle", "type", "bytes"))
        if way == "pickle":
            path.write_bytes(pickle.dumps(_Runs()))
        elif way == "type":
            path.write_bytes(
                pickle.dumps(
                    draw.choice([None, 3, [], {}, {"data": 3}, {"data": np.zeros(3), "labels": "x"}, np.zeros(3)])
                )
            )
        elif way == "bytes":
            damage._bytes(path, draw)
        else:
            return draw.choice((_wild, _wild, _itself))(images, draw)
        return f"{path.name}, {way}"

    return _folder("cifar10", furnish, rng, scripts, rng.random() < 0.1)


def _folder(
    name: str, furnish: Callable[[Path], str], rng: random.Random, scripts: Mapping[str, Script], download: bool
) -> Case:
    fields = {**TINY, "data.name": name, "data.dir": "images", "model.name": "linear"}
    fields |= {"data.download": "true"} if download else {}
    fields |= {"measure.every": "0"}
    argv = [t for n, v in fields.items() for t in (f"--{n}", v)]
    environment = {
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }  # nothing comes from outside
    judge = lambda here, ended: cases.whole(here, ended)  # noqa: E731
    return Case(
        f"{name}{' download' * download}: ", cases.line(scripts["run"], *argv), furnish, judge, environment=environment
    )
