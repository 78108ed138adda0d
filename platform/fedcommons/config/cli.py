"""The command line: every field of the experiment as a dotted option or in a YAML file, and errors in one sentence."""

import os
import re
import signal
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any, NoReturn, TextIO

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field
from fedcommons.config.flat import SHORT_NAMES, choose, fields_for, full_name, generates, of_others, own_fields
from fedcommons.config.given import Given, given
from fedcommons.config.parts import KINDS
from fedcommons.errors import ClientError, UserError, sentence, shown, unknown
from fedcommons.paths import user_path

Options = Namespace
"""Parsed options: by attribute, or by name as in ``options["data.name"]``."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)

PATHS = ("artifacts", "data.dir", "data_dir", "from", "out", "replay")
"""Options that name a file or folder."""


class Parser(ArgumentParser):
    """A parser that knows which options are fields of the experiment, and which parts were chosen."""

    fields: Mapping[str, Field] = {}
    chosen: Mapping[str, Sequence[str]] = {}
    short: Mapping[str, str] = SHORT_NAMES


def parser(
    description: str, argv: Sequence[str], defaults: Mapping[str, Any], lists: Mapping[str, str] | None = None
) -> Parser:
    """A parser with ``--config``, ``--print_config`` and every field of the parts that ``argv`` chooses.

    defaults: values of fields; fields of parts that were not chosen are ignored. lists: options of a sweep that name
    several parts, such as ``algorithms``, and their defaults.

    Raises:
        UserError: a part that cannot be found.
    """
    chosen = _chosen(given(argv), defaults, lists or {})
    result = Parser(description=description, epilog=_epilog(), exit_on_error=False)
    result.chosen, result.fields = chosen, fields_for(chosen)
    result.add_argument("--config", action="config", help="YAML file with any of the options below")
    for name, field in result.fields.items():
        within = f", in {field.allowed}" if field.allowed and "|" not in field.allowed else ""
        result.add_argument(
            f"--{name}", type=field.hint, default=defaults.get(name, field.default), help=field.help + within
        )
    return result


LISTS = {"algorithms": "algorithm", "settings": "sharing"}
"""Options of sweeps that name several parts of a kind."""


def _chosen(asked: Sequence[Given], defaults: Mapping[str, Any], lists: Mapping[str, str]) -> dict[str, list[str]]:
    """The parts of each kind that some run may have."""
    last = {one.name: one for one in asked}
    found: dict[str, list[str]] = {}
    for kind, k in KINDS.items():
        of_kind = [option for option, its in LISTS.items() if its == kind and option in lists]
        options = [k.field, *(short for short, field in SHORT_NAMES.items() if field == k.field), *of_kind]
        texts = [text for o in options if o in last and isinstance(text := last[o].value, str)]
        if not texts:
            texts = [lists[o] for o in of_kind] or [str(defaults.get(k.field, own_fields()[k.field].default))]
        texts += [text for one in asked if one.name == "space" for text in _swept(one, k.field)]
        found[kind] = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
    if not any(generates(setting) for setting in found["sharing"]):
        del found["generator"]
    return found


def _swept(one: Given, field: str) -> list[str]:
    """The values of ``--space NAME=VALUES`` where NAME is this field."""
    pairs = [text.partition("=") for text in (one.value if isinstance(one.value, list) else [one.value or ""])]
    return [values for name, _, values in pairs if SHORT_NAMES.get(name, name) == field]


def _epilog() -> str:
    short = ", ".join(f"--{name.replace('_', '-')} ({field})" for name, field in SHORT_NAMES.items())
    return f"For short: {short}. A part is a name or an import path of your own, such as my_lab.py:FedAvgM."


def add_dry_run(parser: Parser) -> None:
    """``--dry-run`` and ``--on-cores``, the same in every sweep."""
    text = "print what would run, with time, memory and disk from a few timed steps, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: say the time with so many cores besides"
    parser.add_argument("--on-cores", type=int | None, default=None, help=text)


def hide(parser: ArgumentParser, fields: Collection[str]) -> None:
    """Leave fields that a sweep sets itself out of ``--help`` and ``--print_config``, as they are refused there."""
    for action in parser._actions:
        if action.dest in fields:
            action.help = SUPPRESS


def refuse_fields(options: Namespace, taken: Mapping[str, str]) -> None:
    """Refuse fields on the command line that the script sets by an option of its own; ``taken``: field to option.

    Raises:
        UserError: such a field was given.
    """
    for name, option in taken.items():
        if name in options.asked:
            raise UserError(f"{name} is set by the sweep's own option: use --{option} instead of {options[name]}.")


def parse(parser: Parser, argv: Sequence[str]) -> Namespace:
    """The parsed options; added are ``fields``, ``asked`` (names of the given fields) and ``chosen`` (parts by kind).

    If an option is given twice, the last one counts. In options of ``PATHS`` a leading ``~`` is replaced.

    Raises:
        UserError: an option or key that does not exist (the nearest is named), or a value of the wrong type.
    """
    options = {o[2:].replace("-", "_"): (o, action) for o, action in parser._option_string_actions.items()}
    known = {name for name in options if not any(other.startswith(f"{name}.") for other in options)} - {"h", "config"}
    asked, words, flags = [replace(one, name=_full(parser, known, one.name)) for one in given(argv)], [], {}
    for one in asked:
        if one.file and one.name in ("help", "print_config"):
            raise UserError(f"{one} is no key of a config file, got {one.file}.")
        if one.name not in known:
            raise _not_known(parser, one, known, [options[name][0] for name in known])
        option, action = options[one.name]
        if one.value is None and one.name in parser.fields and bool in parser.fields[one.name].kinds:
            one = replace(one, value="true")
        if one.name in PATHS:
            one = replace(one, value=str(user_path(option, one.text)))
        if action.nargs == 0:
            flags[option] = _true(one)
        elif action.default == [] and isinstance(one.value, list):
            words += [f"{option}={value}" for value in one.value]
        else:
            words.append(option if one.value is None and one.name == "print_config" else f"{option}={one.text}")
    try:
        result = parser.parse_args([*words, *(option for option, wanted in flags.items() if wanted)])
    except ArgumentError as error:
        raise UserError(_one_sentence(str(error))) from error
    except (RecursionError, OverflowError):
        worst = max(asked, key=lambda one: len(one.value or ""))
        said = f"{worst} is nested too deeply or too large a number, got {shown(worst.text)}."
        raise UserError(said) from None
    for one in {one.name: one for one in asked}.values():  # the last of each
        _check_read(one, result.get(one.name))
    result.fields, result.chosen = parser.fields, parser.chosen
    result.asked = frozenset(one.name for one in asked) & parser.fields.keys()
    changed = sorted(n for n in result.asked if n.startswith("dp.") and result[n] != parser.fields[n].default)
    used = {"dp.local", "dp.delta"} if "generator.delta" in result.fields else {"dp.local"}
    if (idle := [n for n in changed if n not in used]) and not result.dp.local:
        raise UserError(f"{idle[0]} changes nothing without --dp.local true.")
    return result


def _full(parser: Parser, known: Collection[str], name: str) -> str:
    full = full_name(name, known, parser.chosen, parser.short)
    return full if full in known else name


def _check_read(one: Given, value: Any) -> None:
    """Refuse values that YAML reads differently than they look: 1:30 as 90, or null as text for a text field."""
    if one.file and isinstance(value, str) and (isinstance(one.value, list) or one.text == "null"):
        raise UserError(f"{one} takes one text, got {shown(one.text)}.")
    if type(value) is int or (type(value) is float and isfinite(value)):
        try:
            if type(value)(one.text) != value:
                raise ValueError
        except ValueError:
            raise UserError(f"{one} takes decimal numbers, got {shown(one.text)}.") from None


def _true(one: Given) -> bool:
    """Whether a flag is set; in a file, or after ``=``, it may have the value true or false."""
    answers = {"true": True, "false": False}
    if one.value is not None and one.text.lower() not in answers:
        raise UserError(f"{one} takes true or false, got {shown(one.text)}.")
    return one.value is None or answers[one.text.lower()]


def _not_known(parser: Parser, one: Given, known: Collection[str], options: Iterable[str]) -> UserError:
    if parser.chosen and (refused := of_others(parser.short.get(one.name, one.name), parser.chosen)):
        return refused
    if fields := sorted(name for name in known if name.startswith(f"{one.name}.")):
        return UserError(f"{one} is a section: name one of its fields, such as {fields[0]}.")
    return unknown("config key", one.name, known) if one.file else unknown("option", str(one), options)


def experiment(options: Namespace) -> Experiment:
    """The experiment that the options describe."""
    return choose(flat(options))


def flat(options: Namespace) -> dict[str, Any]:
    """The fields among the options: dotted names to values."""
    found = {name: value for name, value in options.items(branches=False) if name in options.fields}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}


def early(argv: Sequence[str], name: str, default: str) -> str:
    """The value of an option that the defaults of others depend on, read before the parser is made."""
    found = [one.text for one in given(argv) if name in (one.name, SHORT_NAMES.get(one.name))]
    return found[-1] if found else default  # the last one counts, as for the parser


def named(argv: Sequence[str]) -> set[str]:
    """The options that are given, in config files too."""
    return {one.name for one in given(argv)}


def split(option: str, text: str, kind: Callable[[str], Any] = str) -> tuple:
    """The values of a comma list; numbers are finite.

    Raises:
        UserError: a value is not of this kind, stands twice, or there is none.
    """
    values = []
    for part in map(str.strip, str(text).split(",")):
        try:
            values.append(kind(part))
            if kind is not str and not (isfinite(values[-1]) and part.isascii() and "_" not in part):
                raise ValueError
        except (ValueError, OverflowError):
            what = "finite float" if kind is float else kind.__name__
            raise UserError(f"{option} takes {what} values separated by commas, got {shown(part)}.") from None
    if not values or "" in values or len(set(values)) < len(values):
        raise UserError(f"{option} takes different values separated by commas, got {shown(text)}.")
    return tuple(values)


def main(function: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a script and exit: with 2 for a bad request, 1 for a failing client or disk, 130 for Ctrl-C.

    Each error is printed as one sentence. For a client's failure the traceback of its code is printed first.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = _run(function)
    for stream in (sys.stdout, sys.stderr):
        _drop(stream)
    sys.exit(code)


def _run(function: Callable[[Sequence[str]], int]) -> int | str | None:
    try:
        try:
            code = function(sys.argv[1:])
        except SystemExit as ended:  # --help and the like
            code = ended.code
        if sys.stdout is not None:
            sys.stdout.flush()  # now, as it may fail
        return code
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except ClientError as error:
        notes = getattr(error, "__notes__", [])
        return _fail("\n".join([f"{error.trace}error: {error.sentence}", *notes]), 1)
    except BrokenPipeError:
        return _fail("error: nobody reads the output any more; a run or a sweep goes on with --resume.", 1)
    except OSError as error:  # of the disk: it is full, a file too large, a folder in a file's place
        return _fail(f"error: {sentence(error)}; what was written stays: a run or a sweep goes on with --resume.", 1)
    except KeyboardInterrupt:
        return _fail("stopped; the same command with --resume goes on from the last checkpoints.", 130)


def _fail(text: str, code: int) -> int:
    with suppress(OSError):  # stderr may be closed too
        print(text, file=sys.stderr)
    return code


def _drop(stream: TextIO | None) -> None:
    """Discard what a stream cannot write; otherwise the interpreter would try again at exit and print an error."""
    if stream is None:  # closed by whoever started this process
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_sentence(message: str) -> str:
    """jsonargparse's message for a value of the wrong type, as one short sentence."""
    for form in (
        r'key "(?P<key>[^"]+)":.*?Subtypes: \[(?P<type>.+?)\] .*Given value:(?P<value>.*)',
        r'key "(?P<key>[^"]+)":.*?Expected a (?P<type>.+?)\. Got value:(?P<value>.*)',
    ):
        if found := re.search(form, " ".join(message.split())):
            kind = re.sub(r"<class '(\w+)'>", r"\1", found["type"]).replace("typing.", "").replace("NoneType", "null")
            kind = {"tuple": "a list such as [16,32]"}.get(kind, kind)
            return f"{found['key']} takes {kind.replace(', null', ' or null')}, got {shown(found['value'].strip())}."
    return " ".join(message.split())
