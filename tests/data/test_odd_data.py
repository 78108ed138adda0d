"""User-defined data sets: read as the obvious conversion has it or refused in one sentence, drawn once, and hashed."""

import io
import json
import random
import re
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from PIL import Image
from pytorch_lightning import LightningModule
from rich.console import Console
from safetensors import safe_open
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedcommons import Examples, Source, UserError, experiment
from fedcommons import run as whole_run
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.dotted import choose, override
from fedcommons.config.schema import Data
from fedcommons.data import datasets, user_data
from fedcommons.data.examples import Dataset
from fedcommons.runs import assemble, build, model_files
from fedcommons.runs.build import load
from fedcommons.tune.sweep import Trial, todo

DRAWS = np.random.default_rng(0)
N = 20
X = DRAWS.standard_normal((N, 4))
Y = np.arange(N) % 3
GREY = DRAWS.integers(0, 256, (N, 8, 8), dtype=np.uint8)
RGB = DRAWS.integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)


class Arrays:
    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype=dtype)

    def __getitem__(self, i: int) -> "Arrays":
        return Arrays(self.array[i])

    def __len__(self) -> int:
        return len(self.array)


class Rows(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def pictures(images: np.ndarray, mode: str | None = None) -> list[tuple[Image.Image, int]]:
    each = [Image.fromarray(image) for image in images]
    return [(image.convert(mode) if mode else image, int(y)) for image, y in zip(each, Y, strict=True)]


def both(x: Any = X, y: Any = Y, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(train=(x, y), test=(x, y), **more)


ACCEPTED: dict[str, tuple[Any, np.ndarray]] = {
    "big endian": ((X.astype(">f8"), Y.astype(">i4")), X),
    "negative strides": ((X[::-1], Y[::-1]), X),
    "what cannot be written to": (both(np.frombuffer(X.tobytes()).reshape(N, 4), np.frombuffer(Y.tobytes(), int)), X),
    "an array of another library": ((Arrays(X), Arrays(Y)), X),
    "datasets that are sequences": ((UserList([*zip(X, Y, strict=True)]),) * 2, X),
    "random_split's list": ([TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)) for _ in range(2)], X),
    "colour pictures": (pictures(RGB), RGB.transpose(0, 3, 1, 2)),
    "rows that are dicts": ([{"image": x, "label": y} for x, y in zip(GREY, Y, strict=True)], GREY[:, None]),
    "groups that are words": ((X, Y, np.array(["ward", "clinic"])[Y % 2]), X),
}  # fmt: skip


def forms(y: np.ndarray) -> Iterator[tuple[str, Any]]:
    t, numbers = torch.from_numpy(y), y.tolist()
    yield "a column", (X, y[:, None])
    yield "tensors", (torch.from_numpy(X), t)
    yield "lists", (X.tolist(), numbers)
    yield "pandas", (pd.DataFrame(X), pd.Series(y))
    yield "columns by name", {"x": X, "y": y}
    yield "Examples", Examples(torch.from_numpy(X).float(), t)
    yield "rows of numpy's numbers", list(zip(X, y, strict=True))
    yield "rows by name", [{"x": row, "y": label} for row, label in zip(X, numbers, strict=True)]
    yield "TensorDataset", TensorDataset(torch.from_numpy(X), t)
    if find_spec("datasets"):
        from datasets import Dataset, DatasetDict

        yield "Hugging Face", (its := Dataset.from_dict({"x": X.tolist(), "y": numbers}))
        yield "its columns", (its["x"], its["y"])
        yield "train alone, as load_dataset returns", DatasetDict({"train": its})


