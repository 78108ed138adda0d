"""Parts: found by name or import path, their fields read where they stand, hashed and compared as far as chosen."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import Dataset as TorchDataset

from fedcommons.artifacts import key_of
from fedcommons.config import cli, parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import fields_of
from fedcommons.config.flat import (
    choose,
    deciding,
    fields_for,
    from_dict,
    override,
    same_results,
    to_dict,
)  # fmt: skip
from fedcommons.config.parts import KINDS
from fedcommons.config.sections import Constants, Model
from fedcommons.data import own
from fedcommons.errors import UserError
from fedcommons.runs import build, worker
from fedcommons.runs.checks import check
from fedcommons.runs.experiment import run

NETWORK = '''
"""A network and a partition of somebody's own."""

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
    """McMahan et al. (2017): rows sorted by label, cut into shards."""
    order = labels.argsort(kind="stable")
    pieces = [order[i :: n_clients * per_client] for i in range(n_clients * per_client)]
    dealt = rng.permutation(len(pieces)).reshape(n_clients, per_client)
    return [[row for piece in mine for row in pieces[piece]] for mine in dealt]


def greedy(labels, n_clients, wanted):
    return []


def twice(labels, n_clients):
    return [[0, 1], [1, 2]]


broken = 3
'''


RULES = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    q: float = 0.1
    """how often"""
    g: int = 2
    """how many"""


@dataclass(frozen=True)
class Often(Rates):
    q: float = 0.5
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my_lab.py in it, from which the command is given."""
    (tmp_path / "my_lab.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_the_package_is_found_and_its_defaults_are_allowed(kind: str) -> None:
    for name in KINDS[kind].known:
        assert callable(parts.find(kind, name))
        for field, found in parts.constants(kind, name).items():
            found.check(field, found.default)
            assert found.help, f"{name}.{field}"
            assert found.default is None or type(found.default) in found.kinds


def test_a_part_of_ones_own_is_found_by_file_and_by_module(lab: Path) -> None:
    by_file, by_module = (parts.find("model", f"{where}:Small") for where in ("my_lab.py", "my_lab"))
    assert by_file.__name__ == by_module.__name__ == "Small"
    assert parts.constants("model", "my_lab.py:Small")["width"].help == "outputs of the hidden layer"
    assert parts.constants("model", "my_lab.py:Small")["bias"].hint is bool
    assert set(parts.constants("partition", "my_lab.py:shards")) == {"per_client"}
    sys.modules.pop("my_lab", None)


def test_a_part_of_ones_own_has_the_constants_of_its_base_class(lab: Path) -> None:
    (lab / "my_rules.py").write_text(RULES)
    fields = parts.constants("straggler", "my_rules.py:Often")
    assert [(name, f.default, f.help) for name, f in fields.items()] == [("q", 0.5, "how often"), ("g", 2, "how many")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_lab.py:Smal", "has no 'Smal'; did you mean 'Small'?"),
        ("my_lab.py:broken", "has no 'broken'"),
        ("nothing.py:Small", "there is no file"),
        ("no_such_module:Small", "importing no_such_module failed: ModuleNotFoundError"),
        ("bad.py:Small", "importing bad.py failed: ZeroDivisionError: division by zero"),
        (
            "cnm",
            "unknown model.name 'cnm'; did you mean 'cnn'? Known: cnn, conv5, convnet, ddpm, encoder, linear, mlp, "
            "resnet18, vae, vgg11, or",
        ),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(lab: Path, name: str, said: str) -> None:
    (lab / "bad.py").write_text("1 / 0\n")
    with pytest.raises(UserError) as error:
        override(Experiment(), {"model.name": name})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_parameter_that_nobody_hands_over_is_refused(lab: Path) -> None:
    with pytest.raises(UserError, match="asks for wanted, which has no default and is not handed over"):
        override(Experiment(), {"partition.name": "my_lab.py:greedy"})


def test_a_method_that_would_share_a_section_with_all_runs_is_refused(lab: Path) -> None:
    (lab / "named.py").write_text("class Client:\n    def __init__(self, lr=0.5): pass\n")
    with pytest.raises(UserError, match="needs another name: client is a section of every experiment"):
        override(Experiment(), {"algorithm": "named.py:Client"})


def test_the_algorithm_is_built_once_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, make = [], parts.make
    monkeypatch.setattr(parts, "make", lambda kind, name, c: made.append(kind) or make(kind, name, c))
    values = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "measure.every": 0, "tracking.wandb": "off"}
    run(choose(values), tmp_path / "run", say=lambda _: None)
    assert made.count("algorithm") == made.count("sharing") == 1


def test_only_what_was_chosen_is_there() -> None:
    names = set(Experiment().flat)
    assert not [n for n in names if n.startswith(("feddyn.", "generator.", "fedprox.")) or n == "sharing.p"]
    changed = override(Experiment(), {"algorithm": "fedprox", "fedprox.mu": 0.3, "model.name": "linear"})
    assert changed.flat["fedprox.mu"] == 0.3
    assert set(changed.flat) == (names | {"fedprox.mu"}) - {
        f"model.{n}" for n in ("channels", "hidden", "batch_norm", "norm_bias")
    }
    back = override(changed, {"algorithm": "fedavg", "model.name": "cnn"})
    assert back == Experiment()
    assert override(back, {"algorithm": "fedprox"}) == choose({"algorithm": "fedprox", "feddyn.alpha": 3.0})


@pytest.mark.parametrize("field", ["feddyn.alpha", "sharing.p", "generator.rho", "generator.epochs", "zzz"])
def test_a_field_of_a_part_that_was_not_chosen_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=field):
        override(Experiment(), {field: 1})


def test_a_field_or_method_that_is_added_renames_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are hashes of what is chosen and not at its default: so an added field or part is in none."""
    values = {"algorithm": "feddyn", "feddyn.alpha": 0.5, "sharing.setting": "local_synthetic"}
    one = override(Experiment(), values)
    before = key_of(deciding(one))
    assert deciding(one) == values

    feddyn = parts.find("algorithm", "feddyn")

    @dataclass(frozen=True)
    class Longer(feddyn):  # pyright: ignore[reportGeneralTypeIssues]  # stands for FedDyn with one more field
        strength: Annotated[float, "[0, 1]"] = 0.25
        """of what is new"""

    known = dict(KINDS["algorithm"].known) | {"brand_new": KINDS["algorithm"].known["fedavg"]}
    kind = parts.Kind("algorithm", known, KINDS["algorithm"].handed)
    monkeypatch.setattr(parts, "KINDS", {**KINDS, "algorithm": kind})
    read = parts.read_constants
    monkeypatch.setattr(
        parts,
        "read_constants",
        lambda k, name, digest: fields_of(Longer) if name == "feddyn" else read(k, name, digest),
    )
    again = override(Experiment(), {"algorithm": "feddyn", "feddyn.alpha": 0.5, "sharing.setting": "local_synthetic"})
    assert again.flat["feddyn.strength"] == 0.25
    assert key_of(deciding(again)) == before
    assert key_of(deciding(override(again, {"feddyn.strength": 0.5}))) != before


def test_ones_own_part_is_in_config_yaml_and_compared_by_its_source(lab: Path) -> None:
    values = {"model.name": "my_lab.py:Small", "model.width": 5, "partition.name": "my_lab.py:shards"}
    one = choose(values)
    written = yaml.safe_load(yaml.safe_dump(to_dict(one)))
    assert written["model"] == {
        "name": "my_lab.py:Small",
        "projection": None,
        "weights": None,
        "width": 5,
        "bias": True,
    }
    assert written["source"].keys() == {"model", "partition"}
    assert from_dict(written) == one
    assert deciding(one).keys() == {"model.name", "model.width", "partition.name", "source.model", "source.partition"}
    (lab / "my_lab.py").write_text(NETWORK + "\n# changed\n")
    assert set(same_results(from_dict(written), choose(values))) == {"source.partition", "source.model"}
    with pytest.raises(UserError, match=r"my_lab\.py is not the file it was"):
        check(one)


def test_an_experiment_put_together_in_python_knows_its_sources(lab: Path) -> None:
    one = Experiment(model=Model("my_lab.py:Small"))
    check(one)
    assert one == choose({"model.name": "my_lab.py:Small"})
    (lab / "my_lab.py").write_text(NETWORK.replace("width: int = 8", "width: int = 9"))
    assert Experiment(model=Model("my_lab.py:Small")).model.width == 9


def test_a_config_that_rests_on_disk_executes_nothing(lab: Path) -> None:
    """What it names is imported when the user asks for it, not when it is read."""
    (lab / "evil.py").write_text("import pathlib\npathlib.Path('executed').touch()\nclass Net: pass\nclass Alg: pass\n")
    written = to_dict(Experiment()) | {"model": {"name": "evil.py:Net", "x": 3}, "algorithm": "evil.py:Alg"}
    read = from_dict({**written, "alg": {"y": 0.5}, "source": {"model": "0" * 24}})
    assert (read.flat["model.x"], read.flat["alg.y"]) == (3, 0.5)
    assert same_results(read, Experiment())
    assert not (lab / "executed").exists()


def test_the_command_line_offers_the_constants_of_chosen_parts_under_both_names(lab: Path) -> None:
    for name in ("--small.width", "--model.width"):
        argv = ["--model", "my_lab.py:Small", name, "3", "--partition=my_lab.py:shards", "--shards.per_client=1"]
        one = cli.experiment(cli.parse(cli.parser("a test", argv, {}), argv))
        assert (one.model.name, one.model.width, one.partition.per_client) == ("my_lab.py:Small", 3, 1)
    argv = ["--model", "my_lab.py:Small", "--small.widht", "3"]
    with pytest.raises(UserError, match=r"did you mean '--model\.width'"):
        cli.parse(cli.parser("a test", argv, {}), argv)
    with pytest.raises(UserError, match=r"model\.width takes int, got 'wide'"):
        cli.parse(cli.parser("a test", argv, {}), [*argv[:2], "--small.width", "wide"])


def test_ones_own_network_and_partition_are_built_and_dealt(lab: Path) -> None:
    values = {"model.name": "my_lab.py:Small", "model.width": 5, "partition.name": "my_lab.py:shards", "data.limit": 80}
    ready = build.prepare(choose(values))
    assert len(ready.partition.rows) == 10
    assert max((c > 0).sum() for c in np.asarray(ready.partition.class_counts)) <= 10
    module = worker.build_module(ready.config, ready.dataset)
    assert module(ready.dataset.test.x[:3]).shape == (3, 10)
    with pytest.raises(UserError, match="deals a row twice"):
        build.prepare(choose({**values, "partition.name": "my_lab.py:twice"}))
    with pytest.raises(UserError, match=r"model\.width takes int, got 'wide'"):
        build.prepare(choose({**values, "model.width": "wide"}))
    (lab / "flat.py").write_text(
        "import numpy as np\ndef flat():\n    return np.eye(9)[:, :5] * 3 - 0.3, np.arange(9) % 2\n"
    )
    more = {"data.name": "flat.py:flat", "data.limit": None, "partition.name": "iid", "partition.n_clients": 2}
    with pytest.raises(
        UserError,
        match=r"my_lab\.py:Small on torch\.float32 examples \(5,\) of flat\.py:flat, training_step: RuntimeError",
    ):
        build.prepare(choose({**values, **more}))
    (lab / "no_loss.py").write_text(
        NETWORK.replace("nn.Module", "LightningModule").replace(
            "from torch import nn", "from torch import nn\nfrom pytorch_lightning import LightningModule"
        )
        + "\n\nSmall.training_step = lambda *_: 3\n"
        "Small.configure_optimizers = lambda self: __import__('torch').optim.SGD(self.parameters(), 0.1)\n"
    )
    with pytest.raises(UserError, match="training_step must return the loss, one number with a gradient"):
        build.prepare(choose({**values, "model.name": "no_loss.py:Small"}))


def test_n_is_what_the_partition_made(lab: Path) -> None:
    (lab / "three.py").write_text("def three(labels):\n    return [range(0, 9), range(9, 30), range(30, 40)]\n")
    ready = build.prepare(choose({"partition.name": "three.py:three", "data.validation": 0.0}))
    assembled = build.assemble(ready)
    assert (len(ready.partition.rows), assembled.plan.facts.n_clients) == (3, 3)


def test_constants_are_equal_and_hashable_whatever_their_order() -> None:
    a, b = Constants({"x": 1, "y": (2, 3)}), Constants({"y": (2, 3), "x": 1})
    assert a == b
    assert hash(a) == hash(b)
    assert list(a) == ["x", "y"]
    assert a != Constants({"x": 1})


def test_fields_are_read_from_a_signature() -> None:
    def part(shape, rate: Annotated[float, "(0, 1]"] = 0.5, sizes: tuple[int, ...] = (1, 2), odd=None, *args, **more):
        """A part.

        Args:
            rate: how much
        """

    found = fields_of(part, {"shape"})
    assert list(found) == ["rate", "sizes", "odd"]
    assert (found["rate"].help, found["rate"].kinds, found["sizes"].kinds) == ("how much", (float, int), (tuple,))
    with pytest.raises(UserError, match=r"x must lie in \(0, 1\], got 0"):
        found["rate"].check("x", 0)
    with pytest.raises(UserError, match="got nan"):
        found["rate"].check("x", float("nan"))


class Pairs(TorchDataset):
    def __init__(self, n: int = 50) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return np.full((4, 4, 3), i % 7, dtype=np.uint8), i % 3


def test_arrays_and_map_style_datasets_become_examples() -> None:
    found = own.read("pairs", Pairs())[0]
    assert (found.train.x.shape, found.train.x.dtype, found.n_classes) == ((40, 3, 4, 4), torch.uint8, 3)
    assert len(found.test) == 10
    together = torch.cat([found.train.x, found.test.x])[:, 0, 0, 0]
    assert sorted(together.tolist()) == sorted(i % 7 for i in range(50))
    assert found.mean == pytest.approx([found.train.x[:, c].float().mean().item() / 255 for c in range(3)], abs=1e-6)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 5)), rng.integers(0, 4, 30)
    pair = own.read("table", ((x, y), (x[:6], y[:6])))[0]
    assert (pair.train.x.dtype, pair.test.x.shape, pair.mean) == (torch.float32, (6, 5), (0.0,))
    tokens = own.read("tokens", (rng.integers(0, 99, (20, 7)), y[:20]))[0]
    assert (tokens.train.x.dtype, tokens.train.x.shape) == (torch.int64, (16, 7))


class Grey:
    mean, std, normalised = (127.0,), (60.0,), False

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.train, self.test = (x, y), (x, y)


def test_floating_images_that_are_not_normalised_cannot_pass() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 1, 4, 4)).astype(np.float32), rng.integers(0, 2, 20)
    for scale in (1, 1 / 255):
        with pytest.raises(UserError, match="floating examples must be normalised"):
            own.read("grey", (x * scale, y))
    found = own.read("grey", Grey(x, y))[0]
    assert found.train.x.numpy() == pytest.approx((x - 127) / 60, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "must give"),
        ((np.zeros((3, 2)), np.zeros((3, 2, 2))), "labels must be whole numbers or floats"),
        ((np.zeros((3, 2)), np.array([0, 1])), "one for each of the 3 examples"),
        ((np.zeros((9, 2), dtype=np.uint8), np.arange(9)), "uint8 examples must be images"),
        ((np.zeros((9, 2), dtype=np.int64), -np.arange(9)), "labels must be 0, 1"),
    ],
)
def test_what_is_no_data_set_is_refused(given: object, said: str) -> None:
    with pytest.raises(UserError) as error:
        own.read("mine", given)
    assert said in str(error.value)


def test_fields_for_several_parts_are_those_of_all() -> None:
    both = fields_for({"algorithm": ["fedprox", "moon"]})
    assert {"fedprox.mu", "moon.mu", "moon.temperature"} <= both.keys()
    assert "generator.rho" not in both
