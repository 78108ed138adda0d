"""Odd names, files and values where a user-defined component is expected: one sentence each."""

from pathlib import Path

import pytest

from fedcommons import ClientError, Experiment, UserError, experiment, run
from fedcommons.errors import leaving_errors, sentence
from fedcommons.runs import build

QUICK = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "measure.every": 0, "wandb": "off"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def quick(field: str, name: str, code: str = "", **more: object) -> Experiment:
    """Return an experiment with this component; code: of odd.py, in the current folder."""
    if code:
        Path("odd.py").write_text(code, encoding="utf-8")
    return experiment("smoke", values={**QUICK, field: name, **more})


@pytest.mark.parametrize("name", ["builtins:dict", "sys:modules", "builtins:None"])
def test_a_name_in_a_module_that_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(quick("algorithm", name), tmp_path / "run", say=lambda text: None)
    assert not (tmp_path / "run").exists()


TYPES = {
    "1 / 1": "the type of a must be a type", "'no type'": "SyntaxError", "[int]": "the type of a must be a type",
    "Literal['auto'] | float": r"Literal cannot stand beside .*float.*Annotated\[",
}  # fmt: skip


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
    code = (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING, Literal\n"
        "if TYPE_CHECKING: import numpy\n"
        f"def mine(n_clients, labels: numpy.ndarray, a: {annotation}):\n    return [[0], [1]]\n"
    )
    right, wrong, known = CHOICES[annotation]
    default = quick("partition.name", "odd.py:mine", code).flat["partition.a"]
    assert default == eval(annotation.rpartition(" = ")[2])
    assert quick("partition.name", "odd.py:mine", **{"partition.a": right}).flat["partition.a"] == right
    with pytest.raises(UserError, match=known):
        build.prepare(quick("partition.name", "odd.py:mine", **{"partition.a": wrong}))


ROWS = "import numpy as np\nimport pandas as pd\nimport torch\ndef mine(n_clients, labels):\n    return {rows}\n"
COLUMNS = "[pd.Series(range(k, len(labels), 2)) for k in range(2)]"


@pytest.mark.parametrize("rows", ["torch.arange(len(labels) // 2 * 2).view(2, -1)", COLUMNS])
def test_a_partition_may_return_rows_as_tensors_or_columns(rows: str) -> None:
    """Rows are held out for validation, so the partition is called once more, for more rows."""
    more = {"partition.n_clients": 2, "data.validation": 0.1}
    ready = build.prepare(quick("partition.name", "odd.py:mine", ROWS.format(rows=rows), **more))
    assert sorted(row for mine in ready.partition.rows for row in mine.tolist()) == list(range(40))


WRONG_ROWS = {
    "None": "NoneType", "[[0, [1]], [2]]": "client 0.*one shape", "[[0, 1], [1, 2]]": "a row twice",
    "[[0, 1], [True, False]]": r"bool.*client 1.*np\.flatnonzero", "[[0, 1], [0.5]]": "float64.*client 1",
    "[[3], np.ma.array([0, 1], mask=[0, 1])]": "client 1.*masked",
}  # fmt: skip


@pytest.mark.parametrize("rows", WRONG_ROWS)
def test_what_a_partition_returns_in_place_of_rows_is_named(rows: str) -> None:
    config = quick("partition.name", "odd.py:mine", ROWS.format(rows=rows), **{"partition.n_clients": 2})
    with pytest.raises(UserError, match=WRONG_ROWS[rows]):
        build.prepare(config)


def test_a_file_without_an_end_is_not_read_to_its_end() -> None:
    with open("endless.py", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match=r"more than 16,777,216 bytes"):
        quick("algorithm", "endless.py:Mine")


def test_control_characters_of_an_error_are_escaped_on_the_screen_and_in_the_file(tmp_path: Path) -> None:
    error = ValueError("\x1b[31mred\n\ud800 \u202etxt")
    assert sentence(error) == "ValueError: \\x1b[31mred \\ud800 \\u202etxt"
    with pytest.raises(ValueError, match="red"), leaving_errors(tmp_path):
        raise error
    assert (tmp_path / "error.txt").read_text().startswith("ValueError: \\x1b[31mred \\ud800 \\u202etxt\n\nTraceback")


@pytest.mark.parametrize("check", ["raise SystemExit(0)", "return 1 / 0"])
def test_a_component_that_breaks_when_it_is_looked_up_is_named(check: str, tmp_path: Path) -> None:
    code = f"class Mine:\n    start = down = client = merge = print\n    @property\n    def check(self): {check}\n"
    with pytest.raises((UserError, ClientError), match=r"odd\.py:Mine.*(SystemExit|ZeroDivisionError)"):
        run(quick("algorithm", "odd.py:Mine", code), tmp_path / "run", say=lambda text: None)
