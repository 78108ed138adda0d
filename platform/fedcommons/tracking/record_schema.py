"""The files of a run folder, and checks of their records.

``config.yaml``          every option of the experiment; ``--config`` runs it again
``environment.json``     Python, packages, CPU kind, commit, whether files had changed
``partition.json``, ``partition.png``  hash of the data; sizes and class counts of the clients, how much the clients'
                         labels and sizes differ (``heterogeneity``), and the clients held out from training
``rounds.jsonl``         a line per round: accuracy, loss, bytes, zeta², sigma², clients that took part, stragglers
``participants/``        a file for each round with more than 1,000 participants, unless all clients take part
``timing.jsonl``         seconds of each round, in a separate file, so that the other files have the same bits on every
                         machine
``summary.json``         results, written last, without times and paths. ``config`` has the options as set;
                         ``effective`` has the values in use where a rule decides (noise for a target epsilon, epochs,
                         null options)
``clients.jsonl``        with ``--evaluate.clients true`` or ``--measure.clients true``: a line per round with lists by
                         client, such as each client's accuracy
``audit.json``           with ``--sharing.audit true``
``noise.json``           with ``--dp.noise secret``: names of the salts, which are hashes of the secret keys
``model.safetensors``, ``best.safetensors``  server model after the last round; server model with the best validation
                         value
``wandb/``               W&B's files, unless ``--wandb off``: ``offline-run-*`` until ``wandb sync`` sends them
``tracked.json``         trackers to which ``fedcommons wandb`` or ``track`` sent the run
``checkpoints/``         the last two checkpoints, from which ``--resume`` continues
``memory/``              state of clients between rounds
``messages.log``, ``error.txt``  messages of the run; the error that stopped it
``.lock``                held by the process that writes
``.storage.json``        with ``--storage``: the state of the copy

Tables and figures are computed from the records, which another program may have written. This module rejects values of
a wrong type and numbers that are too large to be added, so that the code of tables needs no checks.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcommons.config import target
from fedcommons.config.dotted import common_fields, fields_for
from fedcommons.config.registry import KINDS
from fedcommons.errors import UserError, quote
from fedcommons.storage import safe_read

LARGEST = 1e100
"""Maximum magnitude of a number in a table. Its square, and sums of such squares, are finite floats."""

LONGEST = 4096
"""Maximum number of characters of a text in a record. The value of an option has the same maximum."""

_NEEDED = {"rounds.jsonl": "comm/total_bytes", "timing.jsonl": "train", "clients.jsonl": "n"}
"""File -> key that each line must have in addition to ``round``. The key's value is a number or a list of numbers."""

_LISTS = ("late", "partial", "participants", "rejected_clients")
HASH = "participants_hash"
"""``_LISTS``: keys of rounds.jsonl whose values are lists of clients. ``HASH``: the only key whose value is a text."""

_TEXTS = ("dataset", "algorithm", "setting", "partition")
_WHOLE = ("n_clients", "rounds", "rounds_to_target", "seed")
_NUMBERS = (
    "participation", "learning_rate", "last_accuracy", "best_accuracy", "validation_accuracy", "p",
    "disclosed", "bytes_down", "bytes_up", "bytes_once", "bytes_lost",
)  # fmt: skip
_COLUMNS = ("client", "q", "sigma", "steps")
_REJECTED = [{"client": (int,), "replies": (int,), "why": (str,)}]
_TABLES = [{
    "what": (str,), "in_words": (str,), "accountant": [(str,)], "delta": (int, float), "clip": (int, float, type(None)),
    **{name: [(int, float)] for name in _COLUMNS},
}]  # fmt: skip
_EPSILONS = ("epsilon_of_messages", "pool_epsilon_max")  # prefixes of the keys of epsilons in the privacy statement


def flaw_of_summary(summary: Mapping[str, Any]) -> str | None:
    """Describe the first wrong value of a summary, as a part of a sentence; None if all types and numbers are valid."""
    config = summary.get("config")
    is_own = isinstance(config, Mapping) and ":" in str(config.get("partition.name"))
    for name, value in summary.items():
        if name != "config" and too_large(value):  # constants of user-defined components may have any value
            return f"{quote(name)} has a number above {LARGEST:g}"
        if isinstance(value, str) and len(value) > LONGEST:
            return f"{quote(name)} has {len(value):,} characters"
        kinds = (str,) if name in _TEXTS else (int,) if name in _WHOLE else (int, float) if name in _NUMBERS else None
        if name == "alpha" and not is_own:  # for a user-defined partition, alpha may have any type
            kinds = (int, float)
        if kinds and value is not None and type(value) not in kinds:
            return f"{name} is {quote(value)}"
        if name == "target" and not _is_target(value):
            return f"{name} is {quote(value)}"
    if not _fits(rejected := summary.get("rejected", []), _REJECTED):
        return f"rejected is {quote(rejected)}"
    return _flaw_of_privacy(summary.get("privacy", {}))


