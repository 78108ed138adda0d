"""Cache files for results that a sweep computes in addition to its runs, stored with the inputs of the computation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError, quote
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_json


def write(file: Path, facts: Mapping[str, Any], what: str, result: Mapping[str, Any]) -> None:
    """Write a result (JSON values) to ``file``, with the inputs ``facts`` that it was computed from.

    what: the key of the result in the file.
    """
    write_json(file, {"facts": facts, what: result})


def read(file: Path, facts: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """Return the result in ``file``; None if there is no file.

    Raises:
        UserError: the result was computed from other inputs than ``facts``, or the file is damaged.
    """
    try:
        content = safe_read.json_of(file)
        if content is None:
            return None
    except ValueError as error:
        raise UserError(f"--resume: {error}; remove it or name another --out.") from None
    other, result = (content.get(name) if isinstance(content, dict) else None for name in ("facts", what))
    if not isinstance(other, dict) or not isinstance(result, dict):
        raise UserError(f"--resume: {file} is damaged: it has no facts or no {what}; remove it or name another --out.")
    plain = json.loads(json.dumps(facts))  # tuples become lists, as in the file
    for name in (*plain, *other):
        if (name in other, other.get(name)) != (name in plain, plain.get(name)):
            was, now = (quote(source[name]) if name in source else "its default" for source in (other, plain))
            raise UserError(f"--resume: {file} has {name} = {was}, and now it is {now}; name another --out.")
    return result
