"""The contract that every algorithm keeps, through the checks of ``fedcommons.testing``. None is named here."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from fedcommons import Algorithm, ClientData, Executor, Facts, LocalSGD, Message, Replies, Reply, State, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.registry import KINDS
from fedcommons.core.capabilities import Capabilities, capabilities_of
from fedcommons.flat_tensors import Flat, Payload, add, data, flat, sub
from fedcommons.testing import CHECKS, digits
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.elsewhere import require_the_bits_of_one_process

if TYPE_CHECKING:
    from fedcommons.federation.ray_executor import RayActors


class _RoundsOfTheServerAlone(FedAvg):
    """Names three clients itself in odd rounds, in turns; in even ones the server goes on alone by a tenth."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "before": model, "clients": torch.tensor(facts.n_clients)}

    def participants(self, state: State, round: int) -> Sequence[int]:
        n = int(data(state["clients"]))
        return [(round + j) % n for j in range(3)] if round % 2 else []

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        x = flat(state, "model")
        if replies:
            after = super().merge(executor, state, total, replies, round, seed)
        else:
            after = {"model": add(x, sub(x, flat(state, "before")), 0.1)}
        return {**after, "before": x, "clients": state["clients"]}


AUGMENTED = LocalSGD(epochs=2, batch_size=5, augment=True)
OURS: dict[str, Callable[[], Algorithm]] = {"rounds of the server alone": _RoundsOfTheServerAlone}
CONTRACT = [*KINDS["algorithm"].components, *OURS]
IMPLIED = {
    "a_client_that_sits_out_keeps_its_memory", "continuing_from_a_checkpoint_is_never_having_stopped",
    "neither_the_worker_nor_the_order_decides_a_bit",
}  # fmt: skip
"""Checks that are left out, as the check of late clients repeats each of them under harder conditions."""


@pytest.fixture(scope="session")
def make(quick: Callable[[str], Algorithm]) -> Callable[[str], Algorithm]:
    """A method of ``CONTRACT``."""
    return lambda name: OURS[name]() if name in OURS else quick(name)


FEWER = {
    "inner_steps": 2, "head_epochs": 1, "tries": 2, "iterations": 2, "local_epochs": 2, "samples": 20, "generated": 4,
    "channels": (4,), "hidden": 8, "ipc": 2, "steps": 2, "image_steps": 1, "server_steps": 2,
}  # fmt: skip
"""Constants of methods, with values that suffice for all checks but that of learning."""


def fewer(method: Any) -> Any:
    return replace(method, **{name: value for name, value in FEWER.items() if hasattr(method, name)})


SEVERAL_STEPS = {
    "same_seed_same_bits_other_seed_other_bits", "clients_with_one_sample_take_part",
    "late_clients_by_any_rule_break_no_promise", "clients_at_once_train_as_one_after_another",
}  # fmt: skip
"""Checks in which the order of batches, or partial work, counts."""


@pytest.mark.long
@pytest.mark.parametrize("check", [check for check in CHECKS if check not in IMPLIED])
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, check: str, make: Callable[[str], Algorithm]) -> None:
    if check == "the_loss_falls":
        CHECKS[check](make(name), LOCAL)
    else:
        CHECKS[check](fewer(make(name)), LocalSGD(epochs=1, batch_size=8 if check in SEVERAL_STEPS else 32))


@dataclass
class _AnyOf:
    """All algorithms in one: actors take seconds to start, so they serve all of them, and the message says which."""

    algorithms: Mapping[str, Algorithm]
    name: str = ""

    def __post_init__(self) -> None:
        chosen = self.algorithms.get(self.name)
        for name in ("start", "merge", "participants", "personal"):
            if hasattr(chosen, name):
                setattr(self, name, getattr(chosen, name))
        every = [capabilities_of(algorithm).needs for algorithm in self.algorithms.values()]
        needs = {name: what for each in every for name, what in each.items()}  # one federation serves them all
        its = capabilities_of(chosen)
        self.capabilities = Capabilities(
            needs=needs, sees_statistics=its.sees_statistics, takes_partial=its.takes_partial, needs_pool=its.needs_pool
        )

    def down(self, state: State, round: int, client: int) -> Message:
        message, number = self.algorithms[self.name].down(state, round, client), list(self.algorithms).index(self.name)
        return replace(message, common={**message.common, "algorithm": torch.tensor(number)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        common = dict(message.common)
        number = common.pop("algorithm")
        assert isinstance(number, Tensor)
        algorithm = list(self.algorithms.values())[int(number)]
        return algorithm.client(work, replace(message, common=common), memory, data, round, seed)


@pytest.fixture(scope="module")
def methods(make: Callable[[str], Algorithm]) -> Mapping[str, Algorithm]:
    return {name: make(name) for name in CONTRACT}


@pytest.fixture(scope="module")
def actors(methods: Mapping[str, Algorithm], ray_session: None) -> Iterator["RayActors"]:
    """Two actors that hold what one process does in the test below."""
    from ray import cloudpickle

    from fedcommons.federation.ray_executor import RayActors

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test
    every = cast("Algorithm", _AnyOf(methods))
    federation = digits(dropout=0.3, method=every).training(AUGMENTED)
    for method in methods.values():
        federation = federation.shared_by(method)
    served = replace(federation.data, pool=federation.data.clients, serves=True)  # for methods that need a pool
    executor = RayActors(federation.build(every), served, 2, 0, transport="fast")
    yield executor
    executor.close()


@pytest.fixture(scope="module", params=["sockets", "calls"])
def transport(actors: "RayActors", request: pytest.FixtureRequest) -> Iterator[None]:
    """The same actors, first by sockets, then by Ray's calls, which they use from the first large message on."""
    if request.param == "calls":
        large = torch.zeros(17 * 2**20, dtype=torch.uint8)
        assert actors.map(lambda worker, shared, job: shared.nbytes, large, [0, 1]) == [large.nbytes] * 2
    yield
    assert {actor.socket is None for actor in actors.actors} == {request.param == "calls"}


@pytest.mark.ray
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("name", CONTRACT)
def test_ray_actors_give_bits_of_one_process(name: str, methods: Mapping[str, Algorithm], actors: "RayActors") -> None:
    """With dropout and augmentation on."""
    algorithm = cast("Algorithm", _AnyOf(methods, name))
    federation = digits(dropout=0.3, method=algorithm).training(AUGMENTED).shared_by(methods[name])
    require_the_bits_of_one_process(algorithm, federation, actors)
