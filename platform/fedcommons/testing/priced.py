"""Check the amount of work that an algorithm declares (``TellsWork``), from which ``--dry-run`` estimates seconds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedcommons.core.algorithm import Algorithm, TellsWork
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.work_units import Timed, in_seconds, pieces_of, prices, smaller_of
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.errors import UserError
from fedcommons.federation.serial_executor import Serial
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import Federation, digits


def its_work_can_be_priced(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check the work that a method declares for the time estimate of ``--dry-run``.

    The amounts of work must be numbers of at least 0. The method's variants for timing (``smaller``) must run, and
    must differ enough from each other to estimate the seconds per unit of each kind of work. If ``trains_locally`` is
    False, clients must not call ``work.local``.
    """
    federation = digits(method=algorithm).training(local)
    if not capabilities_of(algorithm).trains_locally:
        require(not _local_trainings(algorithm, federation), "trains_locally is False, but clients call work.local")
    if not isinstance(algorithm, TellsWork):
        return
    try:
        kinds, timed = _pieces(algorithm, federation), []
        for variant, n in smaller_of(algorithm, 2):
            data = federation.data
            few = Clients(data.real.store, [np.arange(n) % len(data.real.store)], commons=data.real.commons)
            small = replace(federation, data=replace(data, clients=few, real=few))
            small.run(variant, small.plan(1))
            timed.append(Timed(n if capabilities_of(algorithm).trains_locally else 0, _pieces(variant, small), 1.0))
        in_seconds(kinds, prices(type(algorithm).__name__, timed))
    except UserError as error:  # because ``check_algorithm`` treats a UserError as a fault of the machine
        raise AssertionError(str(error)) from error


def _pieces(algorithm: Algorithm, federation: Federation) -> Mapping[str, float]:
    """Return the declared units of each kind of work (``pieces``), in a round in which all clients reply."""
    return pieces_of(algorithm, federation.plan(1).facts, federation.loop, 1, range(len(federation.data.clients)))


def _local_trainings(algorithm: Algorithm, federation: Federation) -> int:
    """Count the clients' calls of ``work.local`` in two rounds."""
    calls: list[int] = []

    def build(data: RunData) -> Worker:
        worker = federation.build(algorithm)(data)
        inner = worker.work.local

        def local(*args: Any, **named: Any):
            calls.append(1)
            return inner(*args, **named)

        worker.work.local = local  # pyright: ignore[reportAttributeAccessIssue]
        return worker

    federation.run(algorithm, federation.plan(2), Serial(build, federation.data))
    return len(calls)
