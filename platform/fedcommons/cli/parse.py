"""The command line: every field of the experiment as a dotted option or in a YAML file, and errors in one sentence."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from math import isfinite
from typing import Annotated, Any, NoReturn, TextIO

from fedcommons.cli.argv import Given, Line, read
from fedcommons.cli.parser import Option, Options, Parser
from fedcommons.cli.values import NULLS, number, value_of
from fedcommons.config import hints
from fedcommons.config.dotted import (
    SHORT_NAMES,
    choose,
    fields_for,
    full_name,
    generates,
    own_fields,
    unchosen_field_error,
)
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field
from fedcommons.config.registry import KINDS, having
from fedcommons.config.static_fields import summary
from fedcommons.errors import ClientError, Ended, UserError, lacks_memory, quote, sentence, unknown
from fedcommons.storage.paths import user_path

PATHS = ("artifacts", "data.dir", "data_dir", "from", "log_file", "out", "replay")
"""Options that name a file or folder."""

LAST_S = 15.0
"""Seconds that a script which SIGTERM ends may clean up for."""


def parser(
    description: str, argv: Sequence[str], defaults: Mapping[str, Any], lists: Mapping[str, str] | None = None
) -> Parser:
    """A parser with ``--config``, ``--print_config`` and every field of the parts that ``argv`` chooses.

    defaults: values of fields; fields of parts that were not chosen are ignored. lists: options of a sweep that name
    several parts, such as ``algorithms``, and their defaults.

    Raises:
        UserError: a part that cannot be found.
    """
    chosen = _chosen(read(argv), defaults, lists or {})
    result = Parser(description, epilog=_epilog(), chosen=chosen, fields=fields_for(chosen))
    for name, field in result.fields.items():
        default = defaults.get(name, field.default)
        kind = Annotated[field.hint, field.allowed]
        result.add_argument(f"--{name}", type=kind, default=default, help=_help(name, field, chosen))
    return result


def _help(name: str, field: Field, chosen: Mapping[str, Sequence[str]]) -> str:
    """The field's line of help with its range; of a field that names a part, with all names, and what is chosen."""
    for kind, k in KINDS.items():
        if k.field == name and k.known:
            told = [f"{part}: {summary(k.known[part])}" for part in chosen.get(kind, ()) if part in k.known]
            return "; ".join([f"{field.help}: {', '.join(k.known)}, or an import path", *told])
    return f"{field.help}, in {field.allowed}" if field.allowed and "|" not in field.allowed else field.help


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
            default = defaults.get(k.field, own_fields()[k.field].default)
            texts = [lists[o] for o in of_kind] or ([] if default is None else [str(default)])
        texts = [text for text in texts if not (k.is_optional and text.strip() in NULLS)]
        texts += [text for one in asked if one.name == "space" for text in _swept(one, k.field)]
        found[kind] = list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))
    if not any(generates(setting) for setting in found["sharing"]):
        del found["generator"]
    return {kind: names for kind, names in found.items() if names or not KINDS[kind].is_optional}


def _swept(one: Given, field: str) -> list[str]:
    """The values of ``--space NAME=VALUES`` where NAME is this field."""
    pairs = [text.partition("=") for text in (one.value if isinstance(one.value, list) else [one.value or ""])]
    return [values for name, _, values in pairs if SHORT_NAMES.get(name, name) == field]


def _epilog() -> str:
    short = ", ".join(f"--{name.replace('_', '-')} ({field})" for name, field in SHORT_NAMES.items())
    return f"For short: {short}. A part is a name or an import path of your own, such as my_lab.py:FedAvgM."


def add_shared(parser: Parser) -> None:
    """``--dry-run``, ``--on-cores`` and those of ``add_screen``, the same in every sweep."""
    text = "print what would run, with time, memory and disk from a few timed steps, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: say the time with so many cores besides"
    parser.add_argument("--on-cores", type=Annotated[int | None, "[1, 1e6]"], default=None, help=text)
    add_screen(parser)


def add_screen(parser: Parser) -> None:
    """``--quiet``, ``--log-file`` and ``--log-level``; see ``cli.display``."""
    parser.add_argument("--quiet", action="store_true", help="show warnings and errors only")
    parser.add_argument("--log-file", type=str | None, default=None, help="write what is said to this file as well")
    levels = Annotated[str, "debug | info | warning"]
    text = "of the log file: debug (every step, every metric), info or warning"
    parser.add_argument("--log-level", type=levels, default="info", help=text)


