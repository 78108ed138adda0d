"""What ``check_algorithm`` finds in what a method tells of its work."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.testing import check_algorithm


@dataclass(frozen=True)
class _ServerTrains(FedAvg):
    """Tells of so many steps of its server."""

    steps: int = 10

    def pieces(self, *given: Any) -> Mapping[str, float]:
        return {"steps": self.steps}

    def smaller(self, times: int) -> Any:
        return [(replace(self, steps=1), 4), (replace(self, steps=1 + times), 4)]


class _TellsLessThanNothing(_ServerTrains):
    def pieces(self, *given: Any) -> Mapping[str, float]:
        return {"steps": -self.steps}


class _VariantsAreAlike(_ServerTrains):
    def smaller(self, times: int) -> Any:
        return [(replace(self, steps=1), 4)] * 2


class _VariantsLackAPiece(_ServerTrains):
    def pieces(self, *given: Any) -> Mapping[str, float]:
        return {"steps": self.steps, **({"epochs": 1} if self.steps == 10 else {})}


class _VariantsAreOfAnotherMethod(_ServerTrains):
    def smaller(self, times: int) -> Any:
        return [(FedAvg(), 4)]


class _DeniesItsLocalSteps(FedAvg):
    trains_locally = False


KINDS = (
    _TellsLessThanNothing, _VariantsAreAlike, _VariantsLackAPiece, _VariantsAreOfAnotherMethod, _DeniesItsLocalSteps,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_work_that_cannot_be_priced_is_found_and_named(kind: type[FedAvg]) -> None:
    with pytest.raises(AssertionError, match=rf"^{kind.__name__} fails 1 of 1 checks\n- its_work_can_be_priced: "):
        check_algorithm(kind(), only=["its_work_can_be_priced"])


def test_work_that_can_be_priced_is_no_violation() -> None:
    check_algorithm(_ServerTrains(), only=["its_work_can_be_priced"])
