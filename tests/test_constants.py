"""Each constant of a method stands in its dataclass, and nowhere else, with type, range, default and a line of help."""

import ast
import inspect
import re
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from fedcommons.config import parts

KINDS: list[Any] = [parts.find("algorithm", name) for name in parts.KINDS["algorithm"].known]


def _range(hint: Any) -> str | None:
    """The interval that a field's type is annotated with."""
    return hint.__metadata__[0] if get_origin(hint) is Annotated else None


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_has_a_range_and_its_default_lies_in_it(kind: type) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        plain = get_type_hints(kind)[field.name]
        kinds = {k for k in get_args(plain) or (plain,) if k is not NoneType}
        text = _range(hints[field.name])
        if text is not None and "|" in text:  # a choice of names
            assert getattr(kind(), field.name) in text.split(" | ")
            continue
        assert (text is not None) == bool(kinds & {int, float}), field.name
        if text is None:
            continue
        match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
        assert match, text
        low, high, default = float(match[2]), float(match[3]), getattr(kind(), field.name)
        if default is None:
            assert NoneType in get_args(plain)
            continue
        for number in default if isinstance(default, tuple) else (default,):
            assert low <= number if match[1] == "[" else low < number
            assert number <= high if match[4] == "]" else number < high


@pytest.mark.parametrize("kind", KINDS)
def test_every_constant_has_a_line_of_help_and_the_experiment_is_none_of_them(kind: type) -> None:
    (body,) = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    after = {ast.unparse(node.target): body[i + 1] for i, node in enumerate(body) if isinstance(node, ast.AnnAssign)}
    assert list(after) == [field.name for field in fields(kind)]
    assert not {"local", "weighting", "epochs", "lr"} & set(after)
    for name, node in after.items():
        text = ast.literal_eval(node.value) if isinstance(node, ast.Expr) else None
        assert isinstance(text, str), name
        assert "\n" not in text
