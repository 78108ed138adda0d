"""What a command line sets, option by option; a ``--config`` file counts as if its keys were options in its place."""

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from fedcommons.config.dotted import SECTIONS
from fedcommons.config.registry import KINDS
from fedcommons.errors import UserError, quote
from fedcommons.storage.paths import user_path
from fedcommons.storage.safe_yaml import LARGEST_FILE, MOST_VALUES, require_small

LONGEST = 4096
"""The most characters of a value: what a path may have on Linux."""

NAMES = {*SECTIONS, *KINDS["algorithm"].known}
"""Sections that may be empty in a config file."""

CORE = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}
"""Types of plain values in YAML; their text is read exactly like the text of an option."""


@dataclass(frozen=True)
class Given:
    """An option as it was given.

    name: dotted, with ``_`` for ``-``. value: its text, the texts of a list's members, or None if there is no value.
    file: the config file that it comes from; None for the command line.
    """

    name: str
    value: str | list[str] | None
    file: Path | None = None

    def __str__(self) -> str:
        return self.name if self.file else f"--{self.name if '.' in self.name else self.name.replace('_', '-')}"

    @property
    def text(self) -> str:
        """The value as one text.

        Raises:
            UserError: there is no value.
        """
        if self.value is None:
            raise UserError(f"{self} needs a value.")
        return self.value if isinstance(self.value, str) else f"[{', '.join(self.value)}]"


class Line(tuple[str, ...]):
    """The words of a command line."""

    @cached_property
    def options(self) -> tuple[Given, ...]:
        """See ``read``; its words and its config files are read once."""
        return _options_in(self)


def read(argv: Sequence[str]) -> tuple[Given, ...]:
    """All options that ``argv`` sets, in order, those of a config file in its place; of a ``Line`` they are kept.

    Raises:
        UserError: a word is not an option, no field can have the value, or a config file cannot be read.
    """
    return argv.options if isinstance(argv, Line) else _options_in(argv)


def _options_in(argv: Sequence[str]) -> tuple[Given, ...]:
    found: list[Given] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "-h":
            name = "help"
        elif not word.startswith("--") or not name:
            raise UserError(f"an option is --NAME VALUE or --NAME=VALUE, got {quote(word)}.")
        has_value = equals or (words and not words[0].startswith("--") and words[0] != "-h")
        one = Given(name.replace("-", "_"), (value if equals else words.pop(0)) if has_value else None)
        _check_text(one)
        found += _in_file(one.text) if one.name == "config" else [one]
    return tuple(found)


def _check_text(one: Given) -> None:
    """Refuse text that no field can hold, before it reaches a parser, a path or a terminal."""
    for text in one.value if isinstance(one.value, list) else [one.value or ""]:
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
            raise UserError(f"{one} must be text without control characters, got {quote(text)}.")
        if len(text) > LONGEST:
            raise UserError(f"{one} must have at most {LONGEST} characters, got {len(text)}: {quote(text)}.")


def _in_file(name: str) -> list[Given]:
    path = user_path("--config", name)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"--config: {path} is no file.")
        if path.exists() and path.stat().st_size > LARGEST_FILE:
            raise UserError(f"--config: {path} has more than {LARGEST_FILE:,} bytes.")
        text = path.read_text(encoding="utf-8-sig")
        with suppress(yaml.YAMLError):  # which the next line tells in its own words
            require_small(text, aliases=MOST_VALUES)
        root = yaml.compose(text, yaml.SafeLoader)  # nodes: nothing is constructed
    except OSError as error:
        raise UserError(f"--config: {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not YAML: {' '.join(str(error).split())}.") from error
    except ValueError as error:
        raise UserError(f"--config: {path} {str(error).removeprefix('it ')}.") from None
    except RecursionError:
        raise UserError(f"--config: {path} is nested too deeply.") from None
    if not isinstance(root, MappingNode):
        raise UserError(f"--config: {path} must hold keys and values.")
    found: dict[str, Given] = {}
    values = 0
    for one in _options(root, "", path):
        if one.name in found:
            raise UserError(f"--config: {path} has {one} twice.")
        if (values := values + (len(one.value) if isinstance(one.value, list) else 1)) > MOST_VALUES:
            raise UserError(f"--config: {path} has more than {MOST_VALUES:,} values.")
        _check_text(one)
        found[one.name] = one
    return list(found.values())


def _options(node: MappingNode, section: str, path: Path) -> Iterator[Given]:
    """The keys of a file, or of one of its sections, and their values as text."""
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise UserError(f"--config: {path} has a key that is no name{_line(key)}.")
        name = section + key.value.replace("-", "_")
        named = not section and (value.value or name in NAMES)  # --print_config prints sections without keys
        if isinstance(value, MappingNode) and named and value.tag == "tag:yaml.org,2002:map":
            yield from _options(value, f"{name}.", path)
        elif isinstance(value, SequenceNode) and value.tag == "tag:yaml.org,2002:seq":
            yield Given(name, [_scalar(name, one, path) for one in value.value], path)
        else:
            yield Given(name, _scalar(name, value, path), path)


def _scalar(name: str, node: Node, path: Path) -> str:
    if not isinstance(node, ScalarNode) or node.tag not in CORE:
        raise UserError(f"--config: {path}: {quote(name)} must be a value or a list of values{_line(node)}.")
    return "null" if node.tag.endswith(":null") else node.value


def _line(node: Node) -> str:
    return f" (line {node.start_mark.line + 1})"
