"""The salt of a run whose noise is secret: drawn as it begins, found again when it goes on; see ``salts``.

``noise.json`` in the run folder holds the names (hashes) of the run's salt and of its generators', never a salt.
``partition.json`` has the first of them too, so that another run's ``noise.json`` is not taken for its own.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcommons.core import salts
from fedcommons.errors import UserError
from fedcommons.files import stored, write_json
from fedcommons.sharing.needs import Need, salts_told

FILE, PARTITION = "noise.json", "partition.json"


def begun(folder: Path, needs: Sequence[Need]) -> bytes:
    """The salt of the run in ``folder``, a new one if it has not begun; needs: its generators.

    Raises:
        UserError: a salt is lost, or cannot be kept.
    """
    salts.require_outside(folder)
    if any(os.path.lexists(folder / name) for name in (FILE, PARTITION, "checkpoints")):  # it is written first
        return kept(folder, needs)
    salt = salts.new()
    write_json(folder / FILE, {"salt": salts.name_of(salt), "generators": salts_told(needs)})
    return salt


def kept(folder: Path, needs: Sequence[Need]) -> bytes:
    """The salt that the run in ``folder`` began with; needs: its generators.

    Raises:
        UserError: it is lost, or that of a generator is.
    """
    name, generators = _told(folder / FILE)
    with suppress(ValueError, KeyError, TypeError):  # a run broken off before has none
        if stored.json_of(folder / PARTITION)["noise"] != name:
            raise UserError(f"{folder / FILE} names the secret salt of another run; bring its own back or start anew.")
    salt = salts.of_run(name, folder)
    if generators != salts_told(needs):
        raise UserError(
            f"the noise of the generators of {folder} is secret, and their salts are lost: with new ones they would "
            "release twice, so start anew (or FEDCOMMONS_STATE names the wrong folder)."
        )
    return salt


def _told(path: Path) -> tuple[str, Any]:
    """The names of the salts of a run and of its generators."""
    with suppress(ValueError, KeyError, TypeError):
        told = stored.json_of(path)
        name, generators = told["salt"], told["generators"]
        if re.fullmatch("[0-9a-f]{24}", name):
            return name, generators
    raise UserError(f"{path}, which names its secret salt, is lost or damaged; start anew.")
