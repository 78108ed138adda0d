"""Conversion of an option's text to the type of the option's field: bool, int, float, str, tuple or None (null).

All numbers are read by ``number``. A list is written ``[16,32]``.
"""

import re
from collections.abc import Callable, Sequence
from math import isfinite, isinf
from types import NoneType
from typing import Any, get_args, get_origin

from fedcommons.cli.argv import Argument, joined
from fedcommons.config.fields import Field, members
from fedcommons.errors import UserError, quote

NULLS = ("null", "Null", "NULL", "~")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOT_DECIMAL = re.compile(r"[+-]?(0[xb][0-9a-f_]+|\d[\d_]*(:[\d_]+)*)|[&!]\S+ +[\d.]+|[\d.]+ +#.*", re.IGNORECASE)
"""Numbers that YAML accepts and this module rejects: base 16, 2 or 60, stray underscores, tags or comments."""


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of the units of time in ``seconds``."""


def seconds(option: str, text: str) -> float:
    """Return the seconds of a duration such as ``90``, ``30m`` or ``1.5h``.

    Raises:
        UserError: the text is no positive duration.
    """
    match = re.fullmatch(r"(\d+|\d*\.\d+)([smhd]?)", text.strip())
    if not match or not (value := float(match[1]) * UNITS[match[2]]) > 0:
        raise UserError(f"{option} takes a positive number of seconds, or 30m, 2h or 1d, got {quote(text)}.")
    return value


class _Unreadable(Exception):
    """A text is not a value of the requested type. args: (the type in words, the text)."""


def value_of(argument: Argument, hint: Any) -> Any:
    """Return the value of an option, converted to the type ``hint`` (a type or a union of types).

    Raises:
        UserError: the option's text is not a value of this type.
    """
    no_text = isinstance(argument.value, list) or (argument.text == "null" and NoneType not in members(hint))
    if argument.file and no_text and str in members(hint):
        raise UserError(f"{argument} takes one text, got {quote(argument.text)}.")
    try:
        return _read(hint, argument.text if argument.value is None else argument.value)
    except OverflowError:
        raise UserError(f"{argument} has too large a number, got {quote(argument.text)}.") from None
    except _Unreadable as error:
        words, text = error.args
        if {int, float} & set(members(hint)) and _NOT_DECIMAL.fullmatch(argument.text.strip()):
            raise UserError(f"{argument} takes decimal numbers, got {quote(argument.text.strip())}.") from None
        name = argument.name if "." in argument.name else argument
        lists = "." in argument.name and {int, float} & set(members(hint)) and not is_list(hint) and "," in text
        advice = f": tune --space {argument.name}={text.strip()} runs with each of several values" if lists else ""
        raise UserError(f"{name} takes {words}, got {quote(text.strip())}{advice}.") from None


def in_words(hint: Any) -> str:
    """Return the type ``hint`` in words for messages: ``int``, ``float or null``, ``a list such as [16,32]``."""
    if hint is Any:
        return "a value"
    kinds = [(kind, get_origin(kind) or kind) for kind in members(hint)]
    return " or ".join(_NAMES.get(plain) or getattr(plain, "__name__", str(kind)) for kind, plain in kinds)


def is_list(hint: Any) -> bool:
    """Return whether values of type ``hint`` may be lists."""
    return any((get_origin(kind) or kind) in (tuple, list) for kind in members(hint))


_NAMES: dict[Any, str] = {NoneType: "null", tuple: "a list such as [16,32]", list: "a list such as [16,32]"}


def _read(hint: Any, text: str | list[str]) -> Any:
    kinds = (NoneType, bool, int, float, tuple[Any, ...], str) if hint is Any else members(hint)
    wrong = in_words(hint), joined(text)
    # str is tried last, because any text is a str.
    for kind in sorted(kinds, key=lambda kind: (kind is str, kind is not NoneType)):
        try:
            return _read_single(kind, text)
        except _Unreadable as error:
            if is_list(kind) and error.args:  # the message names the wrong member instead of the list
                wrong = error.args
        except ValueError:
            pass
    raise _Unreadable(*wrong)


def _read_single(kind: Any, text: str | list[str]) -> Any:
    """Return the value of a text for the type ``kind``, which is not a union."""
    if is_list(kind):
        return _list(kind, text)
    text = joined(text)
    if kind is NoneType and text.strip() in NULLS:
        return None
    if kind is bool:
        return _truth(text.strip())
    if kind in (int, float):
        return number(kind, text)
    if kind is str:
        return text
    raise ValueError


def _list(kind: Any, text: str | list[str]) -> tuple[Any, ...]:
    if isinstance(text, str):
        inner = re.fullmatch(r"\s*\[(.*)\]\s*", text, re.DOTALL)
        if not inner:
            raise ValueError
        parts: Sequence[str] = [part.strip() for part in inner[1].split(",")]
        parts = parts[:-1] if parts[-1] == "" else parts
        if "" in parts or "[" in inner[1]:
            raise ValueError
        text = [re.sub(r"^(['\"])(.*)\1$", r"\2", part) for part in parts]
    hints = get_args(kind) or (Any, ...)
    kinds = list(hints) if len(hints) == len(text) and ... not in hints else [hints[0]] * len(text)
    return tuple(_read(member_type, part) for member_type, part in zip(kinds, text, strict=True))


def _truth(text: str) -> bool:
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    raise ValueError


def number(kind: type, text: str) -> Any:
    """Convert a text to a number of type ``kind`` (int or float), for fields, lists, search spaces and config files.

    The text is decimal, as for Python's ``int`` and ``float``: ``12``, ``+1_000``; for a float also ``.5``, ``1e-3``.
    Digits of any script are allowed, and surrounding spaces are ignored. ``.inf`` and ``.nan`` are floats, as in YAML.
    The texts ``inf`` and ``nan``, other YAML numbers such as 0x10 or 1:30, and 1e3 for an int are rejected.

    Raises:
        ValueError: the text is not such a number.
        OverflowError: the float is too large.
    """
    if kind is int:
        return int(text)
    text = text.strip()
    if special := re.fullmatch(r"([+-]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        return float("nan") if special[3] else float(f"{special[1]}inf")
    if re.search(r"[^\W\d_eE]", text):
        raise ValueError
    if isinf(value := float(text)):
        raise OverflowError
    return value


def split(option: str, text: str, kind: Callable[[str], Any] = str, allowed: str = "") -> tuple:
    """Return the values of a comma-separated list. Numbers must be finite.

    option: name of the option for messages. kind: type of the values, or a function that converts a text to a value.
    allowed: range of the values, as in ``Field``.
    """
    values = []
    for part in map(str.strip, str(text).split(",")):
        try:
            values.append(number(kind, part) if kind in (int, float) else kind(part))
            if kind is float and not isfinite(values[-1]):
                raise ValueError
        except (ValueError, OverflowError):
            what = "finite float" if kind is float else kind.__name__
            raise UserError(f"{option} takes {what} values separated by commas, got {quote(part)}.") from None
    if "" in values or len(set(values)) < len(values):
        raise UserError(f"{option} takes different values separated by commas, got {quote(text)}.")
    Field(kind, None, "", allowed).check(option, tuple(values))
    return tuple(values)