def refuse_fields(options: Options, taken: Mapping[str, str]) -> None:
    """Refuse fields on the command line that the script sets by an option of its own; ``taken``: field to option.

    Raises:
        UserError: such a field was given.
    """
    for name, option in taken.items():
        if name in options.asked:
            raise UserError(f"{name} is set by the sweep's own option: use --{option} instead of {options[name]}.")


def parse(parser: Parser, argv: Sequence[str]) -> Options:
    """The values of the options; with ``--help`` or ``--print_config`` they are printed, and the script ends.

    If an option is given twice, the last one counts. In options of ``PATHS`` a leading ``~`` is replaced.

    Raises:
        UserError: an option or key that does not exist (the nearest is named), or a value of the wrong type or range.
    """
    known = {*parser.options, "help", *(["print_config"] if parser.fields else [])}
    asked = [replace(one, name=_full(parser, known, one.name)) for one in read(argv)]
    values, flags = dict(parser.get_defaults().items()), set()
    for one in asked:
        if one.file and one.name in ("help", "print_config"):
            raise UserError(f"{one} is no key of a config file, got {one.file}.")
        if one.name not in known:
            raise _not_known(parser, one, known, ["-h", "--help", *parser.written.values()])
        if one.name not in parser.options:
            flags |= {one.name} if _true(one) else set()
            continue
        values[one.name] = _value(parser.options[one.name], one, values[one.name])
    for one in (one for one in asked if one.name in parser.options):
        parser.options[one.name].field.check(one.name if one.name in parser.fields else str(one), values[one.name])
    if {"preset", "tracking.preset"} <= values.keys():  # also where a printed config is read again with another
        values["tracking.preset"] = values["preset"]
    for name, option in parser.options.items():
        if option.is_many:
            values[name] = [text for one in asked if one.name == name for text in _texts(one)]
    if "help" in flags:
        print(parser.format_help(), end="")
        sys.exit(0)
    if "print_config" in flags:
        print(parser.format_config(values), end="")
        sys.exit(0)
    result = Options(values, parser.fields, {one.name for one in asked} & parser.fields.keys(), parser.chosen)
    changed = sorted(n for n in result.asked if n.startswith("dp.") and result[n] != parser.fields[n].default)
    used = {"dp.local", *(["dp.delta"] if {"generator.delta", "sharing.delta"} & result.fields.keys() else [])}
    used |= {"dp.noise"} if _may_draw_noise(result) else set()
    if (idle := [n for n in changed if n not in used]) and not result.dp.local:
        raise UserError(f"{idle[0]} changes nothing without --dp.local true.")
    return result


def _may_draw_noise(options: Options) -> bool:
    """Whether something besides local steps may: generators, their labels, stages, FedDPMS's means, one's own part."""
    is_own = any(":" in name for names in options.chosen.values() for name in names)
    return is_own or bool({"generator.label_noise", "sharing.delta", "feddpms.sigma"} & options.fields.keys())


def _value(option: Option, one: Given, before: Any) -> Any:
    """The value that an option gets by what was given; before: what it had."""
    if option.is_flag:
        return _true(one)
    if option.is_many:
        return before
    if one.value is None and bool in option.field.kinds and "." in one.name:
        return True
    if one.name in PATHS and not isinstance(one.value, list):
        one = replace(one, value=str(user_path(f"--{one.name}", one.text)))
    if one.name == "storage" and isinstance(one.value, str) and one.value.strip() not in NULLS:
        is_url = ":" in one.value.partition("/")[0]
        one = one if is_url else replace(one, value=str(user_path("--storage", one.value)))
    return value_of(one, option.field.hint)


def _texts(one: Given) -> list[str]:
    return one.value if isinstance(one.value, list) else [one.text]


def _full(parser: Parser, known: Collection[str], name: str) -> str:
    full = full_name(name, known, parser.chosen, parser.short)
    return full if full in known else name


def _true(one: Given) -> bool:
    """Whether a flag is set; in a file, or after ``=``, it may have the value true or false."""
    answers = {"true": True, "false": False}
    if one.value is not None and one.text.lower() not in answers:
        raise UserError(f"{one} takes true or false, got {quote(one.text)}.")
    return one.value is None or answers[one.text.lower()]


def _not_known(parser: Parser, one: Given, known: Collection[str], options: Iterable[str]) -> UserError:
    if parser.chosen and (refused := unchosen_field_error(parser.short.get(one.name, one.name), parser.chosen)):
        return refused
    if fields := sorted(name for name in known if name.startswith(f"{one.name}.")):
        return UserError(f"{one} is a section: name one of its fields, such as {fields[0]}.")
    what, called = ("config key", one.name) if one.file else ("option", str(one))
    if said := _hint(parser, one):
        return UserError(f"unknown {what} {quote(called)}: {said}.")
    return unknown(what, called, known if one.file else options)


