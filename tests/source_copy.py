"""A copy of the source files that hosts compare, for tests that change one of them."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHANGED = "platform/fedcommons/seeds.py"


def copied(to: Path) -> Path:
    """Copy what is hashed to a new clone without git."""
    for name in ("platform", "lightning_modules", "sweeps"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to
