"""Reader of a command line's options. The keys of a config file take the place of the option ``--config FILE``."""

import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from fedcommons.config.registry import KINDS
from fedcommons.config.schema import SECTIONS
from fedcommons.errors import UserError, quote
from fedcommons.storage.paths import user_path
from fedcommons.storage.safe_yaml import LARGEST_FILE, MOST_VALUES, require_small

LOADED = time.time()  # right after the start of this process

LONGEST = 4096
"""Maximum number of characters of a value, equal to that of a path on Linux."""

NAMES = {*SECTIONS, *KINDS["algorithm"].components}
"""Names of sections, which may be empty in a config file, as ``--print_config`` prints them."""

CORE = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}
"""YAML tags of plain values. The text of such a value is parsed like the value of an option on the command line."""


@dataclass(frozen=True)
class Argument:
    """An option as the user wrote it, on the command line or as a key of a config file.

    name: dotted name, with ``_`` instead of ``-``. value: text of the value, texts of a list's members, or None for an
    option without a value. file: the config file that contains the option; None for the command line.
    """

    name: str
    value: str | list[str] | None
    file: Path | None = None

    def __str__(self) -> str:
        return self.name if self.file else typed(self.name)

    @property
    def text(self) -> str:
        """Return the value as one text; a list becomes ``[a, b]``.

        Raises:
            UserError: the option has no value.
        """
        if self.value is None:
            raise UserError(f"{self} needs a value.")
        return joined(self.value)


def joined(text: str | list[str]) -> str:
    """Return a list as the text ``[a, b]``; a text stays as it is."""
    return text if isinstance(text, str) else f"[{', '.join(text)}]"


def typed(name: str) -> str:
    """Return the option ``name`` as the user types it, such as ``--dry-run`` or ``--client.clip_norm``."""
    return f"--{name if '.' in name else name.replace('_', '-')}"


class Line(tuple[str, ...]):
    """The words of a command line, with a cache of the options that the words mean."""

    @cached_property
    def options(self) -> tuple[Argument, ...]:
        """Return the options that the words mean. Words and config files are read at the first access only."""
        options: list[Argument] = []
        words = list(self)
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if word == "-h":
                name = "help"
            elif not word.startswith("--") or not name:
                raise UserError(f"options have the form --NAME VALUE or --NAME=VALUE, got {quote(word)}.")
            has_value = equals or (words and not words[0].startswith("--") and words[0] != "-h")
            option = Argument(name.replace("-", "_"), (value if equals else words.pop(0)) if has_value else None)
            _check_text(option)
            options += _in_file(option.text) if option.name == "config" else [option]
        return tuple(options)


def started(argv: Sequence[str]) -> float:
    """Return when the command began (``time.time``): when this process started if ``argv`` is its command line, or now.

    A notebook's process may call a command's function, or run its script, hours after the process began.
    """
    names = [Path(word).stem.replace("-", "_") for word in sys.orig_argv[-len(sys.argv) :][:1]]
    return LOADED if isinstance(argv, Line) and Path(sys.argv[0]).stem in names else time.time()


def read(argv: Sequence[str]) -> tuple[Argument, ...]:
    """Return all options in the order of the command line; a config file's keys replace ``--config``.

    argv: words of the command line; a ``Line`` caches its options.

    Raises:
        UserError: a word is not an option, a text is too long or has control characters, or a config file is invalid.
    """
    return (argv if isinstance(argv, Line) else Line(argv)).options


def _check_text(option: Argument) -> None:
    """Reject text with control characters or too many characters, before a parser, path or terminal uses the text."""
    for text in option.value if isinstance(option.value, list) else [option.value or ""]:
        if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
            raise UserError(f"{option} must be text without control characters, got {quote(text)}.")
        if len(text) > LONGEST:
            raise UserError(f"{option} must have at most {LONGEST} characters, got {len(text)}: {quote(text)}.")


def _in_file(name: str) -> list[Argument]:
    path = user_path("--config", name)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"--config: {path} is not a file.")
        if path.exists() and path.stat().st_size > LARGEST_FILE:
            raise UserError(f"--config: {path} has more than {LARGEST_FILE:,} bytes.")
        text = path.read_text(encoding="utf-8-sig")
        with suppress(yaml.YAMLError):  # compose raises the same error, which is reported below
            require_small(text, aliases=MOST_VALUES)
        root = yaml.compose(text, yaml.SafeLoader)  # compose creates nodes and no objects
    except OSError as error:
        raise UserError(f"--config: {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not YAML: {' '.join(str(error).split())}.") from error
    except ValueError as error:
        raise UserError(f"--config: {path} {str(error).removeprefix('it ')}.") from None
    except RecursionError:
        raise UserError(f"--config: {path} is nested too deeply.") from None
    if not isinstance(root, MappingNode):
        raise UserError(f"--config: {path} must contain keys and values, such as seed: 1.")
    options: dict[str, Argument] = {}
    values = 0
    for option in _options(root, "", path):
        if option.name in options:
            raise UserError(f"--config: {path} has {option} twice.")
        if (values := values + (len(option.value) if isinstance(option.value, list) else 1)) > MOST_VALUES:
            raise UserError(f"--config: {path} has more than {MOST_VALUES:,} values.")
        _check_text(option)
        options[option.name] = option
    return list(options.values())


def _options(node: MappingNode, section: str, path: Path) -> Iterator[Argument]:
    """Yield the options in a YAML mapping: a config file, or one section. section: prefix such as ``client.``."""
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise UserError(f"--config: {path} has a key that is no name{_line(key)}.")
        name = section + key.value.replace("-", "_")
        named = not section and (value.value or name in NAMES)  # an empty mapping counts as a section if NAMES lists it
        if isinstance(value, MappingNode) and named and value.tag == "tag:yaml.org,2002:map":
            yield from _options(value, f"{name}.", path)
        elif isinstance(value, SequenceNode) and value.tag == "tag:yaml.org,2002:seq":
            yield Argument(name, [_scalar(name, item, path) for item in value.value], path)
        else:
            yield Argument(name, _scalar(name, value, path), path)


def _scalar(name: str, node: Node, path: Path) -> str:
    if not isinstance(node, ScalarNode) or node.tag not in CORE:
        raise UserError(f"--config: {path}: {quote(name)} must be a value or a list of values{_line(node)}.")
    return "null" if node.tag.endswith(":null") else node.value


def _line(node: Node) -> str:
    return f" (line {node.start_mark.line + 1})"
