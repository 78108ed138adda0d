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

from fedcommons.config.experiment import Experiment, field_names, override
from fedcommons.config.given import Given, given
from fedcommons.errors import ClientError, UserError, sentence, shown, unknown
from fedcommons.paths import user_path

set_parsing_settings(docstring_parse_attribute_docstrings=True)

PATHS = ("artifacts", "data.dir", "data_dir", "from", "out", "replay")
"""Options that name a file or folder."""


def parser(description: str, defaults: Mapping[str, Any]) -> ArgumentParser:
    """A parser with ``--config``, ``--print_config`` and every field of the experiment, preset to ``defaults``."""
    result = ArgumentParser(description=description, exit_on_error=False)
    result.add_argument("--config", action="config", help="YAML file with any of the options below")
    result.add_class_arguments(Experiment)
    result.set_defaults(dict(defaults))
    return result


def hide(parser: ArgumentParser, fields: Collection[str]) -> None:
    """Leave fields that a sweep sets itself out of ``--help`` and ``--print_config``: it takes what it prints."""
    for action in parser._actions:
        if action.dest in fields:
            action.help = SUPPRESS


def refuse_fields(options: Namespace, taken: Mapping[str, str]) -> None:
    """Refuse fields that were asked for though an option of the script sets them; ``taken``: field to that option.

    Raises:
        UserError: there is one.
    """
    for name, option in taken.items():
        if name in options.asked:
            raise UserError(f"{name} is set by the sweep's own option: use --{option} instead of {options[name]}.")


def parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """The parsed options; ``asked``: the fields that were named, whatever their values.

    Of an option that is given twice the last counts. Options of ``PATHS`` come with ``~`` replaced.

    Raises:
        UserError: an option or key that does not exist (the nearest is named), or a value of the wrong type.
    """
    options = {o[2:].replace("-", "_"): (o, action) for o, action in parser._option_string_actions.items()}
    known = {name for name in options if not any(other.startswith(f"{name}.") for other in options)} - {"h", "config"}
    asked, words, flags = given(argv), [], {}
    for one in asked:
        if one.file and one.name in ("help", "print_config"):
            raise UserError(f"{one} is no key of a config file, got {one.file}.")
        if one.name not in known:
            raise _not_known(one, known, [options[name][0] for name in known])
        option, action = options[one.name]
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
    result.asked = asked_for(argv)
    return result


def _check_read(one: Given, value: Any) -> None:
    """Refuse what was read as another value than it looks like: YAML takes 1:30 for 90, a text field null for text."""
    if one.file and isinstance(value, str) and (isinstance(one.value, list) or one.text == "null"):
        raise UserError(f"{one} takes one text, got {shown(one.text)}.")
    if type(value) is int or (type(value) is float and isfinite(value)):
        try:
            if type(value)(one.text) != value:
                raise ValueError
        except ValueError:
            raise UserError(f"{one} takes decimal numbers, got {shown(one.text)}.") from None


def _true(one: Given) -> bool:
    """Whether an option that has no value is set: in a file, or after ``=``, it may say true or false."""
    answers = {"true": True, "false": False}
    if one.value is not None and one.text.lower() not in answers:
        raise UserError(f"{one} takes true or false, got {shown(one.text)}.")
    return one.value is None or answers[one.text.lower()]


def _not_known(one: Given, known: Collection[str], options: Iterable[str]) -> UserError:
    if fields := sorted(name for name in known if name.startswith(f"{one.name}.")):
        return UserError(f"{one} is a section: name one of its fields, such as {fields[0]}.")
    return unknown("config key", one.name, known) if one.file else unknown("option", str(one), options)


def experiment(options: Namespace) -> Experiment:
    """The experiment that the options describe."""
    flat = {name: value for name, value in options.items(branches=False)}
    names = Experiment.__dataclass_fields__
    fields = {n: tuple(v) if isinstance(v, list) else v for n, v in flat.items() if n.partition(".")[0] in names}
    return override(Experiment(), fields)


def early(argv: Sequence[str], name: str, default: str) -> str:
    """The value of an option that decides the defaults of others, before the parser can be made."""
    found = [one.text for one in given(argv) if one.name == name]
    return found[-1] if found else default  # the last one counts, as for the parser


def named(argv: Sequence[str]) -> set[str]:
    """The options that are given, in config files too."""
    return {one.name for one in given(argv)}


def asked_for(argv: Sequence[str]) -> frozenset[str]:
    """The fields that are named on the command line or in a config file."""
    return frozenset(named(argv) & set(field_names()))


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
    """Run a script: bad requests exit with 2, failures in clients or in writing with 1, Ctrl-C with 130.

    Each is said in one sentence. Above a client's sentence stands the traceback of its code, wherever it ran.
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
    """Drop what a stream cannot write: the interpreter would try again at its end, and complain."""
    if stream is None:  # closed by whoever started this process
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_sentence(message: str) -> str:
    """What jsonargparse says of a value of the wrong type, for one type or for several."""
    for form in (
        r'key "(?P<key>[^"]+)":.*?Subtypes: \[(?P<type>.+?)\] .*Given value:(?P<value>.*)',
        r'key "(?P<key>[^"]+)":.*?Expected a (?P<type>.+?)\. Got value:(?P<value>.*)',
    ):
        if found := re.search(form, " ".join(message.split())):
            kind = re.sub(r"<class '(\w+)'>", r"\1", found["type"]).replace("typing.", "").replace("NoneType", "null")
            return f"{found['key']} takes {kind.replace(', null', ' or null')}, got {shown(found['value'].strip())}."
    return " ".join(message.split())
