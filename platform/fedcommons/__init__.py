"""fedcommons: federated learning when clients' data differ and clients may share more than model weights.

``from fedcommons import ...`` imports the names that experiments and user-defined components need, by topic:

runs        Experiment, experiment, run, load, Result, sweep, UserError, ClientError
results     load_runs, load_rounds, load_clients, means, report
methods     Algorithm, ChoosesClients, Shares, Personal, Adapts, Facts, State, Message, Reply, Replies, Common,
            Capabilities, Release
training    Work, LocalSGD, Correction, ClientData, Clients, Executor
checks      check_algorithm, referee, Claims, Verdict, adapted, least_squares, audit_method
arithmetic  Flat, Payload, flat, flatten, scalar, add, sub, scale, zeros_like, copy, select, put, norm, sq_norm
randomness  seed_for, generator, numpy_generator, set_default_generator
data        Examples, Source, Partition
sharing     Stage, Generating, TakesLong, ClientDatasets, Contribution, Contributions, Assigned, GeneratorRecipe,
            GenerationRequest
generators  Generator, TrainedGenerator, Receipt
rounds      Rule (of stragglers), Tracker, Measure, RunData

These names are stable. The fields of an experiment, the default of each field, and the files of a run folder are stable
too. Everything else may change in any version. docs/own_parts.md, docs/notebook.ipynb and examples/ show how to use the
names.
"""

from logging import NullHandler, getLogger
from typing import Any
from warnings import warn

import lazy_loader

from fedcommons.deprecated import TellsWork as _TellsWork

# Names are imported when they are first used, because torch takes seconds to import.
_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_OLD_NAMES = {"Dealt": "ClientDatasets", "Need": "GenerationRequest", "TellsWork": "Algorithm"}
"""Old name of version 0.2 -> new name. An old name works for one more version, with a ``DeprecationWarning``."""


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        warn(f"fedcommons.{name} is now fedcommons.{_OLD_NAMES[name]}", DeprecationWarning, stacklevel=2)
    return _TellsWork if name == "TellsWork" else _attribute(_OLD_NAMES.get(name, name))


__version__ = "0.2.0"

getLogger(__name__).addHandler(NullHandler())  # the package logs nothing unless the user configures logging
