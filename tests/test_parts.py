"""Components: looked up by name or import path, their fields read where they stand, hashed as far as chosen."""

import sys
from pathlib import Path
from types import NoneType
from typing import Annotated

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import Dataset as TorchDataset

from fedcommons.config import cli, parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import fields_of
from fedcommons.config.flat import choose, deciding, fields_for, from_dict, override, same_results, to_dict
from fedcommons.config.parts import KINDS
from fedcommons.config.sections import Constants, Model
from fedcommons.data import own
from fedcommons.errors import UserError
from fedcommons.runs import build, worker
from fedcommons.runs.checks import check

NETWORK = '''
from torch import nn


class Small(nn.Module):
    """One hidden layer.

    Args:
        width: outputs of the hidden layer
    """

    def __init__(self, shape, n_classes, width: int = 8, bias=True):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width, bias), nn.ReLU())
        self.last = nn.Linear(width, n_classes)

    def forward(self, x):
        return self.last(self.body(x))


def shards(labels, n_clients, rng, per_client: int = 2):
    order = labels.argsort(kind="stable")
    pieces = [order[i :: n_clients * per_client] for i in range(n_clients * per_client)]
    dealt = rng.permutation(len(pieces)).reshape(n_clients, per_client)
    return [[row for piece in mine for row in pieces[piece]] for mine in dealt]


def three(labels):
    return [range(0, 9), range(9, 30), range(30, 40)]


def twice(labels, n_clients):
    return [[0, 1], [1, 2]]
'''
OTHERS = {
    "rules.py": "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Rates:\n    q: float = 0.1\n"
    '    """how often"""\n    g: int = 2\n    """how many"""\n\n'
    "@dataclass(frozen=True)\nclass Often(Rates):\n    q: float = 0.5\n",
    "flat.py": "import numpy as np\ndef flat():\n    return np.eye(9)[:, :5] * 3 - 0.3, np.arange(9) % 2\n",
    "no_loss.py": NETWORK.replace("from torch import nn", "from torch import nn, optim\n"
    "from pytorch_lightning import LightningModule").replace("nn.Module", "LightningModule")
    + "\n\nSmall.training_step = lambda *_: 3\n"
    "Small.configure_optimizers = lambda self: optim.SGD(self.parameters(), 0.1)\n",
    "evil.py": "import pathlib\npathlib.Path('executed').touch()\nclass Net: pass\nclass Alg: pass\n",
}  # fmt: skip


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has user-defined components."""
    for name, text in {"my_lab.py": NETWORK, **OTHERS}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_of_every_component_are_in_their_ranges_and_have_help(kind: str) -> None:
    for name in KINDS[kind].known:
        assert callable(parts.find(kind, name))
        for field, found in parts.constants(kind, name).items():
            found.check(field, found.default)
            assert found.help, f"{name}.{field}"
            assert found.default is None or type(found.default) in found.kinds
            is_number = bool({int, float} & ({*found.kinds} - {NoneType}))
            assert kind != "algorithm" or is_number <= bool(found.allowed), f"{name}.{field} has no range"


def test_a_component_is_loaded_by_file_and_by_module(lab: Path) -> None:
    assert [parts.find("model", f"{where}:Small").__name__ for where in ("my_lab.py", "my_lab")] == ["Small"] * 2
    assert parts.constants("model", "my_lab.py:Small")["width"].help == "outputs of the hidden layer"
    assert parts.constants("model", "my_lab.py:Small")["bias"].hint is bool
    assert set(parts.constants("partition", "my_lab.py:shards")) == {"per_client"}
    fields = parts.constants("straggler", "rules.py:Often")  # with those of its base class
    assert [(name, f.default, f.help) for name, f in fields.items()] == [("q", 0.5, "how often"), ("g", 2, "how many")]
    sys.modules.pop("my_lab", None)


def test_the_config_has_fields_of_selected_components_only() -> None:
    names = set(Experiment().flat)
    assert not [n for n in names if n.startswith(("feddyn.", "generator.", "fedprox.")) or n == "sharing.p"]
    changed = override(Experiment(), {"algorithm": "fedprox", "fedprox.mu": 0.3, "model.name": "linear"})
    assert changed.flat["fedprox.mu"] == 0.3
    of_cnn = {f"model.{n}" for n in ("channels", "hidden", "batch_norm", "norm_bias")}
    assert set(changed.flat) == (names | {"fedprox.mu"}) - of_cnn
    back = override(changed, {"algorithm": "fedavg", "model.name": "cnn"})
    assert back == Experiment()
    assert override(back, {"algorithm": "fedprox"}) == choose({"algorithm": "fedprox", "feddyn.alpha": 3.0})
    for field in ("feddyn.alpha", "sharing.p", "generator.rho", "generator.epochs", "zzz"):
        with pytest.raises(UserError, match=field):
            override(Experiment(), {field: 1})
    both = fields_for({"algorithm": ["fedprox", "moon"]})
    assert {"fedprox.mu", "moon.mu", "moon.temperature"} <= both.keys()
    assert "generator.rho" not in both


def test_a_user_s_component_is_in_config_yaml_and_compared_by_its_source(lab: Path) -> None:
    values = {"model.name": "my_lab.py:Small", "model.width": 5, "partition.name": "my_lab.py:shards"}
    one = choose(values)
    written = yaml.safe_load(yaml.safe_dump(to_dict(one)))
    assert written["model"] == {"name": "my_lab.py:Small", "projection": None, "weights": None, "width": 5,
                                "bias": True}  # fmt: skip
    assert written["source"].keys() == {"model", "partition"}
    assert from_dict(written) == one
    assert deciding(one).keys() == {"model.name", "model.width", "partition.name", "source.model", "source.partition"}
    (lab / "my_lab.py").write_text(NETWORK + "\n# changed\n")
    assert set(same_results(from_dict(written), choose(values))) == {"source.partition", "source.model"}
    with pytest.raises(UserError, match=r"my_lab\.py is not the file it was"):
        check(one)


def test_an_experiment_made_in_python_has_its_sources(lab: Path) -> None:
    one = Experiment(model=Model("my_lab.py:Small"))
    check(one)
    assert one == choose({"model.name": "my_lab.py:Small"})
    (lab / "my_lab.py").write_text(NETWORK.replace("width: int = 8", "width: int = 9"))
    assert Experiment(model=Model("my_lab.py:Small")).model.width == 9


def test_a_config_that_is_read_executes_nothing(lab: Path) -> None:
    written = to_dict(Experiment()) | {"model": {"name": "evil.py:Net", "x": 3}, "algorithm": "evil.py:Alg"}
    read = from_dict({**written, "alg": {"y": 0.5}, "source": {"model": "0" * 24}})
    assert (read.flat["model.x"], read.flat["alg.y"]) == (3, 0.5)
    assert same_results(read, Experiment())
    assert not (lab / "executed").exists()


@pytest.mark.usefixtures("lab")
def test_the_command_line_takes_constants_under_both_names() -> None:
    for name in ("--small.width", "--model.width"):
        argv = ["--model", "my_lab.py:Small", name, "3", "--partition=my_lab.py:shards", "--shards.per_client=1"]
        one = cli.experiment(cli.parse(cli.parser("a test", argv, {}), argv))
        assert (one.model.name, one.model.width, one.partition.per_client) == ("my_lab.py:Small", 3, 1)


SMALL = {"model.name": "my_lab.py:Small", "model.width": 5, "partition.name": "my_lab.py:shards", "data.limit": 80}


@pytest.mark.usefixtures("lab")
def test_a_user_s_network_and_partition_are_built() -> None:
    ready = build.prepare(choose(SMALL))
    assert len(ready.partition.rows) == 10
    assert max((c > 0).sum() for c in np.asarray(ready.partition.class_counts)) <= 10
    module = worker.build_module(ready.config, ready.dataset)
    assert module(ready.dataset.test.x[:3]).shape == (3, 10)
    three = build.prepare(choose({"partition.name": "my_lab.py:three", "data.validation": 0.0}))
    assert (len(three.partition.rows), build.assemble(three).plan.facts.n_clients) == (3, 3)


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"partition.name": "my_lab.py:twice"}, "a row twice"),
        ({"model.width": "wide"}, r"model\.width takes int"),
        (
            {"data.name": "flat.py:flat", "data.limit": None, "partition.name": "iid", "partition.n_clients": 2},
            r"my_lab\.py:Small on torch\.float32 examples \(5,\) of flat\.py:flat, training_step: RuntimeError",
        ),
        ({"model.name": "no_loss.py:Small"}, "training_step must return the loss, one number with a gradient"),
    ],
)
def test_a_network_or_partition_that_cannot_be_used_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build.prepare(choose({**SMALL, **values}))


def test_constants_are_equal_and_hashable_whatever_their_order() -> None:
    a, b = Constants({"x": 1, "y": (2, 3)}), Constants({"y": (2, 3), "x": 1})
    assert a == b != Constants({"x": 1})
    assert hash(a) == hash(b)
    assert list(a) == ["x", "y"]


def test_fields_are_read_from_a_signature() -> None:
    def part(shape, rate: Annotated[float, "(0, 1]"] = 0.5, sizes: tuple[int, ...] = (1, 2), odd=None, *args, **more):
        """A part.

        Args:
            rate: how much
        """

    found = fields_of(part, {"shape"})
    assert list(found) == ["rate", "sizes", "odd"]
    assert (found["rate"].help, found["rate"].kinds, found["sizes"].kinds) == ("how much", (float, int), (tuple,))
    found["rate"].check("x", 1)
    for value in (0, 1.01, float("nan")):
        with pytest.raises(UserError, match=r"x must lie in \(0, 1\], got"):
            found["rate"].check("x", value)


class Pairs(TorchDataset):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int):
        return np.full((4, 4, 3), i % 7, dtype=np.uint8), i % 3


def test_arrays_and_map_style_datasets_become_examples() -> None:
    found = own.read("pairs", Pairs())[0]
    assert (found.train.x.shape, found.train.x.dtype, found.n_classes) == ((40, 3, 4, 4), torch.uint8, 3)
    together = torch.cat([found.train.x, found.test.x])[:, 0, 0, 0]
    assert sorted(together.tolist()) == sorted(i % 7 for i in range(50))
    assert found.mean == pytest.approx([found.train.x[:, c].float().mean().item() / 255 for c in range(3)], abs=1e-6)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 5)), rng.integers(0, 4, 30)
    pair = own.read("table", ((x, y), (x[:6], y[:6])))[0]
    assert (pair.train.x.dtype, pair.test.x.shape, pair.mean) == (torch.float32, (6, 5), (0.0,))
    tokens = own.read("tokens", (rng.integers(0, 99, (20, 7)), y[:20]))[0]
    assert (tokens.train.x.dtype, tokens.train.x.shape) == (torch.int64, (16, 7))
