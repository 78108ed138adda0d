"""The secret salt of a run, which keys its noise: drawn when the run begins, and read when the run continues.

Salts are stored outside of the run folder (see ``salts``). ``noise.json`` in the run folder contains the names (hashes)
of the run's salt and of the salts of its generators and sharing strategy, but no salt. ``partition.json`` also has the
name of the run's salt, so that a ``noise.json`` of another run is detected.
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
"""Files and folders of which the run folder has at least one as soon as the run has begun."""


def begin_salt(folder: Path, shared: Sequence[str]) -> bytes:
    """Return the secret salt of the run in ``folder``; create and store a new salt if the run has not begun.

    shared: hashes of other salts, those of the generators and the sharing strategy (``RunSpec.salts``). These salts
    key the noise of data that clients share before round 1.

    Raises:
        UserError: the run's salt or another salt is lost, or the run's salt cannot be stored.
    """
    salts.require_outside(folder)
    if any(os.path.lexists(folder / name) for name in BEGUN):  # the run has begun, and noise.json names its salt
        return read_salt(folder, shared)
    salt = salts.new()
    write_json(folder / FILE, {"salt": salts.name_of(salt), "generators": list(shared)})
    return salt


def read_salt(folder: Path, shared: Sequence[str]) -> bytes:
    """Return the salt that the run in ``folder`` began with; shared: see ``begin_salt``.

    Raises:
        UserError: the salt of the run, of a generator or of the sharing strategy is lost.
    """
    name, generators = _salt_names(folder / FILE)
    with suppress(ValueError, KeyError, TypeError):  # an interrupted run may lack this file
        if safe_read.json_of(folder / PARTITION)["noise"] != name:
            raise UserError(
                f"{folder / FILE} names the secret salt of another run; restore the file of this run or start a new "
                "run."
            )
    salt = salts.of_run(name, folder)
    if generators != list(shared):
        raise UserError(
            f"the data that {folder} shares before round 1 have secret noise, whose salts (its keys) are lost. With "
            "new salts the run would release the same data twice, at twice the privacy cost: start a new run. If "
            "FEDCOMMONS_STATE names the wrong folder, correct it; if another version of fedcommons began the run, "
            "continue with that version."
        )
    return salt


def _salt_names(path: Path) -> tuple[str, Any]:
    """Return (name of the run's salt, names of the salts before round 1) from the file ``noise.json``."""
    with suppress(ValueError, KeyError, TypeError):
        record = safe_read.json_of(path)
        name, generators = record["salt"], record["generators"]
        if re.fullmatch("[0-9a-f]{24}", name):
            return name, generators
    raise UserError(f"{path}, which names the run's secret salt, is lost or damaged; start a new run.")
