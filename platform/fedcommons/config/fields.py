"""Fields of a configuration: type, default, range and help text, read from a dataclass or a function's signature.

``mu: Annotated[float, "[0, inf)"] = 0.01`` declares a range. ``Annotated[str, "serial | ray_actors"]`` and
``Literal["serial", "ray_actors"]`` declare a choice of values. ``Annotated[float | str, "(0, 1] or auto"]`` declares a
range and one word that is allowed too.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property, lru_cache, reduce
from operator import or_
from types import FunctionType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedcommons.errors import UserError, quote, unknown


@dataclass(frozen=True)
class Field:
    """A field of a configuration.

    hint: type annotation without range. help: text for ``--help``. allowed: an interval (``(0, 1]``), an interval or a
    word (``(0, 1] or auto``), or a choice (``a | b``); empty if all values are allowed.
    """

    hint: Any
    default: Any
    help: str = ""
    allowed: str = ""

    @cached_property
    def kinds(self) -> tuple[type, ...]:
        """Return the types that a value may have; the first is preferred. An int is also valid for a float field."""
        kinds = tuple(get_origin(member) or member for member in members(self.hint))
        return (*kinds, int) if float in kinds else kinds

    @cached_property
    def _rule(self) -> tuple[Collection[str], str, str]:
        """Return what ``allowed`` states: the words of a choice, or an interval and a further word."""
        interval, _, word = self.allowed.partition(" or ")
        names = dict.fromkeys(n.strip() for n in self.allowed.split("|")) if "|" in self.allowed else ()
        return names, interval, word

    def check(self, name: str, value: Any) -> None:
        """Check that a value of the right type is in the field's range or choice; for a tuple, check each member.

        None always passes. name: name of the field for the error message.

        Raises:
            UserError: the value is not allowed.
        """
        if not self.allowed or value is None:
            return
        many: Sequence[Any] = value if isinstance(value, tuple) else (value,)
        names, interval, word = self._rule
        for item in many:
            if names:
                if (text := _word(item)) not in names:
                    raise unknown(name, text, names)
            elif item != word and (isinstance(item, str) or not _inside(interval, item)):
                raise UserError(f"{name} must lie in {interval}{word and f' or be {word}'}, got {quote(item)}.")


@cache
def _bounds(interval: str) -> tuple[float, float]:
    low, high = map(float, interval[1:-1].split(","))
    return low, high


def _inside(interval: str, value: float) -> bool:
    low, high = _bounds(interval)
    above = value > low if interval[0] == "(" else value >= low
    return above and (value < high if interval[-1] == ")" else value <= high)  # the comparisons are false for nan


def _word(value: Any) -> str:
    """Return the text of a value on the command line, such as ``true`` for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def field_of(hint: Any, default: Any, help: str) -> Field:
    """Return the field of a parameter with the type annotation ``hint``.

    ``Annotated`` states the range of values, and ``Literal`` states the choice of values.

    Raises:
        ValueError: ``hint`` is a union of a ``Literal`` and another type.
    """
    allowed = ""
    if get_origin(hint) is Annotated:
        hint, allowed, *_ = get_args(hint)
    words: list[str] = []
    hint = _without_literals(hint, words)
    # A single value becomes "a | a", so that ``check`` reads it as a choice and not as an interval.
    return Field(hint, default, help, " | ".join(words * (1 + (len(words) == 1))) or str(allowed))


