"""What can be set: type, default, range and line of help of a field, read where they stand: a dataclass or a signature.

``mu: Annotated[float, "[0, inf)"] = 0.01`` has a range, ``Annotated[str, "serial | ray_actors"]`` a choice, as has
``Literal["serial", "ray_actors"]``, and ``Annotated[float | str, "(0, 1] or auto"]`` a range and a word beside it.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cached_property, reduce
from operator import or_
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedcommons.errors import UserError, shown, unknown


@dataclass(frozen=True)
class Field:
    """One field. allowed: an interval as ``(0, 1]`` or ``(0, 1] or auto``, names as ``a | b``; empty for any value."""

    hint: Any
    default: Any
    help: str = ""
    allowed: str = ""

    @cached_property
    def kinds(self) -> tuple[type, ...]:
        """The types that a value may have, the preferred one first."""
        hint = self.hint
        kinds = tuple(get_origin(h) or h for h in get_args(hint)) if _is_union(hint) else (get_origin(hint) or hint,)
        return (*kinds, int) if float in kinds else kinds

    def check(self, name: str, value: Any) -> None:
        """Check that a value of the right type is allowed; of a tuple, that each member is.

        Raises:
            UserError: it is not allowed.
        """
        if not self.allowed or value is None:
            return
        many: Sequence[Any] = value if isinstance(value, tuple) else (value,)
        interval, _, word = self.allowed.partition(" or ")
        for one in many:
            if "|" in self.allowed:
                names = dict.fromkeys(n.strip() for n in self.allowed.split("|"))
                if (text := _word(one)) not in names:
                    raise unknown(name, text, names)
            elif one != word and (isinstance(one, str) or not _inside(interval, one)):
                raise UserError(f"{name} must lie in {interval}{word and f' or be {word}'}, got {shown(one)}.")


def _inside(interval: str, value: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    return above and (value < high if interval[-1] == ")" else value <= high)  # nan is nowhere inside


def _word(value: Any) -> str:
    """A value as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def field_of(hint: Any, default: Any, help: str) -> Field:
    """Return the field of an annotation: ``Annotated`` has its range, and the values of a ``Literal`` are a choice.

    Raises:
        ValueError: a ``Literal`` stands beside other types.
    """
    allowed = ""
    if get_origin(hint) is Annotated:
        hint, allowed, *_ = get_args(hint)
    words: list[str] = []
    hint = _without_literals(hint, words)
    return Field(hint, default, help, " | ".join(words * (1 + (len(words) == 1))) or str(allowed))  # a | a: one choice


def _without_literals(hint: Any, words: list[str]) -> Any:
    """The type with the types of values in the place of each ``Literal``; its values are added to ``words``."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        words += [_word(value) for value in inner if value is not None]
        return reduce(or_, map(type, inner))
    if not inner or not (_is_union(hint) or get_origin(hint) in (tuple, list)):
        return hint
    before = len(words)
    plain = tuple(one if one is ... else _without_literals(one, words) for one in inner)
    if len(words) == before:
        return hint
    if not _is_union(hint):
        return get_origin(hint)[plain]
    if others := [one for one in inner if get_origin(one) is not Literal and one is not NoneType]:
        raise ValueError(
            f"a Literal cannot stand beside {shown(others[0])}: use Annotated[float | str, '(0, 1] or auto'], say"
        )
    return reduce(or_, plain)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def fields_of(
    thing: Callable[..., Any], handed: Collection[str] = (), required: Collection[str] = ()
) -> dict[str, Field]:
    """The fields of a dataclass, or the parameters of a class or function, without those that it is handed.

    handed: names that it gets; required: names that it gets if they have no default.

    Raises:
        ValueError: a parameter has no default and it does not get it.
    """
    hints, helps, found = _hints(thing), _helps(thing), {}
    for name, parameter in parameters_of(thing).items():
        if name in handed or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            if name in required:
                continue
            known = ", ".join(sorted({*handed, *required})) or "nothing"
            raise ValueError(f"it asks for {name}, which has no default and is not handed over (that is: {known})")
        hint = hints.get(name, Any if parameter.default is None else type(parameter.default))
        found[name] = field_of(hint, parameter.default, helps.get(name, ""))
        _require_usable(name, found[name])
    return found


def parameters_of(thing: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function by name.

    Raises:
        ValueError: Python does not tell them, as of some that are written in C.
    """
    try:
        return inspect.signature(thing).parameters
    except (ValueError, TypeError):
        raise ValueError("Python does not tell what parameters it has") from None


def _require_usable(name: str, field: Field) -> None:
    """See that a value of the field can be written to a config file, and that its type and its range can be read.

    Raises:
        ValueError: the default is no such value, the type no type, or the range no interval of numbers and no names.
    """
    if odd := [kind for kind in field.kinds if not isinstance(kind, type) and kind is not Any]:
        raise ValueError(f"the type of {name} must be a type, got {shown(odd[0])}")
    many = field.default if isinstance(field.default, tuple) else (field.default,)
    if wrong := [one for one in many if type(one) not in (bool, int, float, str, NoneType)]:
        raise ValueError(
            f"the default of {name} must be a number, a text, true, false, null or a tuple of these, got "
            f"{type(wrong[0]).__name__}"
        )
    try:
        if field.allowed and "|" not in field.allowed:
            _inside(field.allowed.partition(" or ")[0], 0.0)
        field.check(name, field.default)
    except UserError:  # told where the value is used
        pass
    except (ValueError, TypeError, IndexError):
        raise ValueError(
            f"the range of {name} must be an interval of numbers, such as (0, 1], or names, such as a | b, got "
            f"{shown(field.allowed)}"
        ) from None


def _hints(thing: Callable[..., Any]) -> Mapping[str, Any]:
    typed = thing.__init__ if inspect.isclass(thing) and not is_dataclass(thing) else thing
    try:
        return get_type_hints(typed, include_extras=True)
    except NameError:  # of names that are imported for type checkers only; the others are read one by one
        hints: dict[str, Any] = {}
        for one in reversed(inspect.getmro(typed)) if inspect.isclass(typed) else [inspect.unwrap(typed)]:
            names = getattr(one, "__globals__", None) or vars(sys.modules.get(one.__module__, inspect))
            for name, hint in inspect.get_annotations(one).items():
                with suppress(NameError):
                    hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), names, include_extras=True)
        return hints


def _helps(thing: Callable[..., Any]) -> Mapping[str, str]:
    """The line under each field of a dataclass and its base classes, or each line of a docstring's ``Args:``."""
    from docstring_parser import parse_from_object

    bases = [base for base in reversed(inspect.getmro(thing)) if is_dataclass(base)] if inspect.isclass(thing) else []
    helps: dict[str, str] = {}
    for one in bases or [thing]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(OSError, TypeError, SyntaxError):  # it has no source
                parsed = parse_from_object(one)
                helps |= {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}
    return helps


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``offered`` whose names are parameters of ``function``."""
    parameters = parameters_of(function)
    return {name: value for name, value in offered.items() if name in parameters}
