"""fedcommons: federated learning when clients' data differ and clients may put something into a commons.

``from fedcommons import ...`` gives all that experiments and parts of one's own need:

runs        Experiment, experiment, run, load, Result, sweep, load_runs, load_rounds, load_clients, means, report,
            UserError, ClientError
methods     Algorithm, ChoosesClients, Shares, Personal, TellsWork, Facts, State, Message, Reply, Replies, Common,
            Release, Work, LocalSGD, Correction, ClientData, Clients, Executor; check_algorithm, referee with Claims,
            Verdict, adapted, least_squares and audit_method test them
arithmetic  Flat, Payload, flat, flatten, scalar, add, sub, scale, zeros_like, copy, select, put, norm, sq_norm
draws       seed_for, generator, numpy_generator, set_default_generator
data        Examples, Source, Partition
sharing     Stage, Generating, TakesLong, Dealt, Contribution, Contributions, Assigned, GeneratorRecipe, Need
generators  Generator, TrainedGenerator, Receipt
late ones   Rule
watching    Tracker, Measure, RunData

These names are stable, and so are the fields of an experiment with their defaults, and the files of a run folder.
Everything else may change in any version. docs/own_parts.md, docs/notebook.ipynb and examples/ show how they are used.
"""

from importlib import import_module
from logging import NullHandler, getLogger
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcommons.audits.canaries import audit_method
    from fedcommons.config.experiment import Experiment
    from fedcommons.config.presets import experiment
    from fedcommons.core.algorithm import (
        Algorithm,
        ChoosesClients,
        Common,
        Facts,
        Message,
        Personal,
        Replies,
        Reply,
        Shares,
        State,
        TellsWork,
    )
    from fedcommons.core.client_worker import Work
    from fedcommons.core.executor import Executor
    from fedcommons.core.local_training import Correction, LocalSGD
    from fedcommons.core.worker import RunData
    from fedcommons.data.clients import ClientData, Clients
    from fedcommons.data.examples import Examples, Source
    from fedcommons.data.federated import Dealt
    from fedcommons.data.partition import Partition
    from fedcommons.errors import ClientError, UserError
    from fedcommons.federation.stragglers import Rule
    from fedcommons.flat_tensors import (
        Flat,
        Payload,
        add,
        copy,
        flat,
        flatten,
        norm,
        put,
        scalar,
        scale,
        select,
        sq_norm,
        sub,
        zeros_like,
    )
    from fedcommons.generators.generator import Generator, Receipt, TrainedGenerator
    from fedcommons.generators.requests import Contribution, GeneratorRecipe, Need
    from fedcommons.privacy.release import Release
    from fedcommons.reports.cells import means
    from fedcommons.reports.frames import load_clients, load_rounds, load_runs
    from fedcommons.reports.page import report
    from fedcommons.runs.user_metric import Measure
    from fedcommons.seeding import generator, numpy_generator, seed_for, set_default_generator
    from fedcommons.sharing.stage import Assigned, Contributions, Generating, Stage, TakesLong
    from fedcommons.testing.adapters import adapted
    from fedcommons.testing.contract import check_algorithm
    from fedcommons.testing.federations import least_squares
    from fedcommons.testing.referee import Claims, Verdict, referee
    from fedcommons.tracking.tracker import Tracker
    from fedcommons.tune.api import Result, load, run, sweep

__version__ = "0.2.0"

getLogger(__name__).addHandler(NullHandler())  # silent unless somebody listens

_HOMES = {
    "audits.canaries": "audit_method",
    "config.experiment": "Experiment",
    "config.presets": "experiment",
    "core.algorithm": "Algorithm ChoosesClients Common Facts Message Personal Replies Reply Shares State TellsWork",
    "core.executor": "Executor",
    "core.local_training": "Correction LocalSGD",
    "privacy.release": "Release",
    "core.client_worker": "Work",
    "core.worker": "RunData",
    "data.clients": "ClientData Clients",
    "data.examples": "Examples Source",
    "data.partition": "Partition",
    "errors": "ClientError UserError",
    "federation.stragglers": "Rule",
    "generators.generator": "Generator Receipt TrainedGenerator",
    "reports.cells": "means",
    "reports.frames": "load_clients load_rounds load_runs",
    "reports.page": "report",
    "runs.user_metric": "Measure",
    "seeding": "generator numpy_generator seed_for set_default_generator",
    "data.federated": "Dealt",
    "generators.requests": "Contribution GeneratorRecipe Need",
    "sharing.stage": "Assigned Contributions Generating Stage TakesLong",
    "flat_tensors": "Flat Payload add copy flat flatten norm put scalar scale select sq_norm sub zeros_like",
    "testing.adapters": "adapted",
    "testing.contract": "check_algorithm",
    "testing.federations": "least_squares",
    "testing.referee": "Claims Verdict referee",
    "tracking.tracker": "Tracker",
    "tune.api": "Result load run sweep",
}
"""Which names stand in which module. A module is imported when a name is asked for, as torch alone takes seconds."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Algorithm", "Assigned", "ChoosesClients", "Claims", "ClientData", "ClientError", "Clients", "Common",
    "Contribution", "Contributions", "Correction", "Dealt", "Examples", "Executor", "Experiment", "Facts", "Flat",
    "Generating", "Generator", "GeneratorRecipe", "LocalSGD", "Measure", "Message", "Need", "Partition", "Payload",
    "Personal", "Receipt", "Release", "Replies", "Reply", "Result", "Rule", "RunData", "Shares", "Source", "Stage",
    "State", "TakesLong", "TellsWork", "Tracker", "TrainedGenerator", "UserError", "Verdict", "Work", "adapted", "add",
    "audit_method", "check_algorithm", "copy", "experiment", "flat", "flatten", "generator", "least_squares",
    "load", "load_clients", "load_rounds", "load_runs", "means", "norm", "numpy_generator", "put", "referee",
    "report", "run", "scalar", "scale", "seed_for", "select", "set_default_generator", "sq_norm", "sub", "sweep",
    "zeros_like",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
