"""The runs of a sweep, by its script."""

from collections.abc import Sequence
from itertools import chain
from types import ModuleType

from fedcommons.sweeping.sweep import Trial, cell
from papers.fedssyn import sizes


def cells_of(module: ModuleType, argv: Sequence[str]) -> list[Trial]:
    """Return the runs of a sweep; of a script without runs, its experiments."""
    name, options = module.__name__, module.arguments(argv)
    if name == "tune":
        return module.cells(options)[0]
    if name in ("feddm", "private_fedssyn", "dsprites", "table2", "sensitivity", "fedcvae", "replicate"):
        return [entry.cell for entry in module.entries(options)]
    if name == "feddpms":
        return [*chain.from_iterable(module.grid(options).values())]
    if name == "convergence_parameters":
        return [*chain(*module.figure_a7(options).values(), *module.figure_a8(options).values())]
    if name == "advise":
        return [*chain.from_iterable(module.cells(options).values())]
    if name == "private_sizes":
        return [cell(config, {}) for config in sizes.configs(options, 129, 0).values()]
    return [cell(options.config, {})] if name in ("audit_pool", "quality") else module.grid(options)