def _without_literals(hint: Any, words: list[str]) -> Any:
    """Return ``hint`` with each ``Literal`` replaced by the types of its values, which are appended to ``words``."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        words += [_word(value) for value in inner if value is not None]
        return reduce(or_, map(type, inner))
    if get_origin(hint) not in (Union, UnionType, tuple, list):
        return hint
    before = len(words)
    plain = tuple(item if item is ... else _without_literals(item, words) for item in inner)
    if len(words) == before:
        return hint
    if get_origin(hint) in (tuple, list):
        return get_origin(hint)[plain]
    if others := [quote(item) for item in inner if get_origin(item) is not Literal and item is not NoneType]:
        raise ValueError(f"a Literal cannot be combined with {others[0]}: use Annotated[float | str, '(0, 1] or auto']")
    return reduce(or_, plain)


def members(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union, or a tuple with the type if ``hint`` is not a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def fields_of(
    thing: Callable[..., Any],
    handed: Collection[str] = (),
    required: Collection[str] = (),
    reserved: Collection[str] = (),
) -> dict[str, Field]:
    """Return name -> ``Field`` for the parameters of a dataclass, class or function that users can set.

    Args:
        thing: dataclass, class or function.
        handed: names of parameters that the platform always passes, so that they are no fields.
        required: names of parameters that the platform passes only if they have no default.
        reserved: names that no field may have, because they are names of optional functions of ``thing``.

    Raises:
        ValueError: a parameter has no default, and the platform does not pass it, or a field has a reserved name.
    """
    hints, helps, result = _hints(thing), _helps(thing), {}
    for name, parameter in parameters_of(thing).items():
        if name in handed or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty:
            if name in required:
                continue
            passed = ", ".join(sorted({*handed, *required})) or "nothing"
            raise ValueError(f"its parameter {name} has no default (the platform passes {passed})")
        if name in reserved:
            raise ValueError(
                f"its constant {name} needs another name, as {name} is an optional function of a component"
            )
        hint = hints.get(name, Any if parameter.default is None else type(parameter.default))
        result[name] = field_of(hint, parameter.default, helps.get(name, ""))
        _require_usable(name, result[name])
    return result


def parameters_of(thing: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function, name -> ``inspect.Parameter``.

    Raises:
        ValueError: Python does not know the parameters, as for some functions written in C.
    """
    if isinstance(thing, FunctionType):
        return _parameters_of_function(thing)
    try:
        return inspect.signature(thing).parameters
    except (ValueError, TypeError):
        raise ValueError("Python does not know its parameters") from None


@lru_cache
def _parameters_of_function(function: FunctionType) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _require_usable(name: str, field: Field) -> None:
    """Raise a ValueError if a config file cannot store the field's default, or if its type or range is not valid."""
    if odd := [kind for kind in field.kinds if not isinstance(kind, type) and kind is not Any]:
        raise ValueError(f"the type of {name} must be a type, got {quote(odd[0])}")
    many = field.default if isinstance(field.default, tuple) else (field.default,)
    if wrong := [type(item).__name__ for item in many if type(item) not in (bool, int, float, str, NoneType)]:
        raise ValueError(f"the default of {name} must be a number, text, bool, None or tuple of these, got {wrong[0]}")
    try:
        if field.allowed and "|" not in field.allowed:
            _inside(field.allowed.partition(" or ")[0], 0.0)
        field.check(name, field.default)
    except UserError:  # a default out of range is reported when the value is used
        pass
    except (ValueError, TypeError, IndexError):
        allowed = quote(field.allowed)
        raise ValueError(f"the range of {name} must have the form (0, 1] or a | b, got {allowed}") from None


def _hints(thing: Callable[..., Any]) -> Mapping[str, Any]:
    typed = thing.__init__ if inspect.isclass(thing) and not is_dataclass(thing) else thing
    try:
        return get_type_hints(typed, include_extras=True)
    except NameError:  # a type is undefined at run time: read the annotations one by one
        hints: dict[str, Any] = {}
        for owner in reversed(inspect.getmro(typed)) if inspect.isclass(typed) else [inspect.unwrap(typed)]:
            names = getattr(owner, "__globals__", None) or vars(sys.modules.get(owner.__module__, inspect))
            for name, hint in inspect.get_annotations(owner).items():
                with suppress(NameError):
                    hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), names, include_extras=True)
        return hints


def _helps(thing: Callable[..., Any]) -> Mapping[str, str]:
    """Return name -> help text: the string below a dataclass' field, or the entry in a docstring's ``Args:``."""
    from docstring_parser import parse_from_object

    bases = [base for base in reversed(inspect.getmro(thing)) if is_dataclass(base)] if inspect.isclass(thing) else []
    helps: dict[str, str] = {}
    for source in bases or [thing]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(OSError, TypeError, SyntaxError):  # the source code of the object is not available
                parsed = parse_from_object(source)
                helps |= {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}
    return helps


def select_arguments(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``offered`` whose names are parameters of ``function``."""
    parameters = parameters_of(function)
    return {name: value for name, value in offered.items() if name in parameters}
