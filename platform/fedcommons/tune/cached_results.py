"""Results of a sweep that are no runs, each in a file of its own with the facts that it was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError, shown
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_json


def write(file: Path, facts: Mapping[str, Any], what: str, result: Mapping[str, Any]) -> None:
    """Keep a result, plain values, under the name ``what``."""
    write_json(file, {"facts": facts, what: result})


def read(file: Path, facts: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """The result in ``file``, None if there is none. A fact that is left out has its default.

    Raises:
        UserError: it was made from other facts, or the file is damaged.
    """
    try:
        found = safe_read.json_of(file)
        if found is None:
            return None
    except ValueError as error:
        raise UserError(f"--resume: {error}; remove it or name another --out.") from None
    other, result = (found.get(name) if isinstance(found, dict) else None for name in ("facts", what))
    if not isinstance(other, dict) or not isinstance(result, dict):
        raise UserError(f"--resume: {file} is damaged: it has no facts or no {what}; remove it or name another --out.")
    plain = json.loads(json.dumps(facts))  # tuples as lists, as they stand in the file
    for name in (*plain, *other):
        if (name in other, other.get(name)) != (name in plain, plain.get(name)):
            was, now = (shown(of[name]) if name in of else "its default" for of in (other, plain))
            raise UserError(f"--resume: {file} is of {name} = {was}, and now it is {now}; name another --out.")
    return result
