"""Rows of several inputs, of unequal length and with labels per position: two clients train as a slow loop does."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import quiet
from torch import Tensor
from torch.nn import functional as F

from fedcommons import Examples, UserError, experiment, load, run
from fedcommons.config import live_objects
from fedcommons.data import user_data
from fedcommons.runs.build import build
from lightning_modules.classifier import IGNORED

USER_FILE = """
import numpy as np
import torch
from lightning_modules import Classifier
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn.utils.rnn import pad_sequence

DRAWS = np.random.default_rng(0)
N, LENGTH = 40, 5
IDS, TAGS = DRAWS.integers(1, 9, (N, LENGTH)), DRAWS.integers(0, 3, (N, LENGTH))
LENGTHS, Y = DRAWS.integers(2, LENGTH + 1, N), np.arange(N) % 3
MASK = np.arange(LENGTH) < LENGTHS[:, None]
RAGGED = [row[:n] for row, n in zip(IDS, LENGTHS)]
IMAGES = DRAWS.integers(0, 256, (N, 1, 4, 4), dtype=np.uint8)


def named():
    return {"x": {"ids": IDS * MASK, "mask": MASK}, "y": Y}


def pair():
    return {"ids": IDS * MASK, "mask": MASK}, Y


def named_rows():
    return [({"ids": ids, "mask": mask}, y) for ids, mask, y in zip(IDS * MASK, MASK, Y.tolist())]


def ragged():
    return {"x": RAGGED, "y": Y, "pad": 0}


def named_ragged():
    return {"x": {"ids": RAGGED, "mask": [np.ones_like(row) for row in RAGGED]}, "y": Y, "pad": {"ids": 0, "mask": 0}}


class Collated:
    rows = list(zip(RAGGED, Y.tolist()))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.rows[i]

    def collate(self, rows):
        ids = pad_sequence([torch.as_tensor(row) for row, _ in rows], batch_first=True)
        return {"x": {"ids": ids, "mask": ids > 0}, "y": torch.tensor([y for _, y in rows])}


def tags():
    return IDS, TAGS


def ragged_tags():
    return {"x": RAGGED, "y": [row[:n].tolist() for row, n in zip(TAGS, LENGTHS)], "pad": 0}


def masks():
    return IMAGES, (IMAGES[:, 0] > 127).astype(int) + (IMAGES[:, 0] > 200)


def targets():
    return {"x": DRAWS.standard_normal((N, 4)), "y": DRAWS.standard_normal((N, 2)), "normalised": True}


