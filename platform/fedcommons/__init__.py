"""fedcommons: federated learning when clients' data differ and clients may put something into a commons.

From Python: ``experiment`` describes a run, ``run`` and ``sweep`` run one or many, ``load_runs`` and ``load_rounds``
read what runs have left into frames, ``check_algorithm`` proves a method of your own. docs/notebook.ipynb shows all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcommons.config.experiment import Experiment
    from fedcommons.config.presets import experiment
    from fedcommons.reports.cells import means
    from fedcommons.reports.frames import load_clients, load_rounds, load_runs
    from fedcommons.sweeping.many import sweep
    from fedcommons.sweeping.one import Result, run
    from fedcommons.testing.contract import check_algorithm

__version__ = "0.1.0"

_HOMES = {
    "Experiment": "config.experiment", "experiment": "config.presets", "means": "reports.cells",
    "load_clients": "reports.frames", "load_rounds": "reports.frames", "load_runs": "reports.frames",
    "Result": "sweeping.one", "run": "sweeping.one", "sweep": "sweeping.many", "check_algorithm": "testing.contract",
}  # fmt: skip
"""Where each name stands. It is imported when it is asked for, as torch alone takes seconds."""

__all__ = [
    "Experiment", "Result", "check_algorithm", "experiment", "load_clients", "load_rounds", "load_runs", "means", "run",
    "sweep",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
