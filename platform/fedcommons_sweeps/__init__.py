"""The scripts in ``sweeps``, under the name that they have in the wheel; an editable installation has only a copy."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "sweeps")]
