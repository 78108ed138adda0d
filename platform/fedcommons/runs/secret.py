"""The salt of a run whose noise is secret: drawn as it begins, found again when it goes on; see ``salts``.

``noise.json`` in the run folder holds the names (hashes) of the run's salt and of its generators', never a salt.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from fedcommons.core import salts
from fedcommons.errors import UserError
from fedcommons.files import write_json
from fedcommons.sharing.needs import Need, salts_told

FILE = "noise.json"


def begun(folder: Path, needs: Sequence[Need], has_begun: bool) -> bytes:
    """The salt of the run in ``folder``, a new one if it has not begun; needs: its generators.

    Raises:
        UserError: a salt is lost, or cannot be kept.
    """
    if (folder / FILE).exists() or has_begun:
        return kept(folder, needs)
    salt = salts.new()
    write_json(folder / FILE, {"salt": salts.name_of(salt), "generators": salts_told(needs)})
    return salt


def kept(folder: Path, needs: Sequence[Need]) -> bytes:
    """The salt that the run in ``folder`` began with; needs: its generators.

    Raises:
        UserError: it is lost, or that of a generator is.
    """
    try:
        told = json.loads((folder / FILE).read_bytes())
        name, generators = str(told["salt"]), list(told["generators"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{folder / FILE}, which names its secret salt, is lost or damaged; start anew.") from None
    salt = salts.of_run(name, folder)
    if generators != salts_told(needs):
        raise UserError(
            f"the noise of the generators of {folder} is secret, and their salts are lost: with new ones they would "
            "release twice, so start anew (or FEDCOMMONS_STATE names the wrong folder)."
        )
    return salt
