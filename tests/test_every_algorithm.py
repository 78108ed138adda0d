"""The contract that every algorithm keeps. A new one is tested by being listed, and none is named here.

The checks are those of ``fedcommons.testing``, which a method of one's own can be put through as well.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.parts import KINDS
from fedcommons.core.algorithm import (
    BUFFERS,
    Algorithm,
    ChoosesClients,
    Facts,
    Message,
    Personal,
    Replies,
    Reply,
    State,
    needed,
)
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.federation.evaluation import ModelTask
from fedcommons.tensors import Flat, Payload, add, copy, data, flat, put, scale, select, sub
from fedcommons.testing import CHECKS, digits
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.elsewhere import require_the_bits_of_one_process


@dataclass(frozen=True)
class _StandIn:
    """Memory, an own part of the message, replies that travel singly and a second state, each with a say in the result.

    So no check is empty because no listed algorithm needs the part it looks at.

    y_i from local SGD, m_i <- m_i / 2 + (y_i - x), x <- x + mean(m_i) + control, control <- a hundredth of the mean.
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "control": scale(model, 0.0)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message(dict(state), {"share": torch.tensor([1 / (round + client), 1.0])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, control = flat(message.common, "model"), flat(message.common, "control")
        y, metrics, spent = work.local(x, data, seed)
        moment, old, share = sub(y, x), memory.get("moment"), message.own["share"]
        assert isinstance(share, Tensor)
        if isinstance(old, Flat):
            moment = add(moment, old, 0.5)
        kept = {"moment": moment, "times": memory.get("times", torch.zeros(())) + 1}  # pyright: ignore[reportOperatorIssue]
        step, each = {"step": add(moment, control)}, {"share": share * len(data)}
        return Reply(step, each, memory=kept, metrics=metrics, releases=[spent.of("step", "share")])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        step, shares = total["step"], [data(r.each["share"])[0] for r in replies.values()]
        assert isinstance(step, Flat)
        mean = scale(step, 1 / len(replies))
        control = add(flat(state, "control"), mean, 0.01 * float(torch.stack(shares).mean() > 0))
        return {"model": add(flat(state, "model"), mean), "control": control}


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


class _TrainsOnTheServer(FedAvg):
    """The server trains on for some steps, on images of its own."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        mean = flat(super().merge(executor, state, total, replies, round, seed), "model")
        return {"model": executor.map(_train_on_the_server, ModelTask(mean), [seed])[0]}


def _train_on_the_server(worker: Worker, task: ModelTask, seed: int) -> Flat:
    task.load(worker.work)
    images = worker.data.sets["test"]
    return copy(worker.work.local(task.model, ClientData(images.x[:20], images.y[:20]), seed, lr=0.02).model)


class _RatesOfItsOwn(FedAvg):
    """Some clients have another learning rate than the module's, and which of them is drawn."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed, lr=0.05 / round if seed % 2 else None)
        return Reply({"delta": sub(y, x)}, metrics=metrics, releases=[spent.of("delta")])


class _BiasesOfOnesOwn(FedAvg):
    """Biases never travel: each client keeps its own from round to round, the server those it started with."""

    def down(self, state: State, round: int, client: int) -> Message:
        model = flat(state, "model")
        return Message({"weights": select(model, [name for name in model if not name.endswith("bias")])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "weights")
        start = put(put(work.initial, flat(memory, "biases")) if memory else work.initial, x)
        y, metrics, spent = work.local(start, data, seed)
        kept = {"biases": select(y, [name for name in y if name not in x.layout.names])}
        delta = sub(select(y, x.layout.names), x)
        return Reply({"delta": delta}, memory=kept, metrics=metrics, releases=[spent.of("delta")])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        model, delta = flat(state, "model"), flat(total, "delta")
        return {"model": put(model, add(select(model, delta.layout.names), delta, 1 / len(replies)))}


class _SeesStatistics(FedAvg):
    """Keeps the largest of every one of BatchNorm's statistics, over clients."""

    sees_statistics = True

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        after = super().merge(executor, state, total, replies, round, seed)
        seen = [data(reply.each[BUFFERS]) for reply in replies.values() if BUFFERS in reply.each]
        return {**after, "largest": torch.stack(seen).amax(0)} if seen else after


AUGMENTED = LocalSGD(epochs=2, batch_size=5, augment=True)
OURS: dict[str, Callable[[], Algorithm]] = {
    "stand-in": _StandIn,
    "rounds of the server alone": _RoundsOfTheServerAlone,
    "trains on the server": _TrainsOnTheServer,
    "rates of its own": _RatesOfItsOwn,
    "biases of one's own": _BiasesOfOnesOwn,
    "sees statistics": _SeesStatistics,
}
CONTRACT = [*KINDS["algorithm"].known, *OURS]


@pytest.fixture(scope="session")
def make(quick: Callable[[str], Algorithm]) -> Callable[[str], Algorithm]:
    """A method of ``CONTRACT``."""
    return lambda name: OURS[name]() if name in OURS else quick(name)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name: str, check: str, make: Callable[[str], Algorithm]) -> None:
    """With fewer steps than ``LOCAL``, which are enough for all but learning."""
    CHECKS[check](make(name), LOCAL if check == "the_loss_falls" else LocalSGD(epochs=1, batch_size=8))


@dataclass
class _AnyOf:
    """All algorithms in one: actors take seconds to start, so they serve all of them, and the message says which."""

    algorithms: Mapping[str, Algorithm]
    name: str = ""

    @property
    def needs(self) -> Mapping[str, str]:
        """What any of them needs of the module: one federation serves them all."""
        return {name: what for each in self.algorithms.values() for name, what in needed(each).items()}

    def __post_init__(self) -> None:
        chosen = self.algorithms.get(self.name)
        if isinstance(chosen, ChoosesClients):
            self.participants = chosen.participants
        if isinstance(chosen, Personal):
            self.personal = chosen.personal
        self.sees_statistics = getattr(chosen, "sees_statistics", False)
        self.takes_partial = getattr(chosen, "takes_partial", False)
        self.needs_pool = getattr(chosen, "needs_pool", False)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return self.algorithms[self.name].start(model, facts, seed)

    def down(self, state: State, round: int, client: int) -> Message:
        message, number = self.algorithms[self.name].down(state, round, client), list(self.algorithms).index(self.name)
        return replace(message, common={**message.common, "algorithm": torch.tensor(number)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        common = dict(message.common)
        number = common.pop("algorithm")
        assert isinstance(number, Tensor)
        algorithm = list(self.algorithms.values())[int(number)]
        return algorithm.client(work, replace(message, common=common), memory, data, round, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return self.algorithms[self.name].merge(executor, state, total, replies, round, seed)


@pytest.fixture(scope="session")
def any_of(make: Callable[[str], Algorithm]) -> Callable[[str], _AnyOf]:
    """All in one, of which the one of this name is played."""
    return lambda name: _AnyOf({each: make(each) for each in CONTRACT}, name)


@pytest.fixture(scope="module", params=[1, 2, 4])
def actors(request: pytest.FixtureRequest, any_of: Callable[[str], _AnyOf], ray_session: None) -> Iterator[Executor]:
    """So many actors that hold what one process does in the test below."""
    from ray import cloudpickle

    from fedcommons.federation.ray_actors import RayActors

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test
    federation = digits(dropout=0.3, method=any_of("")).training(AUGMENTED)
    served = replace(federation.data, pool=federation.data.clients, serves=True)  # for methods that need a pool
    executor = RayActors(federation.build(any_of("")), served, request.param, 0)
    yield executor
    executor.close()


@pytest.mark.ray
@pytest.mark.parametrize("name", CONTRACT)
def test_ray_actors_give_the_bits_of_one_process(name: str, any_of: Callable[[str], _AnyOf], actors: Executor) -> None:
    """With dropout and augmentation on; about ten seconds for each number of actors, which have to import torch."""
    algorithm = any_of(name)
    require_the_bits_of_one_process(algorithm, digits(dropout=0.3, method=algorithm).training(AUGMENTED), actors)
