"""The contract that every algorithm keeps. There is no algorithm's name in here: a new one is tested by being listed.

The checks are those of ``fedcommons.testing``, which a method of one's own can be put through as well.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedcommons.algorithms import ALGORITHMS
from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import Algorithm, Facts, Message, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD, Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, data, flat, scale, sub
from fedcommons.testing import CHECKS, digits
from fedcommons.testing.contract import varied
from fedcommons.testing.elsewhere import require_the_bits_of_one_process


@dataclass(frozen=True)
class _StandIn:
    """Memory, an own part of the message, replies that travel singly and a second state, each with a say in the result.

    So no check is empty because no listed algorithm needs the part it looks at.

    y_i from local SGD, m_i <- m_i / 2 + (y_i - x), x <- x + mean(m_i) + control, control <- a hundredth of the mean.
    """

    local: LocalSGD

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "control": scale(model, 0.0)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message(dict(state), {"share": torch.tensor([1 / (round + client), 1.0])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, control = flat(message.common, "model"), flat(message.common, "control")
        y, metrics = self.local.run(work, x, data, seed)
        moment, old, share = sub(y, x), memory.get("moment"), message.own["share"]
        assert isinstance(share, Tensor)
        if isinstance(old, Flat):
            moment = add(moment, old, 0.5)
        kept = {"moment": moment, "times": memory.get("times", torch.zeros(())) + 1}  # pyright: ignore[reportOperatorIssue]
        return Reply({"step": add(moment, control)}, {"share": share * len(data)}, 1.0, kept, metrics)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        step, shares = total["step"], [data(r.each["share"])[0] for r in replies]
        assert isinstance(step, Flat)
        mean = scale(step, 1 / len(replies))
        control = add(flat(state, "control"), mean, 0.01 * float(torch.stack(shares).mean() > 0))
        return {"model": add(flat(state, "model"), mean), "control": control}


CONTRACT = {**ALGORITHMS, "stand-in": lambda config, local: _StandIn(local)}


def _make(name: str) -> Algorithm:
    return CONTRACT[name](Experiment(), LocalSGD(epochs=2, batch_size=5))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, check: str) -> None:
    CHECKS[check](_make(name))


@dataclass(frozen=True)
class _AnyOf:
    """All algorithms in one: actors take seconds to start, so they serve all of them, and the message says which."""

    algorithms: Mapping[str, Algorithm]
    name: str = ""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return self.algorithms[self.name].start(model, facts, seed)

    def down(self, state: State, round: int, client: int) -> Message:
        message, number = self.algorithms[self.name].down(state, round, client), list(self.algorithms).index(self.name)
        return replace(message, common={**message.common, "algorithm": torch.tensor(number)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        common = dict(message.common)
        number = common.pop("algorithm")
        assert isinstance(number, Tensor)
        algorithm = list(self.algorithms.values())[int(number)]
        return algorithm.client(work, replace(message, common=common), memory, data, seed)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        return self.algorithms[self.name].merge(executor, state, total, replies, seed)


def _any_of(name: str = "") -> _AnyOf:
    return _AnyOf({each: varied(_make(each), augment=True) for each in CONTRACT}, name)


@pytest.fixture(scope="module", params=[1, 2, 4])
def actors(request: pytest.FixtureRequest, ray_session: None) -> Iterator[Executor]:
    """So many actors that hold what one process does in the test below."""
    from ray import cloudpickle

    from fedcommons.federation.ray_actors import RayActors

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test
    federation = digits(dropout=0.3)
    executor = RayActors(federation.build(_any_of()), federation.data, request.param, 0)
    yield executor
    executor.close()


@pytest.mark.ray
@pytest.mark.parametrize("name", CONTRACT)
def test_ray_actors_give_the_bits_of_one_process(name: str, actors: Executor) -> None:
    """With dropout and augmentation on; about ten seconds for each number of actors, which have to import torch."""
    require_the_bits_of_one_process(_any_of(name), digits(dropout=0.3), actors)
