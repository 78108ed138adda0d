"""Check what an algorithm declares about its work, from which ``--dry-run`` estimates seconds."""

from collections import Counter
from typing import Any

from fedcommons.core.algorithm import Algorithm, repeats_of
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker
from fedcommons.errors import UserError
from fedcommons.federation.serial_executor import Serial
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import Federation, digits


def its_work_can_be_priced(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check the work that a method declares for the time estimate of ``--dry-run``.

    ``repeats`` must name constants that are whole numbers or None. If ``trains_locally`` is False, clients must not
    call ``work.local``.
    """
    try:
        repeats_of(algorithm)
    except UserError as error:  # because ``check_algorithm`` treats a UserError as a fault of the machine
        raise AssertionError(str(error)) from error
    if not capabilities_of(algorithm).trains_locally:
        federation = digits(method=algorithm).training(local)
        require(not _local_trainings(algorithm, federation), "trains_locally is False, but clients call work.local")


def _local_trainings(algorithm: Algorithm, federation: Federation) -> int:
    """Count the clients' calls of ``work.local`` in two rounds."""
    calls = Counter[str]()

    def build(data: RunData) -> Worker:
        worker = federation.build(algorithm)(data)
        inner = worker.work.local

        def local(*args: Any, **named: Any):
            calls["local"] += 1
            return inner(*args, **named)

        worker.work.local = local  # pyright: ignore[reportAttributeAccessIssue]
        return worker

    federation.run(algorithm, federation.plan(2), Serial(build, federation.data))
    return calls.total()
