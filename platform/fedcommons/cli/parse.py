"""Parser of command lines, with an option for each field of the experiment, and the handling of a script's errors."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

from fedcommons.cli.argv import Argument, Line, read, started, typed
from fedcommons.cli.parser import Option, Options, Parser
from fedcommons.cli.values import NULLS, value_of
from fedcommons.config import hints
from fedcommons.config.dotted import (
    NO_SHARING,
    SHORT_NAMES,
    choose,
    common_fields,
    fields_for,
    full_name,
    generates,
    unchosen_field_error,
)
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field
from fedcommons.config.registry import KINDS, choices, having
from fedcommons.config.static_fields import summary
from fedcommons.errors import ClientError, Ended, UserError, lacks_memory, quote, sentence, unknown
from fedcommons.storage.paths import user_path

PATHS = ("artifacts", "data.dir", "data_dir", "from", "log_file", "out", "replay")
"""Options whose value is a path of a file or folder."""

LAST_S = 15.0
"""Maximum seconds for cleaning up after SIGTERM."""


def parser(
    description: str | None, argv: Sequence[str], defaults: Mapping[str, Any], lists: Mapping[str, str] | None = None
) -> Parser:
    """Return a parser with ``--config``, ``--print_config`` and all fields of the components that ``argv`` chooses.

    description: see ``Parser``. defaults: dotted name -> default that replaces the field's default; fields of
    other components are ignored. lists: option of a sweep that names several components -> default of this option.
    """
    items = [_stored(item, SHORT_NAMES.get(item.name, item.name)) for item in read(argv)]
    chosen = _chosen(items, defaults, lists or {})
    result = Parser(description, chosen=chosen, fields=fields_for(chosen))
    for name, field in result.fields.items():
        default = defaults.get(name, field.default)
        kind = Annotated[field.hint, field.allowed]
        result.add_argument(f"--{name}", type=kind, default=default, help=_help(name, field, chosen))
    return result


def _help(name: str, field: Field, chosen: Mapping[str, Sequence[str]]) -> str:
    """Return a field's help text with the allowed range, or with the names and summaries of components."""
    for kind, k in KINDS.items():
        if k.field == name and k.components:
            names = [part for part in chosen.get(kind, ()) if part in k.components]
            text = f"{field.help}: {', '.join(choices(kind))}, or an import path"
            return "; ".join([text, *(f"{part}: {summary(k.components[part])}" for part in names)])
    return f"{field.help}; allowed: {field.allowed}" if field.allowed and "|" not in field.allowed else field.help


LISTS = {"algorithms": "algorithm", "methods": "algorithm", "settings": "sharing"}
"""Option of a sweep that names several components -> kind of these components."""


