"""The command line: every field of the experiment as a dotted option or in a YAML file, and errors in one sentence."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from fedcommons import locks
from fedcommons.config import Experiment, field_names, override
from fedcommons.errors import ClientError, UserError, sentence, unknown
from fedcommons.tracking.run_folder import is_run

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parser(description: str, defaults: Mapping[str, Any]) -> ArgumentParser:
    """A parser with ``--config``, ``--print_config`` and every field of the experiment, preset to ``defaults``."""
    result = ArgumentParser(description=description, exit_on_error=False)
    result.add_argument("--config", action="config", help="YAML file with any of the options below")
    result.add_class_arguments(Experiment)
    result.set_defaults(dict(defaults))
    return result


def parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """The parsed options; ``asked``: the fields that were named, whatever their values.

    Raises:
        UserError: an option or key that does not exist (the nearest is named), or a value of the wrong type.
    """
    known = set(parser.get_defaults().keys()) | {"help", "print_config"}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for token in argv:
        name = token[2:].partition("=")[0]
        if token.startswith("--") and name.replace("-", "_") not in known | sections:
            raise unknown("option", f"--{name}", [f"--{k if '.' in k else k.replace('_', '-')}" for k in known])
    for path in _config_files(argv):
        for key in _keys(path):
            if key not in known:
                raise unknown("config key", key, known)
    try:
        options = parser.parse_args(list(argv))
        options.asked = asked_for(argv)
        if options.get("out") == "":  # which would be the folder one happens to be in
            raise UserError("--out is empty; name a folder.")
        return options
    except ArgumentError as error:
        raise UserError(_one_sentence(str(error))) from error


def experiment(options: Namespace) -> Experiment:
    """The experiment that the options describe."""
    flat = {name: value for name, value in options.items(branches=False)}
    names = Experiment.__dataclass_fields__
    fields = {n: tuple(v) if isinstance(v, list) else v for n, v in flat.items() if n.partition(".")[0] in names}
    return override(Experiment(), fields)


def early(argv: Sequence[str], name: str, default: str) -> str:
    """The value of an option that decides the defaults of others, before the parser can be made.

    Looked for on the command line, then in the config files: ``data.name`` as the key of a section too.
    """
    for i, token in reversed(list(enumerate(argv))):  # the last one counts, as for the parser
        if token == f"--{name}" and i + 1 < len(argv):
            return argv[i + 1]
        if token.startswith(f"--{name}="):
            return token.partition("=")[2]
    section, _, leaf = name.rpartition(".")
    for path in reversed(_config_files(argv)):
        content = _read_yaml(path)
        place = content.get(section, {}) if section else content
        if isinstance(place, dict) and leaf in place:
            return str(place[leaf])
    return default


def named(argv: Sequence[str]) -> set[str]:
    """The options on the command line."""
    return {token.removeprefix("--").partition("=")[0] for token in argv if token.startswith("--")}


def asked_for(argv: Sequence[str]) -> frozenset[str]:
    """The fields that are named on the command line or in a config file."""
    in_files = {key for path in _config_files(argv) for key in _keys(path)}
    return frozenset((named(argv) | in_files) & set(field_names()))


def split(option: str, text: str, kind: Callable[[str], Any] = str) -> tuple:
    """The values of a comma list.

    Raises:
        UserError: a value is not of this kind, stands twice, or there is none.
    """
    values = []
    for part in str(text).split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError:
            raise UserError(f"{option} takes {kind.__name__} values separated by commas, got {part!r}.") from None
    if not values or "" in values or len(set(values)) < len(values):
        raise UserError(f"{option} takes different values separated by commas, got {text!r}.")
    return tuple(values)


@contextmanager
def open_folder(out: Path) -> Iterator[None]:
    """Make the folder that ``--out`` names and hold it: nobody else may write there meanwhile.

    Raises:
        UserError: it cannot be written, somebody holds it, or it has what no sweep wrote.
    """
    with locks.opened(out, _stranger, "folder of a sweep"):
        yield


def holds_runs(out: Path) -> bool:
    """Whether ``out`` is the folder of a sweep with runs in it."""
    return any(is_run(path.parent) for path in out.glob("*/config.yaml"))


def _stranger(out: Path) -> str | None:
    """What shows that ``out`` is neither new nor a sweep's, whose mark is a lock file of ours, or runs."""
    if is_run(out):
        return "config.yaml, of a run"
    names = locks.strangers(out)
    return names[0] if names and not locks.holder(out) and not holds_runs(out) else None


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


def _config_files(argv: Sequence[str]) -> list[Path]:
    after = [argv[i + 1] for i, token in enumerate(argv[:-1]) if token == "--config"]
    return [Path(p) for p in after + [t.partition("=")[2] for t in argv if t.startswith("--config=")]]


def _read_yaml(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--config: {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config: {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"--config: {path} must hold keys and values.")
    return content


def _keys(path: Path) -> list[str]:
    return [
        f"{name}.{leaf}" if isinstance(section, dict) else str(name)
        for name, section in _read_yaml(path).items()
        for leaf in (section if isinstance(section, dict) else [""])
    ]


def _one_sentence(message: str) -> str:
    """What jsonargparse says of a value of the wrong type, for one type or for several."""
    for form in (
        r'key "(?P<key>[^"]+)":.*?Subtypes: \[(?P<type>.+?)\] .*Given value: (?P<value>.*)',
        r'key "(?P<key>[^"]+)":.*?Expected a (?P<type>.+?)\. Got value: (?P<value>.*)',
    ):
        if found := re.search(form, " ".join(message.split())):
            kind = re.sub(r"<class '(\w+)'>", r"\1", found["type"]).replace("typing.", "").replace("NoneType", "null")
            return f"{found['key']} takes {kind.replace(', null', ' or null')}, got {found['value']!r}."
    return " ".join(message.split())