@pytest.mark.parametrize(("returned", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_can_be_read_is_read_as_it_is(returned: Any, expected: np.ndarray) -> None:
    result = user_data.read("mine", returned)[0]
    expected = expected.astype({"f": np.float32, "i": np.int64, "u": np.uint8}[expected.dtype.kind])
    both_parts = [pair for part in (result.train, result.test) for pair in zip(part.x.numpy(), part.y, strict=True)]
    wanted = zip(expected, Y, strict=True)
    assert {(x.tobytes(), int(y)) for x, y in both_parts} == {(x.tobytes(), int(y)) for x, y in wanted}
    assert (result.train.x.numpy().dtype, result.n_classes) == (expected.dtype, 3)
    assert result.train.x.is_contiguous()
    if expected.dtype == np.uint8:
        channels = result.train.x.double().div(255).movedim(1, 0).flatten(1)
        assert (result.mean, result.std) == (pytest.approx(channels.mean(1).tolist()), pytest.approx(channels.std(1)))


@pytest.mark.parametrize(
    ("y", "n_classes"),
    [(Y.astype("f2"), None), (Y / 7, None), (Y, 3), (Y.astype("u1"), 3), (Y > 0, 2)],
    ids=["short whole floats", "floats", "whole numbers", "bytes", "truths"],
)
def test_the_type_of_labels_says_whether_they_are_classes_in_every_form(y: np.ndarray, n_classes: int | None) -> None:
    kinds = {}
    for form, returned in forms(y):
        result = user_data.read("mine", returned)[0]
        kinds[form] = result.n_classes, result.train.y.dtype, tuple(result.train.y.shape[1:])
    assert set(kinds.values()) == {(n_classes, torch.int64 if n_classes else torch.float32, ())}, kinds


@pytest.mark.parametrize("y", [np.arange(N) % 3 + 1, np.where(Y == 2, 255, Y)], ids=["from 1", "255 as ignore"])
def test_labels_with_gaps_are_refused_in_every_form_unless_the_number_of_classes_is_stated(y: np.ndarray) -> None:
    for _, returned in forms(y):
        with pytest.raises(UserError, match="the 3 different labels are not 0 to 2, so classes are empty: "):
            user_data.read("mine", returned)
    n = int(y.max()) + 1
    assert user_data.read("mine", both(y=y, n_classes=n, normalised=True))[0].n_classes == n
    assert user_data.read("mine", {"x": X, "y": y, "n_classes": n})[0].n_classes == n
    assert user_data.read("mine", (X, np.unique(y, return_inverse=True)[1]))[0].n_classes == len(set(y.tolist()))


class Mixture:
    def __init__(self, *draws: Callable[[], float], x: np.ndarray = X) -> None:
        self.draws, self.x = draws, x

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.x[i % N] * (1 + 0.01 * self.draws[i]()), int(Y[i % N])


def test_random_rows_are_noticed_and_drawn_once() -> None:
    def notes(returned: Any) -> Sequence[str]:
        return user_data.read("mine", returned)[1].notes

    draws: list[Callable[[], float]] = [lambda: float(torch.rand(())), random.random, DRAWS.random]
    for draw in draws:
        for returned in (Mixture(*[draw] * N), (Mixture(*[lambda: 0.0] * N), Mixture(*[draw] * N))):
            assert [note for note in notes(returned) if "returns random rows" in note]
        assert notes(Mixture(*[lambda: 0.0] * 100, draw))  # a late one
    assert notes(Mixture(*[lambda: float(torch.rand(()) > 2)] * N)) == ()  # what is drawn changes nothing


def test_constants_count_in_a_dict_an_object_and_on_the_sets_of_a_pair() -> None:
    constants = {"n_classes": 7, "mean": 5.0, "std": 2.0}
    mixture = Mixture(*[lambda: 0.0] * N, x=2 * X + 5)
    vars(mixture).update(constants)
    whole = SimpleNamespace(train=(2 * X + 5, Y), test=(2 * X + 5, Y), **constants)
    alone = {"train": (2 * X + 5, Y), **constants}
    for returned in ({"x": 2 * X + 5, "y": Y, **constants}, alone, {**vars(whole)}, whole, mixture, (mixture, mixture)):
        result = user_data.read("mine", returned)[0]
        assert (result.n_classes, result.computed) == (7, ())
        rows, plain = (set(map(tuple, x.round(3))) for x in (result.train.x.numpy(), X.astype("f4")))
        assert rows <= plain
    stated, origin = user_data.read("mine", both(y=Y.astype(float), n_classes=3, normalised=True))
    assert (stated.n_classes, stated.train.y.dtype, origin.notes) == (3, torch.int64, ())
    assert ["labels are floats" in note for note in user_data.read("mine", (X, Y.astype(float)))[1].notes] == [True]
    with pytest.raises(UserError, match=r"data\.augment must be false"):
        datasets.load("mine", lambda: mixture, augment=True)


@pytest.mark.parametrize(("x", "expected"), [(X, [[5.0], [2.0]]), ((X * 9).astype("u1").reshape(N, 1, 2, 2), None)])
def test_a_model_file_states_by_what_floating_examples_were_normalised(x: Any, expected: Any, tmp_path: Path) -> None:
    data = datasets.load("mine", lambda: both(x, mean=5.0, std=2.0))
    model_files.write(tmp_path / "model.safetensors", LightningModule(), 1, data)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        form = json.loads(file.metadata()["fedcommons"])
    assert form.get("normalised_by") == expected


def test_what_its_author_changes_afterwards_is_not_in_the_data_set(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r+")
    start = SimpleNamespace(train=(x, Y.copy()), test=(x, Y.copy()), normalised=True)
    result = datasets.load("mine", lambda: start, validation=0.2)
    before = result.digest, replace(result).digest
    x[:], start.train[1][:], start.test[1][:] = 0, 0, 0
    assert before == (result.digest, replace(result).digest)


REFUSED: dict[str, tuple[Any, str]] = {
    **{f"n_classes {n!r}": (both(n_classes=n), "n_classes must be a whole number") for n in (0, 10**9, True, 2.5)},
    "classes that are floats": (both(y=Y + 0.5, n_classes=3), "n_classes is 3, but the labels are floats (20,)"),
    "too few classes": (both(n_classes=2), "n_classes is 2, but some labels are larger"),
    "complex": ((X + 1j, Y), "got ndarray of complex128"),
    "numbers of 64 bits": ((np.full((N, 4), 2**64 - 1, np.uint64), Y), "at most 2^63 - 1, but some are larger."),
    "masked": ((np.ma.masked_array(X, X > 0), Y), "examples must not be masked"),
    "a sparse matrix": ((scipy.sparse.csr_matrix(X), Y), "give x.toarray()"),
    "a label of 10^9": ((X, Y * 10**9), "labels must be 0, 1, ..., at most 999999, but some are larger"),
    "a negative label": ((X, Y - 1), "labels must be 0, 1, ..., at most 999999, but some are negative"),
    "one-hot labels": ((X, np.eye(3)[Y]), "labels are one-hot (20, 3): return y.argmax(1)"),
    "a label that is NaN": ((X, np.where(Y > 1, np.nan, Y)), "labels must be finite numbers"),
    "labels in training only": (SimpleNamespace(train=(X, Y), test=(X, None), normalised=True), "both have labels"),
    "single numbers": ((np.float64(3), np.int64(3)), "one for each of the 0 examples"),
    "fewer labels": ((X, Y[:5]), "one for each of the 20 examples, got (5,)"),
    "other test shapes": (((X, Y), (X[:, :2], Y)), "training examples are (4,) torch.float32, and test examples (2,)"),
    "rows of two lengths": ([(X[0][: 2 + i % 2], 0) for i in range(N)], "all examples must have the same shape"),
    "one infinity": ((np.where(X.max() == X, np.inf, X), Y), f"infinity in column {X.argmax() % 4}"),
    "a text column": ((pd.DataFrame({"age": Y, "sex": ["m"] * N}), Y), "column 'sex' contains str."),
    "a frame with NaN": ((pd.DataFrame({"age": Y, "bp": np.nan}), Y), "contain NaN or infinity in column 'bp'"),
    "large numbers": ((X + 9, Y), "such as {'train': (x, y), 'test': (x, y), 'normalised': True}"),
    "NaN in a Source": (Source(Examples(torch.full((4, 2), torch.nan), torch.arange(4)),
                               Examples(torch.zeros(4, 2), torch.arange(4)), 4, (0.0,), (1.0,)), "4 of 4 contain NaN"),
    "three means for one channel": (both(X.reshape(N, 1, 2, 2), mean=(0, 0, 0), std=(1, 1, 1)),
                                    "mean must be a finite number for each channel (1 here), got (0, 0, 0)"),
    **{f"std {std}": (both(mean=0, std=std), f"a finite number above 0 for each channel (4 here), got {std}")
       for std in (0, np.nan)},
    "a tiny std": (both(mean=0, std=1e-300), "not finite after they are normalised"),
    "a mean alone": (both(mean=0.0), "must have both mean and std, or neither"),
    "a generator": (((x, y) for x, y in zip(X, Y, strict=True)), "got generator; give list(rows)"),
    **{f"a tuple of {n}": ((X,) * n, "must return (x, y), (x, y, groups), a dict {'x': x, 'y': y}") for n in (0, 1, 4)},
    "no length": (Rows(), "a map-style Dataset must have a length"),
    "DataLoader": (DataLoader(pictures(RGB)), "got DataLoader; give its .dataset"),  # pyright: ignore
    "rows without a label": ([{"image": x, "fine_label": 0} for x in GREY], "must be named y or label or target"),
    "a factor of another length": ({"x": X, "y": Y, "factors": {"year": Y[1:]}}, "factor year must be one number"),
    "a misspelt test set": ({"train": (X, Y), "tset": (X, Y)}, "or sets named train and test"),
    "train that is nothing": (SimpleNamespace(train=None, test=(X, Y)), "must each be (x, y) or a map-style Dataset"),
    "a palette": (pictures(RGB, "P"), "images of mode L or RGB, such as image.convert('RGB'), got 'P'"),
    "an array of four channels": ((np.concatenate([RGB, RGB[..., :1]], 3), Y), "must have the 4 channels first"),
}  # fmt: skip


@pytest.mark.parametrize(("returned", "words"), REFUSED.values(), ids=REFUSED)
def test_every_invalid_data_set_is_refused_with_one_sentence(returned: Any, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as error:
        user_data.read("my_data.py:Photos", returned)
    assert str(error.value).startswith("data set my_data.py:Photos")
    assert "\n" not in str(error.value)


IMAGES, CLASSES = DRAWS.integers(0, 256, (90, 8, 8), dtype=np.uint8), np.arange(90) % 3
TWO = {"partition.name": "iid", "partition.n_clients": 2, "model.name": "linear"}


class Turned:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(1, 8, 8) + random.random() + np.random.rand()  # noqa: NPY002
        return (4 * i + 9 * noise).clamp(0, 255).to(torch.uint8), i % 3


class RandomRows:
    def __init__(self, seed: int, n: int = 50) -> None:
        draws = np.random.RandomState(seed)  # it takes seeds below 2^32 only
        x, y = draws.standard_normal((n, 5)), draws.randint(0, 3, n)
        self.train, self.test, self.normalised = (x[10:], y[10:]), (x[:10], y[:10]), True


def with_a_default(seed: int = 3, n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    return draws.standard_normal((n, 5)), draws.integers(0, 3, n)


def shaded(sign: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    return IMAGES[:60] // int(3 + np.copysign(2, sign)), CLASSES[:60]


class Images:
    train, test = (IMAGES[:60], CLASSES[:60]), (IMAGES[60:], CLASSES[60:])


class Rare(Images):
    train, mean, std = (IMAGES[:60], np.where(np.arange(60) == 7, 3, CLASSES[:60])), 0.5, 0.3


class Stated(Images):
    mean, std, n_classes = 0.5, 0.3, 3


def _state() -> tuple[object, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), list(keys), rest, random.getstate()


@pytest.mark.long
def test_a_random_transform_is_drawn_once_by_the_name_of_the_data_set(tmp_path: Path, untimed: None) -> None:
    first = load(Data(name=f"{__file__}:Turned"))
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the one that transforms draw from)
    random.seed(1)
    before = _state()
    assert load(Data(name=f"{__file__}:Turned")).digest == first.digest
    assert _state() == before
    config = choose({"data.name": f"{__file__}:Turned", "measure.every": 0, **TWO})
    configs = [override(config, {"seed": seed}) for seed in (0, 1)]
    assert {build.build(config).dataset.digest for config in configs} == {first.digest}
    screen = io.StringIO()
    with Display(Console(file=screen, width=1000)) as display:
        todo([Trial(f"seed={config.seed}", config) for config in configs], tmp_path / "out", display)
    assert screen.getvalue().count("returns random rows") == 1  # a sweep reports it once


def test_constants_that_are_equal_but_written_differently_do_not_share_a_data_set() -> None:
    configs = [choose({"data.name": f"{__file__}:shaded", "data.sign": sign, **TWO}) for sign in (0.0, -0.0)]
    first = build.build(configs[0])
    assert (
        build.build(configs[1], first).dataset.digest == build.build(configs[1]).dataset.digest != first.dataset.digest
    )


@pytest.mark.long
def test_a_seed_without_a_default_is_passed_and_the_same_in_all_runs_and_one_with_a_default_is_a_constant() -> None:
    assert set(registry.constants("data", f"{__file__}:RandomRows")) == {"n"}
    configs = [choose({"data.name": f"{__file__}:RandomRows", "seed": seed, **TWO}) for seed in (0, 1)]
    assert not any("data.seed" in config.flat for config in configs)
    assert len({build.build(config).dataset.digest for config in configs}) == 1
    assert choose({"data.name": f"{__file__}:with_a_default"}).flat["data.seed"] == 3
    first, other = (load(choose({"data.name": f"{__file__}:with_a_default", "data.seed": s}).data) for s in (3, 4))
    assert first.digest != other.digest


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool])
def test_the_hash_is_of_names_shapes_types_and_bytes(dtype: torch.dtype) -> None:
    def dataset(x: torch.Tensor, y: torch.Tensor, validation: int = 2, test: int = 3) -> Dataset:
        each = {"train": slice(5, None), "validation": slice(0, validation), "test": slice(0, test)}
        of_parts: dict[str, Any] = {name: Examples(x[rows], y[rows]) for name, rows in each.items()}
        return Dataset(name="mine", n_classes=3, mean=(0.0,), std=(1.0,), augment=False, **of_parts)

    x = (torch.arange(80).view(10, 2, 2, 2) % 2).to(dtype)
    y = torch.arange(10) % 3
    hashes = [dataset(x, y).digest]
    for part in ("train", "validation", "test"):
        changed = getattr(base := dataset(x, y), part)
        other_x, other_y = changed.x.clone(), changed.y.clone()
        other_x[-1, -1, -1, -1] = 1 - other_x[-1, -1, -1, -1].int()
        other_y[-1] += 1
        for examples in (Examples(other_x, changed.y), Examples(changed.x, other_y)):
            hashes.append(replace(base, **{part: examples}).digest)
    hashes += [other.digest for other in (dataset(x.flatten(2), y), dataset(x, y.int()), dataset(x, y, 2, 2))]
    named: list[dict[str, Any]] = [{"groups": y[5:]}, {"factors": {"a": y[5:]}}, {"factors": {"b": y[5:]}}]
    hashes += [replace(base, train=replace(base.train, **more)).digest for base in [dataset(x, y)] for more in named]
    assert len(set(hashes)) == len(hashes)
    in_another_order = x.transpose(2, 3).contiguous().transpose(2, 3)  # in memory
    assert dataset(in_another_order, y).digest == hashes[0]


SCALES, NUMBER = "mean and standard deviation of all clients' images", "number of classes of all clients"

FIELDS = {"model.name": "linear", "dp.local": True, "federation.rounds": 1, "client.epochs": 1, "data.limit": None,
          "measure.every": 0, "wandb": "off", "data.validation": 0.0}  # fmt: skip


@pytest.mark.long
def test_what_all_clients_examples_decide_before_round_1_is_released(tmp_path: Path) -> None:
    """The sum of an image's pixels could be read off the mean; a run that discloses it reports no epsilon."""
    rows: list[tuple[str, dict[str, object], list[str]]] = [
        ("Images", {}, [SCALES]), ("Images", {"data.standardise": False}, []),
        ("Stated", {}, []), ("Rare", {}, [NUMBER]),
    ]  # fmt: skip
    for data, more, uncovered in rows:
        config = experiment("smoke", values={**FIELDS, "data.name": f"{__file__}:{data}", **more})
        releases = assemble.assemble(build.build(config)).shared.releases
        assert [(event.what, event.covered) for event in releases] == [((what,), False) for what in uncovered] * 4
    for data, leaks in (("Images", True), ("Stated", False)):
        messages: list[str] = []
        config = experiment("smoke", values={**FIELDS, "data.name": f"{__file__}:{data}"})
        result = whole_run(config, tmp_path / data, say=messages.append).summary["privacy"]
        assert json.loads((tmp_path / data / "partition.json").read_text())["data"] == load(config.data).digest
        spent = result["epsilon_local_training_if_secret"]
        assert (result["epsilon_of_messages_if_secret"] is None) == (spent["largest"] is None) == leaks
        assert any(SCALES in line for line in messages) == leaks
        assert sum(line.startswith(SCALES) for line in result["uncovered"]) == leaks