def _chosen(items: Sequence[Argument], defaults: Mapping[str, Any], lists: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the components that the command's runs may use: kind -> names."""
    last = {item.name: item for item in items}
    components: dict[str, list[str]] = {}
    for kind, k in KINDS.items():
        of_kind = [option for option, its in LISTS.items() if its == kind and option in lists]
        options = [k.field, *(short for short, field in SHORT_NAMES.items() if field == k.field), *of_kind]
        texts = [text for o in options if o in last and isinstance(text := last[o].value, str)]
        if not texts:
            default = defaults.get(k.field, common_fields()[k.field].default)
            texts = [lists[o] for o in of_kind] or ([] if default is None else [str(default)])
        texts = [text for text in texts if not (k.is_optional and text.strip() in NULLS)]
        texts += [text for item in items if item.name == "space" for text in _swept(item, k.field)]
        names = [name.strip() for text in texts for name in text.split(",")]
        components[kind] = list(dict.fromkeys(filter(None, names)))
    if not any(generates(setting) for setting in components["sharing"]):
        del components["generator"]
    return {kind: names for kind, names in components.items() if names or not KINDS[kind].is_optional}


def _stored(item: Argument, name: str) -> Argument:
    """Return the option with the sharing strategy ``none`` replaced by ``real``, the name that configs store."""

    def stored(text: str) -> str:
        field, equals, names = text.partition("=") if name == "space" else ("", "", text)
        if name == "space" and SHORT_NAMES.get(field, field) != "sharing.setting":
            return text
        return field + equals + ",".join("real" if n.strip() == NO_SHARING else n for n in names.split(","))

    texts = item.value
    if texts is None or name not in ("sharing.setting", "settings", "space"):
        return item
    return replace(item, value=stored(texts) if isinstance(texts, str) else [stored(text) for text in texts])


def _swept(option: Argument, field: str) -> list[str]:
    """Return the VALUES of an option ``--space NAME=VALUES`` whose NAME means ``field``."""
    pairs = [text.partition("=") for text in (option.value if isinstance(option.value, list) else [option.value or ""])]
    return [values for name, _, values in pairs if SHORT_NAMES.get(name, name) == field]


def add_shared(parser: Parser) -> None:
    """Add the options of all sweeps: ``--jobs``, ``--dry-run`` and others, and the options of ``add_screen``."""
    text = "maximum number of parallel runs or trainings of generators (null: as many as CPU cores and GPUs allow)"
    parser.add_argument("--jobs", type=Annotated[int | None, "[1, 1e6]"], default=None, help=text)
    text = "time limit in seconds, or 30m, 2h, 1d: then all runs stop, and --resume continues the sweep (null: "
    parser.add_argument("--time-budget", type=str | None, default=None, help=f"{text}no limit)")
    text = "print what would run, with time, memory and disk estimated from a few timed steps, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: also estimate the time with this number of CPU cores (null: no such estimate)"
    parser.add_argument("--on-cores", type=Annotated[int | None, "[1, 1e6]"], default=None, help=text)
    add_screen(parser)


def add_screen(parser: Parser) -> None:
    """Add ``--quiet``, ``--log-file`` and ``--log-level``; see ``cli.display``."""
    parser.add_argument("--quiet", action="store_true", help="show warnings and errors only")
    parser.add_argument("--log-file", type=str | None, default=None, help="also write all messages to this file")
    text = "level of the log file: debug (every step and metric), info or warning"
    parser.add_argument("--log-level", type=Annotated[str, "debug | info | warning"], default="info", help=text)


def refuse_fields(options: Options, sources: Mapping[str, str]) -> None:
    """Raise a UserError if the user set a field that the sweep sets by a separate option. sources: field -> option."""
    for name, option in sources.items():
        if name in options.asked:
            value = options[name]
            raise UserError(f"{name} cannot be set here, got {value}: use the sweep's option --{option} instead.")


def parse(parser: Parser, argv: Sequence[str]) -> Options:
    """Return the values of the options. ``--help`` and ``--print_config`` print their text and end the script.

    If an option occurs twice, the last value counts. In options of ``PATHS``, a leading ``~`` means the home folder.
    """
    if words := list(takewhile(lambda word: not word.startswith("-"), argv)) if parser.usage else []:
        argv = argv[len(words) :]
    names = {*parser.options, "help", "version", *(["print_config"] if parser.fields else [])}
    full = {item.name: full_name(item.name, names, parser.chosen, parser.short) for item in read(argv)}
    items = [replace(item, name=full[item.name]) if full[item.name] in names else item for item in read(argv)]
    items = [_stored(item, item.name) for item in items]
    values = {name: [] if option.is_many else option.field.default for name, option in parser.options.items()}
    flags, short = set(), [name for name, full in parser.short.items() if full in parser.options]
    listed = ["-h", "--help", *map(typed, [*parser.options, *short])]
    if wrong := [str(_unknown_error(parser, item, names, listed)) for item in items if item.name not in names]:
        raise UserError(" ".join(dict.fromkeys(wrong)))
    for item in items:
        if item.file and item.name in ("help", "version", "print_config"):
            raise UserError(f"{item} is no key of a config file, but {item.file} has it.")
        if item.name not in parser.options:
            flags |= {item.name} if _true(item) else set()
            continue
        values[item.name] = _value(parser.options[item.name], item, values[item.name])
    for item in (item for item in items if item.name in parser.options):
        parser.options[item.name].field.check(item.name if item.name in parser.fields else str(item), values[item.name])
    if {"preset", "tracking.preset"} <= values.keys():  # --preset takes precedence over the preset in a config file
        values["tracking.preset"] = values["preset"]
    if flags:
        text = parser.format_help() if "help" in flags else parser.format_config(values)
        try:
            print(f"fedcommons {version('fedcommons')}\n" if "version" in flags else text, end="")
        except BrokenPipeError:  # ``| head`` has read enough
            sys.exit(1)
        sys.exit(0)
    asked = {item.name for item in items} & parser.fields.keys()
    result = Options(values, parser.fields, asked, parser.chosen, started(argv), words)
    changed = sorted(n for n in result.asked if n.startswith("dp.") and result[n] != parser.fields[n].default)
    used = {"dp.local", *(["dp.delta"] if {"generator.delta", "sharing.delta"} & result.fields.keys() else [])}
    used |= {"dp.noise"} if _may_draw_noise(result) else set()
    used |= {n for n in changed if n.startswith("dp.central") or (n in ("dp.noise", "dp.delta") and result.dp.central)}
    if (idle := [n for n in changed if n not in used]) and not result.dp.local:
        raise UserError(f"{idle[0]} has no effect without --dp.local true.")
    return result


def _may_draw_noise(options: Options) -> bool:
    """Return whether a component other than DP-SGD may add privacy noise, such as a generator or user code."""
    is_own = any(":" in name for names in options.chosen.values() for name in names)
    return is_own or bool({"generator.label_noise", "sharing.delta", "feddpms.sigma"} & options.fields.keys())


def _value(option: Option, item: Argument, before: Any) -> Any:
    """Return the value that ``item`` gives to an option. before: the option's previous or default value."""
    if option.is_many:
        return [*before, *(item.value if isinstance(item.value, list) else [item.text])]
    if option.is_flag or (item.value is None and bool in option.field.kinds and "." in item.name):
        return _true(item)
    is_folder = item.name == "storage" and item.text.strip() not in NULLS and ":" not in item.text.partition("/")[0]
    if (item.name in PATHS or is_folder) and not isinstance(item.value, list):
        item = replace(item, value=str(user_path(f"--{item.name}", item.text)))
    return value_of(item, option.field.hint)


def _true(item: Argument) -> bool:
    """Return whether a flag is set. A flag may have the value true or false, in a config file or after ``=``."""
    if item.value is not None and item.text.lower() not in ("true", "false"):
        raise UserError(f"{item} takes true or false, got {quote(item.text)}.")
    return item.value is None or item.text.lower() == "true"


def _unknown_error(parser: Parser, item: Argument, names: Collection[str], listed: Collection[str]) -> UserError:
    if parser.chosen and (refused := unchosen_field_error(parser.short.get(item.name, item.name), parser.chosen)):
        return refused
    if fields := sorted(name for name in names if name.startswith(f"{item.name}.")):
        return UserError(f"{item} is a section and has no value: set one of its fields, such as {fields[0]}.")
    what, called = ("config key", item.name) if item.file else ("option", str(item))
    if hint := _hint(parser, item):
        return UserError(f"unknown {what} {quote(called)}: {hint}.")
    return unknown(what, called, names if item.file else listed)


def _hint(parser: Parser, item: Argument) -> str | None:
    """Return a hint for an unknown option; None if neither other programs nor components use this name."""
    others = [name for name in parser.options if name not in parser.fields]
    # If the script has --epsilons, a user who typed --epsilon meant that option, so a hint on a field would mislead.
    if not parser.fields or any(name.startswith(item.name) for name in others):
        return None
    before = "" if item.file else "--"
    if field_name := hints.field_for(item.name, parser.options):
        is_taken = parser.options[field_name].is_hidden  # the sweep sets this field by a separate option
        leaf = field_name.rpartition(".")[2]
        options = [name for name in (f"{leaf}s", parser.short.get(leaf, "")) if is_taken and name in parser.options]
        return f"use {before}{options[0] if options else field_name}"
    if advice := hints.sentence_for(item.name):
        return advice
    owned = [] if "." in item.name else having(item.name)
    if not owned or any(name.rpartition(".")[2] == item.name for name in parser.options):
        return None
    ways = dict.fromkeys(
        f"{before}{field}" + (f" with {before}{KINDS[kind].field} {name}" if field not in parser.options else "")
        for kind, name, field in owned[:3]
    )
    return f"use {' or '.join(ways)}"


def experiment(options: Options) -> Experiment:
    """Return the experiment that the options describe."""
    return choose(flat(options))


def flat(options: Options) -> dict[str, Any]:
    """Return dotted name -> value for those options that are fields of the experiment."""
    return {name: options[name] for name in options if name in options.fields}


def run_folders(options: Options, name: str, usage: str) -> list[Path]:
    """Return the folders that the command line names, at least one. name: what the command's ``usage`` calls them."""
    if not options.words:
        raise UserError(f"name at least one folder with runs: {usage}")
    return [user_path(name, word) for word in options.words]


def early(argv: Sequence[str], name: str, default: str) -> str:
    """Return the option's text, or ``default``. A script reads this option first to choose the other defaults."""
    values = [item.text for item in read(argv) if name in (item.name, SHORT_NAMES.get(item.name))]
    return values[-1] if values else default  # as in ``parse``, the last value counts


def named(argv: Sequence[str]) -> set[str]:
    """Return the names of the options that the user set, on the command line or in config files."""
    return {item.name for item in read(argv)}


def main(function: Callable[[Sequence[str]], int], *, resumes: bool = True) -> NoReturn:
    """Run a script and exit with its code: 2 for a user error, 1 for a failing client or disk, 130 for Ctrl-C.

    An error is printed as one sentence, in the last line. function: the script, which gets the words of the command
    line and returns its exit code. resumes: whether messages may recommend ``--resume``.
    """
    signal.signal(signal.SIGTERM, _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # the stream is None if it was closed
            stream.reconfigure(errors="backslashreplace")  # the locale's encoding may lack characters of a message
    code = _run(function, resumes)
    for stream in (sys.stdout, sys.stderr):
        _drop(stream)
    sys.exit(code)


def _run(function: Callable[[Sequence[str]], int], resumes: bool = True) -> int | str | None:
    stays = f"the files that were written stay{': --resume continues the run or the sweep' if resumes else ''}."
    code = None  # until the script ends
    try:
        try:
            code = function(Line(sys.argv[1:]))
        except SystemExit as ended:  # --help and similar options raise it
            code = ended.code
        if sys.stdout is not None:
            sys.stdout.flush()  # a write error is raised now, so that it is handled below
        return code
    except UserError as error:
        return _fail(f"error: {sentence(error)}", 2)
    except ClientError as error:
        return _fail("\n".join([*getattr(error, "__notes__", []), f"error: {error.sentence}"]), 1)
    except BrokenPipeError:  # ``| head`` may read less than a whole table or help text
        return _fail(f"error: no process reads the output any more; {stays}", 1) if resumes and code is None else 1
    except (OSError, MemoryError, RuntimeError, ImportError) as error:  # for example, the disk is full
        if not isinstance(error, OSError) and not lacks_memory(error):
            raise
        return _fail(f"error: {sentence(error)}; {stays}", 1)
    except KeyboardInterrupt:
        # A second Ctrl-C ends the process at once, without a traceback.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        goes_on = "the same command with --resume goes on from the last checkpoints."
        return _fail(f"stopped; {goes_on if resumes else stays}", 130)


def _end(*_: object) -> NoReturn:
    """Exit with cleanup on SIGTERM, but force the exit after ``LAST_S`` seconds, as Ray may no longer answer."""
    last = threading.Timer(LAST_S, os._exit, (143,))
    last.daemon = True
    last.start()
    raise Ended(143)


def _fail(text: str, code: int) -> int:
    with suppress(OSError):  # stderr may be closed too
        print(text, file=sys.stderr)
    return code


def _drop(stream: TextIO | None) -> None:
    """Discard output that a stream cannot write; otherwise Python would try again at exit and print an error."""
    if stream is None:  # the parent process closed the stream
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
