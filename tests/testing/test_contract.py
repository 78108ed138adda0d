"""``fedcommons.testing``: every check of the contract can fail, and ``check_algorithm`` names those that do."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from broken_promises import (
    BROKEN,
    DRAWS_FROM_NUMPY,
    KnowsItsProcess,
    Repeats,
    RunsJobs,
    SharesNothing,
    SharesSums,
    Sound,
    TopK,
)

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbuff import FedBuff
from fedcommons.core.local_training import LocalSGD
from fedcommons.errors import UserError
from fedcommons.testing import CHECKS, check_algorithm

FEDAVG, SHORT = FedAvg(), LocalSGD(epochs=1, batch_size=8)
CASES = [pytest.param(check, case, id=f"{check}-{i}") for check, all in BROKEN.items() for i, case in enumerate(all)]


def failed(error: AssertionError) -> list[str]:
    """The checks that the message of ``check_algorithm`` names."""
    return re.findall(r"^- (\w+): ", str(error), re.MULTILINE)


@pytest.mark.parametrize("algorithm", [Sound(), SharesSums(), SharesNothing(), TopK()])
@pytest.mark.long
def test_a_sound_algorithm_passes(algorithm: Any) -> None:
    check_algorithm(algorithm, local=LocalSGD(epochs=2, batch_size=8))
    check_algorithm(Repeats(), only=["its_work_can_be_priced"])
    check_algorithm(FedBuff(), only=["the_loss_falls"])  # one client per round


@pytest.mark.parametrize(("check", "algorithm"), CASES)
@pytest.mark.long
def test_a_broken_promise_is_detected_and_named(check: str, algorithm: Any) -> None:
    with pytest.raises(AssertionError, match=rf"^{type(algorithm).__name__} fails 1 of 1 checks\n") as caught:
        check_algorithm(algorithm, local=SHORT, only=[check])
    assert failed(caught.value) == [check]


def test_all_violations_come_in_one_error() -> None:
    expected = ["same_seed_same_bits_other_seed_other_bits", "neither_the_worker_nor_the_order_decides_a_bit"]
    with pytest.raises(AssertionError, match=r"^Broken fails 2 of 3 checks\n") as caught:
        check_algorithm(DRAWS_FROM_NUMPY, local=SHORT, only=["memory_is_never_sent", *expected])
    assert failed(caught.value) == expected
    assert BROKEN.keys() == CHECKS.keys()  # every check has been seen to fail


@pytest.mark.ray
def test_real_actors_are_compared_too(ray_session: None) -> None:
    check = "ray_actors_give_the_bits_of_one_process"
    check_algorithm(RunsJobs(), actors=1, only=["memory_is_never_sent"])
    with pytest.raises(AssertionError) as caught:
        check_algorithm(KnowsItsProcess(), actors=1, only=["memory_is_never_sent"])
    assert failed(caught.value) == [check]


def test_an_algorithm_need_not_be_a_dataclass_and_its_error_is_reported_with_its_cause() -> None:
    def merge(*args: object) -> None:
        raise ZeroDivisionError("of no avail")

    plain: Any = SimpleNamespace(
        **{name: getattr(FEDAVG, name) for name in ("start", "down", "client", "merge")}, share=None
    )
    names = ["two_rounds_keep_names_shapes_and_types", "late_clients_by_any_rule_break_no_promise"]
    check_algorithm(plain, local=SHORT, only=[*names, "its_work_can_be_priced"])
    plain.merge = merge
    with pytest.raises(AssertionError, match=r"- the_loss_falls: .*round 1: ZeroDivisionError: of no avail") as caught:
        check_algorithm(plain, only=["the_loss_falls"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(UserError, match=r"FedAvg\(\), got the class FedAvg"):
        check_algorithm(FedAvg)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="constant share"):
        check_algorithm(SimpleNamespace(**vars(plain) | {"share": 0.5}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="did you mean 'the_loss_falls'"):
        check_algorithm(plain, only="the_loss_fals")
