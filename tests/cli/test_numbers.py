"""One rule of numbers in options, config files, lists and search spaces; and the limits of the options of sweeps."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.cli import parse, search_space
from fedcommons.cli.argv import Argument
from fedcommons.cli.values import split, value_of
from fedcommons.config.fields import Field
from fedcommons.errors import UserError

FLOATS = {"12": 12.0, "٠.٥": 0.5, "1_0.5": 10.5, " 5 ": 5.0, "+5": 5.0, "1e3": 1000.0, ".5": 0.5, "5.": 5.0,
          "1e-400": 0.0, "007": 7.0}  # fmt: skip
INTS = {"12": 12, "１２": 12, "1_0": 10, " 5 ": 5, "-0": 0, "007": 7, "9" * 400: int("9" * 400)}
NO_FLOATS = ("0x10", "inf", "nan", "1__0", "1:30", "½", "", "1e", "-1e400", "9" * 400, "[1]", "true", "null", "--1")
NO_INTS = ("1e3", "1.0", "0x10", "inf", "1_", "²", "", "1:30", "true", "[1]")
CASES = [*((float, *case) for case in FLOATS.items()), *((int, *case) for case in INTS.items())]


def readers(kind: type, text: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what reads a number: an option, a key of a file, a member of a list, an option that lists, a space."""
    (folder / "c.yaml").write_text(f"x: '{text}'\n")
    parser = parse.Parser("a test")
    parser.add_argument("--x", type=kind, default=None)
    fields = {"client.lr": Field(kind, None)}
    return {
        "option": lambda: parse.parse(parser, [f"--x={text}"]).x,
        "file": lambda: parse.parse(parser, ["--config", str(folder / "c.yaml")]).x,
        "member": lambda: value_of(Argument("x", [text]), tuple[kind, ...])[0],
        "list": lambda: split("--x", text, kind)[0],
        "space": lambda: search_space.read_space([f"client.lr={text}"], fields, {})["client.lr"][0],  # pyright: ignore
    }


@pytest.mark.parametrize(("kind", "text", "value"), CASES, ids=lambda v: str(v)[:9])
def test_a_number_means_the_same_everywhere(kind: type, text: str, value: Any, tmp_path: Path) -> None:
    values = {name: read() for name, read in readers(kind, text, tmp_path).items()}
    assert values == dict.fromkeys(values, value)
    assert {type(number) for number in values.values()} == {kind}


@pytest.mark.parametrize(
    ("kind", "text"), [*((float, t) for t in NO_FLOATS), *((int, t) for t in NO_INTS)], ids=lambda v: str(v)[:9]
)
def test_a_text_that_is_no_number_is_refused_everywhere(kind: type, text: str, tmp_path: Path) -> None:
    for name, read in readers(kind, text, tmp_path).items():
        with pytest.raises(UserError):
            pytest.fail(f"{name} read {text[:9]} as {read()}")


LIMITS = """
--dp.local --dp.clip | 1e-30 1e30 | 0 1.1e30 .inf
--model.channels | [1,1000000] | [0,8] [8,1000001]
"""
"""Options | smallest and largest allowed | smallest and largest refused."""


@pytest.mark.parametrize("line", LIMITS.strip().splitlines())
def test_limits_are_allowed_and_what_lies_beyond_is_refused(line: str, sweeps: Callable[[str], ModuleType]) -> None:
    (*words, option), allowed, refused = (cell.split() for cell in line.split("|"))
    run = sweeps("run")
    for value in allowed:
        run.arguments([*words, f"{option}={value}"])
    for value in refused:
        with pytest.raises(UserError, match=f"{option.removeprefix('--')}.* lie"):
            run.arguments([*words, f"{option}={value}"])
    tune = sweeps("tune").arguments
    assert tune(["--space=lr=0.1", "--samples=10000"]).samples == 10_000
    with pytest.raises(UserError, match="--samples must lie"):
        tune(["--space=lr=0.1", "--samples=10001"])
