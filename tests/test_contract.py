"""Every check of the contract can fail: each of ``broken_promises`` breaks a promise, and that check says so."""

import re

import pytest
from broken_promises import BROKEN, DrawsFromNumpy, KnowsItsProcess, Sound

from fedcommons.core.local import LocalSGD
from fedcommons.testing import CHECKS, check_algorithm


def _named(error: AssertionError) -> list[str]:
    """The checks that the message of ``check_algorithm`` names."""
    return re.findall(r"^- (\w+): ", str(error), re.MULTILINE)


@pytest.mark.long
def test_a_sound_algorithm_passes() -> None:
    check_algorithm(Sound(), local=LocalSGD(epochs=2, batch_size=8))


@pytest.mark.parametrize(("check", "kind"), [(check, kind) for check, kinds in BROKEN.items() for kind in kinds])
@pytest.mark.long
def test_a_broken_promise_is_found_and_named(check: str, kind: type[Sound]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_algorithm(kind(), only=[check])
    assert _named(caught.value) == [check]
    assert str(caught.value).startswith(f"{kind.__name__} fails 1 of 1 checks\n")


def test_all_violations_come_in_one_error() -> None:
    expected = ["same_seed_same_bits_other_seed_other_bits", "neither_the_worker_nor_the_order_decides_a_bit"]
    with pytest.raises(AssertionError, match=r"^DrawsFromNumpy fails 2 of 3 checks\n") as caught:
        check_algorithm(DrawsFromNumpy(), only=["memory_is_never_sent", *expected])
    assert _named(caught.value) == expected


def test_every_check_has_been_seen_to_fail() -> None:
    assert {*BROKEN, "its_work_can_be_priced"} == CHECKS.keys()  # that one in test_priced_contract.py


@pytest.mark.ray
def test_real_actors_are_compared_too(ray_session: None) -> None:
    """Twice ten seconds, in which two actors import torch."""
    check_algorithm(Sound(), actors=2)
    with pytest.raises(AssertionError) as caught:
        check_algorithm(KnowsItsProcess(), actors=2)
    assert _named(caught.value) == ["ray_actors_give_the_bits_of_one_process"]