class Bag(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 4), nn.Linear(4, n_classes)

    def forward(self, ids, mask):
        return self.last((self.embedding(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Padded(Bag):
    def forward(self, x):
        return super().forward(x, (x > 0).long())


class Tagger(Bag):
    def forward(self, x):
        return self.last(self.embedding(x)).movedim(-1, 1)


class Segmenter(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.last = nn.Conv2d(shape[0], n_classes, 3, padding=1)

    def forward(self, x):
        return self.last(x)


class Linear(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.last = nn.Linear(shape[0], n_classes)

    def forward(self, x):
        return self.last(x)


class Whole(LightningModule):
    def training_step(self, batch, number): ...


class OtherLoss(Classifier):
    def __init__(self):
        super().__init__(Padded(None, 3), lr=0.1)

    def training_step(self, batch, number):
        raise RuntimeError("a fault of another loss")
"""
ROWS = {
    "named": "Bag", "pair": "Bag", "named_rows": "Bag", "ragged": "Padded", "named_ragged": "Bag", "Collated": "Bag",
    "tags": "Tagger", "ragged_tags": "Tagger", "masks": "Segmenter", "targets": "Linear",
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(data: Any, model: Any, **values: Any) -> Any:
    fields = {
        "data": data, "model": model, "partition": "iid", "clients": 2, "rounds": 2,
        "epochs": 1, "batch_size": 100, "lr": 0.5, "data.limit": None, "wandb": "off", "measure.every": 0,
        "target": "loss <= 0.1", "federation.stop": "never",
    }  # fmt: skip
    return experiment("smoke", values={**fields, **values})


def each_loss(module: Any, examples: Examples) -> list[Tensor]:
    """Return the loss of each example, computed one example at a time and from its labelled positions alone."""
    losses = []
    for x, y in zip(examples.x, examples.y, strict=True):
        if module.inputs:
            parts = x.split([int(np.prod(shape)) for _, shape in module.inputs])
            named = {n: p.view(1, *shape) for (n, shape), p in zip(module.inputs, parts, strict=True)}
            out = module.network(**named)[0]
        else:
            out = module.network(module.normalise(x[None]) if x.dtype == torch.uint8 else x[None])[0]
        if y.is_floating_point():
            losses.append(F.mse_loss(out, y))
        else:
            out, y = out.reshape(len(out), -1).T, y.reshape(-1)
            losses.append(F.cross_entropy(out[y >= 0], y[y >= 0]))
    return losses


def slow(config: Any) -> tuple[Mapping[str, Tensor], float]:
    """Return the weights of FedAvg after two rounds of one full step per client, and the mean loss on the test set."""
    spec = build(config)
    module = spec.module(spec.dataset)
    for _ in range(2):
        models = []
        for rows in spec.partition.rows:
            local = deepcopy(module)
            torch.stack(each_loss(local, spec.train[rows])).mean().backward()
            models.append({n: p.detach() - 0.5 * p.grad for n, p in local.named_parameters() if p.grad is not None})
        module.load_state_dict({n: (models[0][n] + models[1][n]) / 2 for n in models[0]}, strict=False)
    with torch.no_grad():
        return dict(module.named_parameters()), float(torch.stack(each_loss(module, spec.dataset.test)).mean())


@pytest.mark.long
@pytest.mark.parametrize(("data", "model"), ROWS.items(), ids=ROWS)
def test_two_clients_train_on_all_kinds_of_rows_as_a_slow_loop_does(data: str, model: str, lab: Path) -> None:
    weights, loss = slow(asked(f"mine.py:{data}", f"mine.py:{model}"))
    for batched in (False, True):
        config = asked(f"mine.py:{data}", f"mine.py:{model}", **{"client.batched": batched})
        result = run(config, lab / f"run {batched}", say=quiet)
        for name, value in result.model.named_parameters():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
        assert result.rounds["test/loss"].iloc[-1] == pytest.approx(loss, rel=1e-4)
        assert ("test/accuracy" in result.rounds) == (data != "targets")
    saved = load(lab / "run True", may_run=[f"mine.py:{model}"]).model
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in result.model.state_dict().items())


@pytest.mark.parametrize("data", ROWS)
def test_rows_passed_from_python_are_read_as_those_of_a_function(data: str) -> None:
    values: dict[str, Any] = {}
    exec(USER_FILE, values)
    rows = values[data]()
    passed = live_objects.objects[asked(rows, "linear").data.name].component()
    a, b = (user_data.read("mine", returned)[0] for returned in (rows, passed))
    assert (a.inputs, a.positions, a.n_classes) == (b.inputs, b.positions, b.n_classes)
    assert (a.train.digest, a.test.digest) == (b.train.digest, b.test.digest)


def test_inputs_are_side_by_side_and_sequences_filled() -> None:
    part = {"x": {"ids": [[1, 2], [3], [4, 5], [7]], "mask": [[1, 1], [1], [1, 1], [1]]}, "y": [0, 1, 0, 1]}
    test = [({"mask": [1, 1, 1], "ids": [4, 5, 6]}, 0)]
    source = user_data.read("mine", {"train": part, "test": test, "pad": {"ids": 9, "mask": 0}})[0]
    rows = torch.cat([source.train.x, source.test.x]).tolist()
    assert source.inputs == (("ids", (3,)), ("mask", (3,)))
    assert rows == [
        [1, 2, 9, 1, 1, 0], [3, 9, 9, 1, 0, 0], [4, 5, 9, 1, 1, 0], [7, 9, 9, 1, 0, 0], [4, 5, 6, 1, 1, 1]
    ]  # fmt: skip
    assert user_data.read("mine", [({"a": 1, "b": 2}, 0), ({"b": 4, "a": 3}, 1)] * 3)[0].test.x.tolist() == [[3, 4]]
    labels = user_data.read(
        "mine", {"x": [[1], [2, 3]] * 3, "y": [np.zeros(n, np.uint8) for n in (1, 2)] * 3, "pad": 0}
    )
    assert labels[0].train.y.unique().tolist() == [IGNORED, 0]


X = np.arange(12).reshape(4, 3)
REFUSED: dict[str, tuple[Any, str]] = {
    "unequal lengths": (([[1], [1, 2]] * 2, [0, 1] * 2), r"pad.*collate"),
    "whole numbers and floats": (({"ids": X, "v": X / 2}, [0, 1] * 2), r"ids \(whole numbers\), v \(floats\)"),
    "unequal rows": (({"ids": X, "mask": X[:3]}, [0, 1] * 2), r"ids \(4, 3\), mask \(3, 3\)"),
    "other names": ([({"ids": 1}, 0), ({"id": 1}, 1)], "row 1 has the inputs id"),
    "other names to fill": (
        {"train": ({"a": [[1], [2, 3]]}, [0, 1]), "test": ({"b": [[1]]}, [0]), "pad": 0},
        "inputs are a, .*inputs b",
    ),
    "no number to fill": ({"x": {"a": [[1], [2, 3]]}, "y": [0, 1], "pad": {"b": 0}}, "pad has no number.*a"),
    "a word to fill": ({"x": [[1], [2, 3]], "y": [0, 1], "pad": "0"}, "pad must be a number.*'0'"),
    "what collate returns": ({"train": [(1, 0)], "test": [(1, 0)], "collate": len}, "collate must return.*int"),
    "floats per position": ((X, np.zeros((4, 3, 2))), r"\(4, 3, 2\).*whole numbers.*\(n, \.\.\.\)"),
    "part of a whole number": ({"x": [[1], [2, 3]] * 3, "y": [0, 1] * 3, "pad": 0.5}, "pad.*whole number.*0.5"),
    "a number too large for bytes": (
        {"x": [np.ones((n, 1, 2), np.uint8) for n in (1, 2)], "y": [0, 1], "pad": 300},
        "pad.*uint8.*300",
    ),
    "floats of unequal length": ({"x": [[1], [2, 3]] * 3, "y": [[0.5], [0.5, 1.0]] * 3, "pad": 0}, "labels.*floats"),
    "training rows without a label": (((X, np.where(X < 6, IGNORED, 1)), (X, X)), "2 of 4 training.*row 0"),
    "test rows without a label": (((X, X), (X, np.where(X > 8, IGNORED, X))), "1 of 4 test.*row 3"),
    "rows without a label": ((np.ones((5, 3)), np.full((5, 3), IGNORED)), "5 of 5 examples.*row 0"),
    "negative labels": (((X, X - 5), (X, X - 5)), "negative"),
}


@pytest.mark.parametrize(("returned", "words"), REFUSED.values(), ids=REFUSED)
def test_other_rows_are_refused_in_one_sentence(returned: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        user_data.read("mine", returned)


COMMANDS = {
    "a network of the package": ("--data=mine.py:named --model=linear --partition=iid", "model.name linear"),
    "a LightningModule": ("--data=mine.py:named --model=mine.py:Whole --partition=iid", "plain network"),
    "logits per example": (
        "--data=mine.py:tags --model=mine.py:Padded --partition=iid", "(2, 3), and labels are whole numbers (2, 5)"
    ),
    "another loss": ("--data=mine.py:tags --model=mine.py:OtherLoss --partition=iid", "a fault of another loss"),
    "a partition by class": ("--data=mine.py:tags --model=mine.py:Tagger", "iid"),
    "a method by class": ("--data=mine.py:tags --model=mine.py:Tagger --partition=iid --algorithm=fedgen", "fedgen"),
    "a method of features": ("--data=mine.py:tags --model=mine.py:Tagger --partition=iid --algorithm=moon", "moon"),
    "a projection of named inputs": ("--data=mine.py:named --model=mine.py:Bag --model.projection=4", "projection"),
    "a projection per position": (
        "--data=mine.py:tags --model=mine.py:Tagger --partition=iid --model.projection=4", "projection"
    ),
    "means of tokens": ("--data=mine.py:named --model=mine.py:Bag --algorithm=fedmix", "tokens"),
    "flipped images": ("--data=mine.py:masks --model=mine.py:Segmenter --data.augment=true", "data.augment"),
    "turned images": (
        "--data=mine.py:masks --model=mine.py:Segmenter --partition=iid --partition.shift=rotation", "partition.shift"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "part"), COMMANDS.values(), ids=COMMANDS)
def test_what_is_not_for_such_rows_ends_with_exit_code_2(
    words: str, part: str, lab: Path, command: Callable[..., CompletedProcess[str]]
) -> None:
    ended = command("run", "--preset=smoke", "--data.limit=null", *words.split(), "--out=run", cwd=lab)
    assert (ended.returncode, len(ended.stderr.strip().splitlines())) == (2, 1), ended.stderr
    assert part in ended.stderr
