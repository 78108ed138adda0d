"""Components: looked up by name or import path, fields read from the source, only selected components hashed."""

from pathlib import Path
from types import NoneType

import pytest
import yaml

from fedcommons import Experiment, UserError, experiment
from fedcommons.config import dotted, registry
from fedcommons.config.dotted import choose, deciding, fields_for, from_dict, override, same_results, to_dict
from fedcommons.config.fields import fields_of
from fedcommons.config.registry import KINDS
from fedcommons.runs import build
from fedcommons.runs.build import check

FILE = '''
from dataclasses import dataclass
from torch import nn


class Small(nn.Module):
    """One hidden layer.

    Args:
        width: outputs of the hidden layer
    """

    def __init__(self, shape, n_classes, width: int = 8, bias=True):
        super().__init__()
        self.last = nn.Linear(64, n_classes, bias)


def shards(labels, n_clients, rng, per_client: int = 2):
    return [[0], [1]]


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


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has user-defined components."""
    (tmp_path / "my_file.py").write_text(FILE)
    (tmp_path / "evil.py").write_text("open('executed', 'w').close()\nclass Net: ...\nclass Alg: ...")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if KINDS[kind].components]
)  # of measures there are users' alone
def test_fields_of_every_component_are_read_from_its_source_and_have_help_and_ranges(kind: str) -> None:
    for name in KINDS[kind].components:
        part = registry.find(kind, name)
        assert registry.constants(kind, name) == fields_of(part, KINDS[kind].passed, KINDS[kind].required)
        assert kind != "sharing" or dotted.generates(name) == hasattr(part, "requests")
        for field, constant in registry.constants(kind, name).items():
            constant.check(field, constant.default)
            assert constant.help, f"{name}.{field}"
            assert constant.default is None or type(constant.default) in constant.kinds
            is_number = bool({int, float} & ({*constant.kinds} - {NoneType}))
            assert is_number <= bool(constant.allowed), f"{name}.{field} has no range"


def test_a_component_is_loaded_by_file_and_by_module() -> None:
    for where in ("my_file.py", "my_file"):
        assert registry.find("model", f"{where}:Small").__name__ == "Small"
        fields = registry.constants("model", f"{where}:Small")
        assert (fields["width"].help, fields["bias"].hint) == ("outputs of the hidden layer", bool)
    fields = registry.constants("straggler", "my_file.py:Often")  # with those of its base class
    assert [(name, f.default, f.help) for name, f in fields.items()] == [("q", 0.5, "how often"), ("g", 2, "how many")]


def test_the_config_has_fields_of_selected_components_only() -> None:
    names = set(Experiment().flat)
    assert not [n for n in names if n.startswith(("feddyn.", "generator.", "fedprox.")) or n == "sharing.p"]
    changed = override(Experiment(), {"algorithm": "fedprox", "fedprox.mu": 0.3, "model.name": "linear"})
    of_cnn = {f"model.{n}" for n in ("channels", "hidden", "batch_norm", "norm_bias")}
    assert set(changed.flat) == (names | {"fedprox.mu"}) - of_cnn
    assert override(changed, {"algorithm": "fedavg", "model.name": "cnn"}) == Experiment()
    assert override(Experiment(), {"algorithm": "fedprox"}) == choose({"algorithm": "fedprox", "feddyn.alpha": 3.0})
    for field in ("feddyn.alpha", "sharing.p", "generator.rho", "generator.epochs", "zzz"):
        with pytest.raises(UserError, match=field):
            override(Experiment(), {field: 1})
    both = fields_for({"algorithm": ["fedprox", "moon"]})
    assert {"fedprox.mu", "moon.mu", "moon.temperature"} <= both.keys()
    assert "generator.rho" not in both


def test_a_user_s_component_is_in_config_yaml_and_compared_by_its_source(lab: Path) -> None:
    values = {"model.name": "my_file.py:Small", "model.width": 5, "partition.name": "my_file.py:shards"}
    run = choose(values)
    written = yaml.safe_load(yaml.safe_dump(to_dict(run)))
    assert written["model"] == {"name": "my_file.py:Small", "projection": None, "weights": None,
                                "weights_map": None, "weights_strict": True, "width": 5, "bias": True}  # fmt: skip
    assert written["source"].keys() == {"model", "partition"}
    assert from_dict(written) == run
    assert deciding(run).keys() == {"model.name", "model.width", "partition.name", "source.model", "source.partition"}
    (lab / "my_file.py").write_text(FILE + "\n# changed\n")
    assert set(same_results(from_dict(written), choose(values))) == {"source.partition", "source.model"}
    with pytest.raises(UserError, match=r"my_file\.py is not the file it was"):
        check(run)


def test_a_config_that_is_read_executes_nothing(lab: Path) -> None:
    written = to_dict(Experiment()) | {"model": {"name": "evil.py:Net", "x": 3}, "algorithm": "evil.py:Alg"}
    read = from_dict({**written, "alg": {"y": 0.5}, "source": {"model": "0" * 24}})
    assert (read.flat["model.x"], read.flat["alg.y"]) == (3, 0.5)
    assert same_results(read, Experiment())
    assert not (lab / "executed").exists()


def quick(field: str, name: str, code: str = "", **more: object) -> Experiment:
    """Return an experiment with this component; code: of odd.py, in the current folder."""
    if code:
        Path("odd.py").write_text(code, encoding="utf-8")
    return experiment("smoke", values={"data.limit": 40, field: name, **more})


def test_a_name_in_a_module_that_is_no_file_is_refused() -> None:
    for name in ("builtins:dict", "sys:modules", "builtins:None"):
        with pytest.raises(UserError):
            build.build(quick("algorithm", name))


TYPES = {"1 / 1": "must be a type", "'no type'": "SyntaxError", "Literal[3] | float": r"be combined with .*float"}


@pytest.mark.parametrize("annotation", TYPES)
def test_an_annotation_that_is_no_type_is_refused(annotation: str) -> None:
    code = f"from typing import Literal\ndef mine(n_clients, labels, a: {annotation} = 1.0): ...\n"
    with pytest.raises(UserError, match=TYPES[annotation]):
        quick("partition.name", "odd.py:mine", code)


CHOICES = {
    "Literal['big', 'small'] = 'big'": ("small", "mid", "Known: big, small"),
    "Literal['auto', 2] = 2": ("auto", "always", "Known: 2, auto"),
    "Literal['p', 'q'] | None = None": (None, "r", "Known: p, q"),
    "tuple[Literal['u', 'v'], ...] = ('u',)": (("v", "u"), ("v", "w"), "Known: u, v"),
}


@pytest.mark.parametrize("annotation", CHOICES)
def test_the_values_of_a_literal_are_a_choice(annotation: str) -> None:
    code = f"from typing import Literal\ndef mine(n_clients, labels, a: {annotation}):\n    return [[0], [1]]\n"
    right, wrong, message = CHOICES[annotation]
    default = quick("partition.name", "odd.py:mine", code).flat["partition.a"]
    assert default == eval(annotation.rpartition(" = ")[2])
    assert quick("partition.name", "odd.py:mine", **{"partition.a": right}).flat["partition.a"] == right
    with pytest.raises(UserError, match=message):
        build.build(quick("partition.name", "odd.py:mine", **{"partition.a": wrong}))


ROWS = "import numpy as np\nimport pandas as pd\nimport torch\ndef mine(n_clients, labels):\n    return {rows}\n"
COLUMNS = "[pd.Series(range(k, len(labels), 2)) for k in range(2)]"


@pytest.mark.parametrize("rows", ["torch.arange(len(labels) // 2 * 2).view(2, -1)", COLUMNS])
def test_a_partition_may_return_rows_as_tensors_or_columns(rows: str) -> None:
    """Rows are held out for validation, so the partition is called once more, for more rows."""
    more = {"partition.n_clients": 2, "data.validation": 0.1}
    ready = build.build(quick("partition.name", "odd.py:mine", ROWS.format(rows=rows), **more))
    assert sorted(row for client_rows in ready.partition.rows for row in client_rows.tolist()) == list(range(40))


WRONG_ROWS = {
    "None": "NoneType", "[[0, [1]], [2]]": "client 0.*one shape", "[[0, 1], [1, 2]]": "a row twice",
    "[[0, 1], [True, False]]": r"bool.*client 1.*np\.flatnonzero", "[[0, 1], [0.5]]": "float64.*client 1",
    "[[3], np.ma.array([0, 1], mask=[0, 1])]": "client 1.*masked",
}  # fmt: skip


@pytest.mark.parametrize("rows", WRONG_ROWS)
def test_what_a_partition_returns_in_place_of_rows_is_named(rows: str) -> None:
    config = quick("partition.name", "odd.py:mine", ROWS.format(rows=rows), **{"partition.n_clients": 2})
    with pytest.raises(UserError, match=WRONG_ROWS[rows]):
        build.build(config)
