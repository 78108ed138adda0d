"""The options of a script and their values, the texts of ``--help`` and ``--print_config``, and a run's command."""

import shlex
import time
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import yaml

from fedcommons.cli.argv import typed
from fedcommons.cli.values import in_words, is_list
from fedcommons.config import presets
from fedcommons.config.dotted import SHORT_NAMES, choose, common_fields, nested
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field, field_of
from fedcommons.config.registry import KINDS

FIRST = ("preset", "algorithm", "algorithms", "methods", "sharing.setting", "settings", "data.name", "partition.alpha",
         "alphas", "partition.n_clients", "federation.rounds", "client.epochs", "client.batch_size", "client.lr", "lrs",
         "seed", "seeds", "target", "model.name", "out", "resume", "dry_run")  # fmt: skip
"""The options that users change most, in the order of ``--help``."""

NewOption = tuple[str, Any, Any, str]
"""Name, type, default and help text of an option."""


class Options(dict[str, Any]):
    """The values of a script's options, by dotted name: ``options.client.lr``, ``options["client.lr"]``.

    fields: dotted name -> field, of the options that are fields of the experiment. asked: names of the fields that the
    user set. chosen: kind -> names of the components that any run of the command may use. started: see
    ``argv.started``. words: words before the first option, for scripts that take arguments other than options.
    """

    def __init__(self, values: Mapping[str, Any], fields: Mapping[str, Field], asked: Collection[str],
                 chosen: Mapping[str, Sequence[str]], started: float = 0,
                 words: Sequence[str] = ()) -> None:  # fmt: skip
        super().__init__(values)
        self.__dict__.update(fields=fields, asked=frozenset(asked), chosen=chosen, started=started, words=words)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name.replace("-", "_"))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name.replace("-", "_"), value)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if section := {n.removeprefix(f"{name}."): v for n, v in self.items() if n.startswith(f"{name}.")}:
            return SimpleNamespace(**section)
        raise AttributeError(f"there is no option {name}")

    __setattr__ = __setitem__

    def elapsed(self) -> float:
        """Return the seconds since the command began."""
        return time.time() - self.started


@dataclass(frozen=True)
class Option:
    """An option of the command line.

    field: type, default, range and help text. is_flag: the option needs no value. is_many: the option may be repeated;
    its value is the list of all values. is_hidden: the script sets the option, so ``--help`` does not show it.
    """

    field: Field
    is_flag: bool = False
    is_many: bool = False
    is_hidden: bool = False