def _hint(parser: Parser, one: Given) -> str | None:
    """What is meant by a word that no option has, if it is known from elsewhere or is a constant of some part."""
    others = [name for name in parser.options if name not in parser.fields]
    if not parser.fields or any(name.startswith(one.name) for name in others):  # --epsilon where there is --epsilons
        return None
    before = "" if one.file else "--"
    if found := hints.meant(one.name, parser.options):
        is_taken = parser.options[found].is_hidden  # by an option of the sweep that has its values
        leaf = found.rpartition(".")[2]
        options = [name for name in (f"{leaf}s", parser.short.get(leaf, "")) if is_taken and name in parser.options]
        return f"use {before}{options[0] if options else found}"
    if said := hints.sentence_for(one.name):
        return said
    owned = [] if "." in one.name else having(one.name)
    if not owned or any(name.rpartition(".")[2] == one.name for name in parser.options):
        return None
    ways = dict.fromkeys(
        f"{before}{field}" + (f" with {before}{KINDS[kind].field} {name}" if field not in parser.options else "")
        for kind, name, field in owned[:3]
    )
    return f"use {' or '.join(ways)}"


def experiment(options: Options) -> Experiment:
    """The experiment that the options describe."""
    return choose(flat(options))


def flat(options: Options) -> dict[str, Any]:
    """The fields among the options: dotted names to values."""
    return {name: options[name] for name in options if name in options.fields}


def early(argv: Sequence[str], name: str, default: str) -> str:
    """The value of an option that the defaults of others depend on, read before the parser is made."""
    found = [one.text for one in read(argv) if name in (one.name, SHORT_NAMES.get(one.name))]
    return found[-1] if found else default  # the last one counts, as for the parser


def named(argv: Sequence[str]) -> set[str]:
    """The options that are given, in config files too."""
    return {one.name for one in read(argv)}


def split(option: str, text: str, kind: Callable[[str], Any] = str, allowed: str = "") -> tuple:
    """The values of a comma list; numbers are finite. allowed: their range, as that of a ``Field``.

    Raises:
        UserError: a value is not of this kind, out of range, stands twice, or there is none.
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
    if not values or "" in values or len(set(values)) < len(values):
        raise UserError(f"{option} takes different values separated by commas, got {quote(text)}.")
    Field(kind, None, "", allowed).check(option, tuple(values))
    return tuple(values)


def main(function: Callable[[Sequence[str]], int], *, resumes: bool = True) -> NoReturn:
    """Run a script and exit: with 2 for a bad request, 1 for a failing client or disk, 130 for Ctrl-C.

    resumes: whether it has ``--resume``, so that who was stopped is told of it.
    Each error is printed as one sentence, in the last line. The traceback of somebody's code is in ``error.txt``.
    """
    signal.signal(signal.SIGTERM, _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")  # letters that the locale's encoding lacks
    code = _run(function, resumes)
    for stream in (sys.stdout, sys.stderr):
        _drop(stream)
    sys.exit(code)


def _run(function: Callable[[Sequence[str]], int], resumes: bool = True) -> int | str | None:
    stays = f"what was written stays{': a run or a sweep goes on with --resume' if resumes else ''}."
    try:
        try:
            code = function(Line(sys.argv[1:]))
        except SystemExit as ended:  # --help and the like
            code = ended.code
        if sys.stdout is not None:
            sys.stdout.flush()  # now, as it may fail
        return code
    except UserError as error:
        return _fail(f"error: {sentence(error)}", 2)
    except ClientError as error:
        notes = getattr(error, "__notes__", [])
        return _fail("\n".join([*notes, f"error: {error.sentence}"]), 1)
    except BrokenPipeError:
        return _fail(f"error: nobody reads the output any more; {stays}", 1)
    except OSError as error:  # of the disk: it is full, a file too large, a folder in a file's place
        return _fail(f"error: {sentence(error)}; {stays}", 1)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not lacks_memory(error):
            raise
        return _fail(f"error: {sentence(error)}; {stays}", 1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # a second one ends it at once, without a traceback
        goes_on = "the same command with --resume goes on from the last checkpoints."
        return _fail(f"stopped; {goes_on if resumes else stays}", 130)


def _end(*_: object) -> NoReturn:
    """Begin to end, and end after ``LAST_S``: where SIGTERM went to Ray's processes too, this one may wait for them."""
    last = threading.Timer(LAST_S, os._exit, (143,))
    last.daemon = True
    last.start()
    raise Ended(143)


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
