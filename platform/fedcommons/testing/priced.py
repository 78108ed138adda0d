"""Check what an algorithm declares about its work, from which ``--dry-run`` estimates seconds."""

from fedcommons.core.algorithm import Algorithm, repeats_of
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.errors import UserError
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import digits
from fedcommons.testing.spy import before_each_training


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
        federation, trainings = digits(method=algorithm).training(local), list[None]()
        executor = federation.serial(algorithm)
        before_each_training(executor.worker.work, lambda: trainings.append(None))
        federation.run(algorithm, federation.plan(2), executor)
        require(not trainings, "trains_locally is False, but clients call work.local")
