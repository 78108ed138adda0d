"""Attributes of other frameworks' clients and strategies between rounds and after a stop."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from foreign_clients import Average, Fitted, FlowerStyle
from torch import Tensor, nn

from fedcommons.errors import UserError
from fedcommons.flat_tensors import flat
from fedcommons.testing import theirs
from fedcommons.testing.adapters import adapted
from fedcommons.testing.elsewhere import require_the_same_after_a_stop
from fedcommons.testing.federations import digits
from fedcommons.testing.kept_attributes import attributes, changed, lost_attributes, restore


def test_attributes_are_restored_with_their_types_and_their_order() -> None:
    values = {"b": [torch.eye(2), {"z": np.eye(1), "a": 2, 7: [True, 0.1]}, [*range(11)], np.float32(0.1), np.bool(1)]}
    values |= {
        "same": [1],
        "zeros": np.zeros(2),
        "none": None,
        "empty": {},
        "text": ("é", -0.0, b"b", {1}, {(1, 2): ()}),
    }
    values |= {"many": defaultdict(int, n=2), "trained": torch.ones(1, requires_grad=True)}
    values |= {"turned": [np.arange(6).reshape(2, 3).T, torch.arange(24).view(2, 3, 4).permute(1, 2, 0)]}
    old, new = (Slotted(same=[1], b=None, net=nn.BatchNorm1d(2), zeros=np.zeros(2, int)) for _ in range(2))
    for thing in (old, new):
        thing.none, thing.empty, thing.many, thing.slot = 5, {"a": 1}, defaultdict(int), 0
        thing.scale = torch.zeros(1, requires_grad=True)
    built = attributes(old)
    vars(old).update(values)
    old.net(torch.rand(3, 2))
    old.slot = 1
    old.scale.data += 1
    parameters, changes = [*new.net.parameters(), new.scale], changed(old, built)
    assert not lost_attributes(changes)
    restore(new, dict(sorted(changes.items())))  # as a checkpoint sorts them
    assert {json.loads(path)[0][1] for path in changes} == {*values, "net", "scale", "slot"} - {"same"}
    assert repr(vars(new)) == repr(vars(old))
    assert (new.slot, new.many["m"], type(new.b[-1])) == (1, 0, np.bool)
    assert (new.turned[0].strides, new.turned[1].stride()) == ((8, 24), (4, 1, 12))  # which decide the order of sums
    assert repr(new.net.state_dict()) == repr(old.net.state_dict())
    assert all(map(is_, parameters, [*new.net.parameters(), new.scale]))  # which optimizers of the new object hold


def test_attributes_that_cannot_be_kept_are_named_if_they_may_have_changed() -> None:
    old = SimpleNamespace(rng=np.random.default_rng(0), queue=deque([1]), constant=deque([1]), function=lambda: 1)
    vars(old).update(window=Counter(), late=None, gone=1, iterator=(i for i in [1]), itself=[], shape=torch.Size([1]))
    old.net, old.meta = nn.Linear(1, 1), torch.zeros(1, device="meta")
    built = attributes(old)
    old.rng.random()
    old.queue.append(2)
    vars(old.net)["temperature"] = 0.5  # not in the state_dict
    old.itself.append(old.itself)
    del old.gone
    vars(old).update(
        late=nn.Linear(1, 1), window=OrderedDict(a=1), whole=2**70, new=Slower(), imaginary=np.ones(1, complex)
    )
    names = {json.loads(path)[0][1] for path in changed(old, built) if lost_attributes({path: torch.zeros(0)})}
    right = {"rng", "queue", "itself", "gone", "late", "net", "meta", "window", "iterator", "whole", "new", "imaginary"}
    assert names == right
    assert "deleted" in lost_attributes(changed(old, built))


class Slotted(SimpleNamespace):
    __slots__ = ("slot",)


class ListsParameters(FlowerStyle):
    """It sets and sends the module's parameters by a list, and has a parameter of its own and a lazy module."""

    def __init__(
        self, module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int
    ) -> None:
        super().__init__(module, loss, x, y, rate, epochs, batch_size)
        self.weights, self.bias, self.lazy = [*module.parameters()], nn.Parameter(torch.zeros(1)), nn.LazyLinear(1)

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        for weight, value in zip(self.weights, parameters, strict=True):
            weight.data = torch.tensor(value)
        self.train()
        self.bias.data += 1
        self.net = nn.Sequential(self.net)  # the state_dict gets other names, as by torch.compile
        numbers = {"own": self.bias.item(), "learns": float(self.bias.requires_grad)}
        return [weight.detach().numpy().copy() for weight in self.weights], self.n, numbers


def test_parameters_that_a_client_keeps_are_those_of_its_modules() -> None:
    federation = digits(linear=True).training(theirs.FULL, "samples")
    with pytest.warns(UserWarning, match=r"ListsParameters .* net \(Sequential\)"):
        now, metrics = federation.run(adapted(ListsParameters), federation.plan(3))[-1]
    plain, _ = federation.run(adapted(FlowerStyle), federation.plan(3))[-1]
    assert flat(now.state, "model").buffer.equal(flat(plain.state, "model").buffer)
    assert (metrics["train/own"], metrics["train/learns"]) == (3, 1)


class Wrapper(Average):
    """It lets another strategy merge, as Flower's strategies of differential privacy do."""

    def __init__(self) -> None:
        self.strategy = Slower()

    def aggregate_fit(self, *arguments: Any) -> tuple[list[np.ndarray] | None, dict]:
        return self.strategy.aggregate_fit(*arguments)


class Slower(Average):
    log: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.calls = (0,)

    def aggregate_fit(self, *arguments: Any) -> tuple[list[np.ndarray] | None, dict]:
        self.calls = (*self.calls, 1)
        self.log.append(1)
        arrays, numbers = super().aggregate_fit(*arguments)
        return arrays and [x / len(self.calls) / len(self.log) for x in arrays], numbers


class Anchored(Average):
    """It keeps the initial weights, which equal those of a newly built object."""

    def __init__(self, initial_parameters: list[np.ndarray]) -> None:
        self.anchor = initial_parameters

    def weights(self, results: list[tuple[str, Any]]) -> list[float]:
        return [float(np.abs(r.parameters[0] - self.anchor[0]).sum()) for _, r in results]


@pytest.mark.parametrize("strategy", [Wrapper, Anchored])
def test_a_strategy_continues_after_a_stop(strategy: type) -> None:
    federation = digits(linear=True).training(theirs.FULL, "samples")
    require_the_same_after_a_stop(adapted(FlowerStyle, strategy), federation, federation.plan(4))


class Noisy(Average):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def weights(self, results: list[tuple[str, Any]]) -> list[float]:
        return [self.rng.random() for _ in results]


def test_a_run_with_an_attribute_that_no_checkpoint_stores_is_not_resumed_and_says_so_before() -> None:
    federation = digits(linear=True).training(theirs.FULL, "samples")
    names = r"Noisy .* rng \(Generator\).*--resume"
    with pytest.warns(UserWarning, match=names), pytest.raises(UserError, match=names):
        require_the_same_after_a_stop(adapted(FlowerStyle, Noisy), federation, federation.plan(4))
