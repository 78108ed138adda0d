"""From the text of an option to its value, by the type of its field: bool, int, float, str, tuples of these, or null.

Of numbers there is one rule, ``number``. A list is written ``[16,32]``.
"""

import re
from collections.abc import Sequence
from math import isinf
from types import NoneType
from typing import Any, Union, get_args, get_origin

from fedcommons.cli.argv import Given
from fedcommons.errors import UserError, quote

NULLS = ("null", "Null", "NULL", "~")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOT_DECIMAL = re.compile(r"[+-]?(0[xb][0-9a-f_]+|\d[\d_]*(:[\d_]+)*)|[&!]\S+ +[\d.]+|[\d.]+ +#.*", re.IGNORECASE)
"""Numbers that YAML reads and this module does not: of base 16, 2 or 60, with stray underscores, tags or comments."""


class _Unreadable(Exception):
    """A text is no value of the type; args: the type in words, and the text."""


def value_of(given: Given, hint: Any) -> Any:
    """The value that an option's text has.

    Raises:
        UserError: it is of another type.
    """
    no_text = isinstance(given.value, list) or (given.text == "null" and NoneType not in _members(hint))
    if given.file and no_text and str in _members(hint):
        raise UserError(f"{given} takes one text, got {quote(given.text)}.")
    try:
        return _read(hint, given.text if given.value is None else given.value)
    except OverflowError:
        raise UserError(f"{given} is nested too deeply or too large a number, got {quote(given.text)}.") from None
    except _Unreadable as error:
        words, text = error.args
        if {int, float} & set(_members(hint)) and _NOT_DECIMAL.fullmatch(given.text.strip()):
            raise UserError(f"{given} takes decimal numbers, got {quote(given.text.strip())}.") from None
        raise UserError(f"{given.name} takes {words}, got {quote(text.strip())}.") from None


def in_words(hint: Any) -> str:
    """The type as a reader sees it: ``int``, ``float or null``, ``a list such as [16,32]``."""
    if hint is Any:
        return "a value"
    names = [_NAMES.get(_plain(one)) or getattr(_plain(one), "__name__", str(one)) for one in _members(hint)]
    return " or ".join(names)


def is_list(hint: Any) -> bool:
    """Whether values of this type are lists."""
    return any(_plain(one) in (tuple, list) for one in _members(hint))


_NAMES: dict[Any, str] = {NoneType: "null", tuple: "a list such as [16,32]", list: "a list such as [16,32]"}


def _plain(hint: Any) -> Any:
    return get_origin(hint) or hint


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; the type itself where it is none."""
    return get_args(hint) if _plain(hint) in (Union, type(int | str)) else (hint,)


def _read(hint: Any, text: str | list[str]) -> Any:
    members = (NoneType, bool, int, float, tuple[Any, ...], str) if hint is Any else _members(hint)
    wrong = in_words(hint), f"[{', '.join(text)}]" if isinstance(text, list) else text
    for one in sorted(members, key=lambda one: (one is str, one is not NoneType)):  # any text is a str
        try:
            return _one(one, text)
        except _Unreadable as error:
            if is_list(one) and error.args:  # a member of the list is wrong, not the list
                wrong = error.args
        except ValueError:
            pass
    raise _Unreadable(*wrong)


def _one(kind: Any, text: str | list[str]) -> Any:
    """The value, of one type that is no union.

    Raises:
        ValueError, _Unreadable: it is none of this type.
        OverflowError: it is too large for it.
    """
    if is_list(kind):
        return _list(kind, text)
    if isinstance(text, list):
        if kind is str:
            return f"[{', '.join(text)}]"
        raise ValueError
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
    kinds = [hints[0]] * len(text) if len(hints) != len(text) or ... in hints or _plain(kind) is list else list(hints)
    return tuple(_read(one, part) for one, part in zip(kinds, text, strict=True))


def _truth(text: str) -> bool:
    if text in (text.lower(), text.capitalize(), text.upper()) and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    raise ValueError


def number(kind: type, text: str) -> Any:
    """The int or float that a text is: the rule for fields, lists, search spaces and config files alike.

    It is decimal, as Python's ``int`` and ``float`` read it: ``12``, ``+1_000``, of a float also ``.5`` and ``1e-3``;
    digits may be those of any script, and spaces around it do not count. ``.inf`` and ``.nan`` are floats, as in YAML;
    ``inf`` and ``nan`` are words. What else YAML reads, such as 16 of 0x10 or 90 of 1:30, is none, nor 1e3 an int.

    Raises:
        ValueError: it is none.
        OverflowError: it is too large a float.
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