def _flaw_of_privacy(statement: Any) -> str | None:
    if not isinstance(statement, dict):
        return f"privacy is {quote(statement)}"
    for name, value in statement.items():
        if name.startswith(_EPSILONS) and "_of_each_" not in name and type(value) not in (int, float, type(None)):
            return f"privacy.{name} is {quote(value)}"
    if not isinstance(statement.get("commons", ""), str):
        return f"privacy.commons is {quote(statement['commons'])}"
    tables = statement.get("mechanisms", {})
    is_right = isinstance(tables, dict) and all(map(_are_tables, tables.values()))
    return None if is_right else f"privacy.mechanisms is {quote(tables)}"


def _are_tables(tables: Any) -> bool:
    return _fits(tables, _TABLES) and all(table[name] for table in tables for name in _COLUMNS)


def _fits(value: Any, form: Any) -> bool:
    """Return whether a plain value has a form: a dictionary with a form per name, a list of one form, or types."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), inner) for name, inner in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    return type(value) in form


def flaw_of_config(config: Any) -> str | None:
    """Describe the first wrong value of ``config`` (field -> value), as a part of a sentence; None if all are valid."""
    if not isinstance(config, Mapping):
        return f"config is {quote(config)}"
    chosen = {kind: config.get(k.field) for kind, k in KINDS.items()}
    names = {kind: [n] for kind, n in chosen.items() if isinstance(n, str) and n in KINDS[kind].components}
    fields = {**common_fields(), **fields_for(names, reread=False)}
    for name, value in config.items():
        many = value if isinstance(value, list | tuple) else [value]
        if any(type(item) not in (int, float, str, bool, type(None)) for item in many):
            return f"{quote(name)} is {quote(value)}"
        kinds = fields[name].kinds if name in fields else (Any,)
        if Any not in kinds and (tuple if isinstance(value, list) else type(value)) not in kinds:
            return f"{name} is {quote(value)}"
        if name == "target" and not _is_target(value):
            return f"{name} is {quote(value)}"
        if any(isinstance(item, str) and len(item) > LONGEST for item in many):
            return f"{quote(name)} is longer than {LONGEST} characters"
    return None


def _is_target(value: Any) -> bool:
    try:
        return type(value) in (int, float, str) and bool(target.read(value))
    except UserError:
        return False


def flaw_of_line(line: Mapping[str, Any], is_of_clients: bool) -> str | None:
    """Describe the first wrong value of a line, as a part of a sentence; None if all values are valid.

    is_of_clients: whether the line is from clients.jsonl, where all values except ``round`` are lists.
    """
    for name, value in line.items():
        if name == HASH and not (isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)):
            return f"{quote(name)} of round {line['round']} is {quote(value)}"
        if too_large(value):
            return f"{quote(name)} of round {line['round']} is above {LARGEST:g}"
        may_be_list = is_of_clients and name != "round"
        if isinstance(value, list) != may_be_list and (may_be_list or name not in _LISTS):
            return f"{quote(name)} of round {line['round']} is {quote(value)}"
    lengths = {len(value) for value in line.values() if isinstance(value, list)} if is_of_clients else ()
    return f"round {line['round']} has lists of several lengths" if len(lengths) > 1 else None


def too_large(value: Any) -> bool:
    """Return whether a plain value contains a number whose magnitude exceeds ``LARGEST``, at any depth."""
    if isinstance(value, Mapping):
        return any(map(too_large, value.values()))
    if isinstance(value, list | tuple):
        return any(map(too_large, value))
    return isinstance(value, int | float) and not -LARGEST <= value <= LARGEST


def written(value: Any) -> Any:
    """Return the value that is written for a metric: None for NaN, infinity and numbers beyond ``LARGEST``."""
    return value if not isinstance(value, float) or -LARGEST <= value <= LARGEST else None


def lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read a file with one line per round: return its undamaged lines, and whether these are all lines of the file.

    The returned lines are rounds 0, 1, ... before the first line that is damaged or out of order.

    Raises:
        UserError: the path is not a regular file, or the file is too large.
    """
    records: list[dict[str, Any]] = []
    try:
        with safe_read.open_file(path, safe_read.LARGEST_LINES) as file:
            while file and (part := file.readline(safe_read.LONGEST_LINE)):
                # The last line of a killed run may be incomplete, so without a line break.
                line = _line(part, _NEEDED[path.name]) if part.endswith(b"\n") else None
                if line is None or line["round"] != len(records):
                    return records, False
                records.append(line)
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    return records, True


def _line(part: bytes, needed: str) -> dict[str, Any] | None:
    try:
        line = json.loads(part.decode())
    except (ValueError, RecursionError):  # the line is not UTF-8, not JSON, or too deeply nested
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int or line.get(needed) is None:
        return None
    values = [
        v for name, value in line.items() if name != HASH for v in (value if isinstance(value, list) else (value,))
    ]
    return line if all(value is None or _is_finite(value) for value in values) else None


def _is_finite(value: object) -> bool:
    most = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def last_of(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return the metric ``name`` of the last round that has it (``evaluate.every`` may skip rounds), or None."""
    return next((line[name] for line in reversed(lines) if name in line), None)
