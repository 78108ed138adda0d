"""The salt of a run whose noise is secret: drawn as it begins, found again when it goes on; see ``salts``.

``noise.json`` in the run folder holds the names (hashes) of the run's salt and of those of its generators or sharing
stage, never a salt.
``partition.json`` has the first of them too, so that another run's ``noise.json`` is not taken for its own.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError
from fedcommons.privacy import salts
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_json

FILE, PARTITION = "noise.json", "partition.json"

BEGUN = (FILE, PARTITION, "checkpoints", "rounds.jsonl", "summary.json", "model.safetensors")
"""What a run's folder has only once the run has begun."""


def begun(folder: Path, shared: Sequence[str]) -> bytes:
    """The salt of the run in ``folder``, a new one if it has not begun; shared: what tells the salts before round 1.

    Raises:
        UserError: a salt is lost, or cannot be kept.
    """
    salts.require_outside(folder)
    if any(os.path.lexists(folder / name) for name in BEGUN):  # noise.json is written first
        return kept(folder, shared)
    salt = salts.new()
    write_json(folder / FILE, {"salt": salts.name_of(salt), "generators": list(shared)})
    return salt


def kept(folder: Path, shared: Sequence[str]) -> bytes:
    """The salt that the run in ``folder`` began with; shared: see ``begun``.

    Raises:
        UserError: it is lost, or that of a generator or sharing stage is.
    """
    name, generators = _told(folder / FILE)
    with suppress(ValueError, KeyError, TypeError):  # a run broken off before has none
        if safe_read.json_of(folder / PARTITION)["noise"] != name:
            raise UserError(f"{folder / FILE} names the secret salt of another run; bring its own back or start anew.")
    salt = salts.of_run(name, folder)
    if generators != list(shared):
        raise UserError(
            f"the noise of what {folder} shares before round 1 is secret, and its salts are lost: with new ones it "
            "would release twice, so start anew (or FEDCOMMONS_STATE names the wrong folder, or another version of "
            "fedcommons began the run, whose sums or noise were others)."
        )
    return salt


def _told(path: Path) -> tuple[str, Any]:
    """The names of the salts of a run and of its generators."""
    with suppress(ValueError, KeyError, TypeError):
        told = safe_read.json_of(path)
        name, generators = told["salt"], told["generators"]
        if re.fullmatch("[0-9a-f]{24}", name):
            return name, generators
    raise UserError(f"{path}, which names its secret salt, is lost or damaged; start anew.")