@dataclass
class Parser:
    """The options of a script; names are dotted, with ``_`` instead of ``-``.

    description: text whose first line is the title of ``--help``, such as the script's docstring. The first three lines
    that begin with ``python`` or ``fedcommons`` are examples. usage: usage line, for scripts that also take
    arguments without an option.
    fields, chosen: see ``Options``. short: short name -> name of the option. options: name -> option.
    """

    description: str | None
    usage: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=lambda: SHORT_NAMES)
    options: dict[str, Option] = field(default_factory=dict)

    def add_argument(
        self, option: str, *, type: Any = str, default: Any = None, help: str = "", action: str | None = None
    ) -> None:
        """Add the option ``option``, such as ``--dry-run``.

        type: type of the value, with a range as in ``Annotated[int, "[1, 1e9]"]``. help: text for ``--help``. action:
        ``store_true`` (a flag), ``append`` (a repeatable option) or None (an option with one value).
        """
        flag = action == "store_true"
        option_field = field_of(bool if flag else type, False if flag else default, help)
        self.options[option.removeprefix("--").replace("-", "_")] = Option(option_field, flag, action == "append")

    def add_options(self, options: Iterable[NewOption]) -> None:
        """Add options; the type bool makes a flag."""
        for name, kind, default, text in options:
            action = "store_true" if kind is bool else None
            self.add_argument(f"--{name}", type=kind, default=default, help=text, action=action)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Change default values. defaults: name of the option -> new default."""
        for name, default in defaults.items():
            option = self.options[name]
            self.options[name] = replace(option, field=replace(option.field, default=default))

    def get_defaults(self) -> Options:
        """Return all options with their default values."""
        return Options({n: o.field.default for n, o in self.options.items()}, self.fields, (), self.chosen)

    def hide(self, names: Collection[str]) -> None:
        """Hide options from ``--help`` and ``--print_config``; names without an option are ignored."""
        for name in names:
            if name in self.options:
                self.options[name] = replace(self.options[name], is_hidden=True)

    def format_help(self) -> str:
        """Return the text that ``--help`` prints, formatted by argparse: examples, then options by importance."""
        title, *lines = (self.description or "").splitlines() or [""]
        examples = [line for line in lines if line.startswith(("python ", "fedcommons "))]
        paragraphs = [title, "\n  ".join(["examples:", *examples[:3]])]
        if self.fields:
            method = "algorithms" if "algorithms" in self.options else "algorithm"
            paragraphs.append(
                f"Add --{method} NAME to see its constants. The NAME of a method or another\n"
                "component can be an import path of your code, such as my_lab.py:FedAvgM."
            )
        parser = ArgumentParser(description="\n\n".join(paragraphs), usage=self.usage or SUPPRESS, add_help=False,
                                formatter_class=RawDescriptionHelpFormatter)  # fmt: skip
        titles = ("options that users change most", "options of this command and its components", "other options")
        groups = [parser.add_argument_group(title) for title in (titles if self.fields else ("options",))]
        first, special, rest = groups if self.fields else groups * 3
        for name in sorted(self.options, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
            option = self.options[name]
            kind = "" if option.is_flag else f"type: {in_words(option.field.hint)}, "
            text = f"{option.field.help} ({kind}default: {written(option.field.default)})".replace("%", "%%")
            look: Any = {"action": "store_true"} if option.is_flag else {"metavar": _metavar(name, option.field)}
            names = [*(short for short, full in self.short.items() if full == name and short not in self.options), name]
            group = first if name in FIRST else rest if name in common_fields() else special
            group.add_argument(*map(typed, names), help=SUPPRESS if option.is_hidden else text, **look)
        if self.fields:
            rest.add_argument("--config", metavar="CONFIG", help="YAML file that sets any of these options")
            rest.add_argument("--print_config", action="store_true", help="print all options for --config, and exit")
        rest.add_argument("--version", action="store_true", help="print the version of fedcommons and exit")
        rest.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
        return parser.format_help()

    def format_config(self, values: Mapping[str, Any]) -> str:
        """Return the YAML text of a config file with these values (option -> value), without hidden options."""
        config = nested({name: values[name] for name, option in self.options.items() if not option.is_hidden})
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        # A character that is not printable may reverse the text in a terminal, so all such characters are escaped.
        is_printable = all(c.isprintable() for c in text.replace("\n", ""))
        return text if is_printable else yaml.safe_dump(config, sort_keys=False)


def _metavar(name: str, field: Field) -> str:
    if bool in field.kinds:
        return "{true,false,null}" if type(None) in field.kinds else "{true,false}"
    return "[ITEM,...]" if is_list(field.hint) else name.rpartition(".")[2].upper()


def written(value: Any) -> str:
    """Return a value as the text that the user would type, such as ``[16, 32]``, ``true`` or ``null``."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(written, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def command_line(config: Experiment, preset: str, stated: Collection[str] = ()) -> str:
    """Return the command-line options with which ``run.py`` runs this experiment.

    These are the sharing strategy, the fields that differ from the preset, and the fields ``stated``. Fields that the
    user set or swept belong in ``stated``, as preset ``authors`` has different values for each configuration.
    """
    named = {KINDS[kind].field: name for kind, name in config.chosen.items()}
    usual = presets.preset(preset, config.data.name, named.get("generator.name", "ddpm"))
    of_preset, of_parts = choose(usual).flat, choose({**usual, **named}).flat
    arguments = {"preset": preset, "data.name": config.data.name}
    arguments |= {
        field: name for field, name in named.items() if field == KINDS["sharing"].field or of_preset.get(field) != name
    }
    for name, value in config.flat.items():
        is_usual = name in of_parts and of_parts[name] == value and name not in stated
        if name not in named and not is_usual and not name.startswith(("source.", "tracking.")):
            arguments[name] = value
    return " ".join(f"--{name} {shlex.quote(written(value))}" for name, value in arguments.items())
