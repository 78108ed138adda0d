"""The options that a script knows, what ``--help`` and ``--print_config`` say of them, and their values."""

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Collection, ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin

import yaml

from fedcommons.cli.values import in_words, is_list
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.config.fields import Field


class Options:
    """The values of a script's options, by dotted name: ``options.client.lr``, ``options["client.lr"]``.

    fields: those that are fields of the experiment; asked: the names of the fields that were given; chosen: the parts
    of each kind that some run may have.
    """

    def __init__(self, values: Mapping[str, Any], fields: Mapping[str, Field], asked: Collection[str],
                 chosen: Mapping[str, Sequence[str]]) -> None:  # fmt: skip
        self.__dict__["_values"] = dict(values)
        self.__dict__.update(fields=fields, asked=frozenset(asked), chosen=chosen)

    def __getitem__(self, name: str) -> Any:
        return self._values[name.replace("-", "_")]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name.replace("-", "_")] = value

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if held := {n.removeprefix(f"{name}."): v for n, v in values.items() if n.startswith(f"{name}.")}:
            return SimpleNamespace(**held)
        raise AttributeError(f"there is no option {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def items(self) -> ItemsView[str, Any]:
        """Names and values."""
        return self._values.items()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option; the default where there is no such option."""
        return self._values.get(name.replace("-", "_"), default)


@dataclass(frozen=True)
class Option:
    """An option: its field, and how it is written.

    is_flag: it needs no value. is_many: it may stand several times, and has the list of its values. is_hidden: the
    script sets it itself, so ``--help`` does not show it.
    """

    field: Field
    is_flag: bool = False
    is_many: bool = False
    is_hidden: bool = False


@dataclass
class Parser:
    """The options that a script knows, by dotted name with ``_`` for ``-``.

    fields: those that are fields of the experiment; chosen: the parts of each kind that some run may have; short: short
    names of options. usage: for scripts that take more than options.
    """

    description: str
    usage: str | None = None
    epilog: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=lambda: SHORT_NAMES)
    options: dict[str, Option] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def add_argument(
        self, option: str, *, type: Any = str, default: Any = None, help: str = "", action: str | None = None
    ) -> None:
        """Let the script know ``option``.

        type: of its values; with a range, as in a part, ``Annotated[int, "[1, 1e9]"]``. action: ``store_true`` or
        ``append``.
        """
        name = option.removeprefix("--")
        flag = action == "store_true"
        hint, allowed = get_args(type)[:2] if get_origin(type) is Annotated else (type, "")
        one = Field(bool if flag else hint, False if flag else default, help, allowed)
        self.options[name.replace("-", "_")] = Option(one, flag, action == "append")
        self.written[name.replace("-", "_")] = option

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Other defaults of these options."""
        for name, default in defaults.items():
            one = self.options[name]
            self.options[name] = replace(one, field=replace(one.field, default=default))

    def get_defaults(self) -> Options:
        """The values of all options where none is given."""
        return Options({n: o.field.default for n, o in self.options.items()}, self.fields, (), self.chosen)

    def hide(self, names: Collection[str]) -> None:
        """Leave these out of ``--help`` and ``--print_config``."""
        for name in names:
            if name in self.options:
                self.options[name] = replace(self.options[name], is_hidden=True)

    def format_help(self) -> str:
        """What argparse makes of the options."""
        parser = ArgumentParser(description=self.description, usage=self.usage, epilog=self.epilog, add_help=False)
        group = parser.add_argument_group("options")
        group.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
        if self.fields:
            group.add_argument("--config", metavar="CONFIG", help="YAML file with any of the options below")
            group.add_argument("--print_config", action="store_true", help="print all options as such a file, and exit")
        for name, one in self.options.items():
            if one.is_flag:
                group.add_argument(
                    self.written[name], action="store_true", help=_escaped(f"{one.field.help} (default: false)")
                )
                continue
            told = f"{one.field.help} (type: {in_words(one.field.hint)}, default: {written(one.field.default)})"
            group.add_argument(
                self.written[name],
                metavar=_metavar(name, one.field),
                help=SUPPRESS if one.is_hidden else _escaped(told),
            )
        return parser.format_help()

    def format_config(self, values: Mapping[str, Any]) -> str:
        """These values of the options as a config file."""
        nested: dict[str, Any] = {}
        for name, one in self.options.items():
            if not one.is_hidden:
                section, _, leaf = name.rpartition(".")
                value = values[name]
                (nested.setdefault(section, {}) if section else nested)[leaf] = (
                    list(value) if isinstance(value, tuple) else value
                )
        return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # argparse fills in names


def _metavar(name: str, field: Field) -> str:
    if bool in field.kinds:
        return "{true,false,null}" if type(None) in field.kinds else "{true,false}"
    return "[ITEM,...]" if is_list(field.hint) else name.rpartition(".")[2].upper()


def written(value: Any) -> str:
    """A value as it would be written."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(written, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
