"""Adapters that run clients of other frameworks as fedcommons methods, without an import of these frameworks.

The user passes a client class, or a function that builds a client object. The adapter calls the class or function with
those of the following arguments that its signature names:

module      a copy of the torch module with the untrained weights; ``module(x)`` returns logits or predictions
loss        ``loss(module(x), y)``: mean cross entropy, or half the mean squared error if y are floats
x, y        tensors with the client's n examples, shapes (n, ...) and (n,)
rate, epochs, batch_size, seed      settings of the local training; ``rate`` is the learning rate

The client object must have one of these interfaces:

Flower's NumPyClient    ``fit(parameters, config) -> (parameters, n_examples, metrics)``; parameters: list of arrays in
                        the order of ``module.parameters()``; config: ``{"server_round": round}``
PFLlib's client         ``set_parameters(model)``, ``train()``, ``.model``, and ``.train_samples`` or ``len(.data)``

The adapter builds a new object for each client and round. It seeds the generators of torch, numpy and Python before it
builds the object, and again before training. PFLlib's clients seed torch with 0 when they are built, so they would draw
the same batches in every round and for every seed. Random generators of the object and of its data loaders are seeded
too, unless the object takes ``seed``.

The server averages the clients' models weighted by their numbers of examples, unless the user passes a strategy with
``aggregate_fit(server_round, results, failures) -> (parameters, metrics)``. The strategy's object lasts for a run. Each
result is a pair of a client's name and an object with ``.parameters``, ``.num_examples`` and ``.metrics``. Unlike in
Flower, parameters are always lists of arrays.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import Parameter, isclass, signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work, trainable_parameters
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalResult
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError, before_any_work, name_of, quote, user_code_context
from fedcommons.flat_tensors import Flat, Payload, copy, flat, scalar
from fedcommons.privacy.release import UNCOVERED, uncovered
from fedcommons.seeding import keyed_globals, seed_for
from fedcommons.testing.federations import digits

HANDED = ("module", "loss", "x", "y", "rate", "epochs", "batch_size", "seed")
OURS, FLOWER, PFLLIB = ("start", "down", "client", "merge"), ("get_parameters", "fit"), ("set_parameters", "train")
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Result:
    """A client's trained parameters, number of examples and metrics, as a strategy receives them."""

    parameters: list[np.ndarray]
    num_examples: int
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """A method that runs clients of another framework (see ``adapted``).

    server: a list with the strategy's object, which lasts for a run; empty without a strategy.
    """

    build: Callable[..., Any]
    strategy: Callable[[], Any] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    server: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    capabilities: ClassVar[Capabilities] = Capabilities(refuses_batch_norm=True)

    @property
    def shown_as(self) -> str:
        """Return the name for messages: that of the user's client, or of the function that builds the client."""
        return f"the client {name_of(self.build)}"

    @property
    def takes_loss(self) -> bool:
        """Return whether the client accepts the argument ``loss``, so that a test can train it on least squares."""
        return "loss" in _accepted_names(self.build, HANDED)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.server.clear()
        if not self.strategy:
            return {"model": model}
        self.server.append(self._server(seed))
        return {"model": model, "seed": torch.tensor(seed)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if data.weight is not None:
            raise ValueError("a client of another framework cannot use weights of examples")
        x = flat(message.common, "model")
        with keyed_globals(seed, "built"):
            theirs = self.build_object(work, data, seed)
        if "seed" not in _accepted_names(self.build, HANDED):
            _key_generators(theirs, seed)
        with keyed_globals(seed, "adapted"):
            if _has(theirs, FLOWER):
                arrays, n, _ = theirs.fit(arrays_of(x), {"server_round": round})
            else:
                theirs.set_parameters(_module(work, x))
                theirs.train()
                arrays = [p.detach().numpy(force=True) for p in trainable_parameters(theirs.model).values()]
                n = theirs.train_samples if hasattr(theirs, "train_samples") else len(theirs.data)
        if not isinstance(n, Integral) or n < 1:
            raise ValueError(f"a client must return its number of examples, a whole number from 1, got {quote(n)}")
        y = flat_of(arrays, x)
        work.load(y)
        with torch.no_grad():
            metrics = {"loss": float(_loss_of(data.y)(work.module(data.x), data.y))}
        if self.strategy:
            return Reply(each={"model": y}, weight=float(n), metrics=metrics, releases=[uncovered(("model",))])
        return weighted_reply(x, LocalResult(y, metrics, UNCOVERED), float(n))

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        x = flat(state, "model")
        if not self.strategy:
            return {"model": weighted_mean(x, total, replies)}
        if not self.server:  # a checkpoint stores no strategy, so a continued run builds it here
            self.server.append(self._server(int(scalar(state, "seed"))))
        models = {i: arrays_of(flat(reply.each, "model")) for i, reply in replies.items()}
        results = [(str(i), Result(arrays, int(replies[i].weight))) for i, arrays in models.items()]
        with keyed_globals(seed, "strategy"):
            arrays, _ = self.server[0].aggregate_fit(round, results, [])
        return {"model": x if arrays is None else flat_of(arrays, x), "seed": state["seed"]}

    def _server(self, seed: int) -> Any:
        """Build the strategy's object, with the generators of torch, numpy and Python seeded by the run's seed."""
        assert self.strategy is not None
        with keyed_globals(seed, "strategy built"):
            return self.strategy()

    def build_object(self, work: Work, data: ClientData, seed: int) -> Any:
        """Build a client's object with those arguments, listed in the module's docstring, that ``build`` accepts."""
        epochs = work.loop.epochs_for(len(data), data.n_own, work.share)
        values = dict(module=_module(work, work.initial), loss=_loss_of(data.y), x=data.x, y=data.y)
        values |= dict(rate=float(work.rates[0]), epochs=epochs, batch_size=work.loop.batch_size, seed=seed)
        names = _accepted_names(self.build, HANDED)
        return self.build(**{name: value for name, value in values.items() if name in names}, **self.constants)


def adapted(
    build: Callable[..., Any], strategy: Callable[[], Any] | None = None, constants: Mapping[str, Any] = NOTHING
) -> Adapted:
    """Return a method whose clients have Flower's or PFLlib's interface.

    Args:
        build: the client's class, or a function that builds the client object.
        strategy: a function that builds a strategy with Flower's interface; None: the server averages models weighted
            by numbers of examples.
        constants: further arguments of ``build``, by name; default: none.

    Raises:
        UserError: the client has no known interface, or cannot be built in a test on handwritten digits; ``build`` has
            a required parameter that the adapter cannot pass, or does not accept one of the constants; or the strategy
            has no ``aggregate_fit``.
    """
    interfaces = f"ours ({', '.join(OURS)}), Flower's NumPyClient ({', '.join(FLOWER)}), PFLlib's ({', '.join(PFLLIB)})"
    unknown = UserError(f"{name_of(build)} has none of the interfaces that a client can have: {interfaces}.")
    if isclass(build) and not (_has(build, FLOWER) or _has(build, PFLLIB)):
        raise unknown
    for name, parameter in _parameters(build).items():
        is_free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not (is_free or parameter.default is not parameter.empty or name in (*HANDED, *constants)):
            raise UserError(f"{name_of(build)} asks for {name}; it can take {', '.join(HANDED)} and constants.")
    if odd := [name for name in constants if name in HANDED or not _accepted_names(build, [name])]:
        raise UserError(f"{name_of(build)} takes no constant {quote(odd[0])}.")
    result, federation = Adapted(build, strategy, constants), digits(linear=True)
    with before_any_work(), user_code_context(build):
        theirs = result.build_object(federation.work(), federation.data.clients[0], 0)
        server = strategy() if strategy else None
    if not (_has(theirs, FLOWER) or _has(theirs, PFLLIB)):
        raise unknown
    if strategy and not hasattr(server, "aggregate_fit"):
        raise UserError(f"{name_of(strategy)} has no aggregate_fit, which a strategy for Flower must have.")
    return result


def arrays_of(x: Flat) -> list[np.ndarray]:
    """Return a copy of each weight tensor of ``x`` as a numpy array, in the order of ``x``."""
    return [part.detach().cpu().clone().numpy() for part in x.values()]


def flat_of(arrays: Sequence[Any], like: Flat) -> Flat:
    """Return a copy of the arrays as a flat vector with the names, shapes and type of ``like``.

    Raises:
        ValueError: the number or the shapes of the arrays differ from ``like``.
    """
    shapes, expected = [tuple(np.shape(array)) for array in arrays], [*like.layout.shapes]
    if shapes != expected:
        raise ValueError(f"the arrays have shapes {quote(shapes)}, but the model has shapes {quote(expected)}")
    result = copy(like)
    for array, part in zip(arrays, result.values(), strict=True):
        part.copy_(torch.as_tensor(np.asarray(array)))
    return result


def _module(work: Work, weights: Flat) -> nn.Module:
    """Return a separate copy of the worker's module, in training mode, whose parameters have the values ``weights``."""
    module = deepcopy(work.module)
    with torch.no_grad():
        for name, parameter in trainable_parameters(module).items():
            parameter.copy_(weights[name])
    return module.train()


def _key_generators(theirs: object, seed: int) -> None:
    """Seed the random generators that are attributes of a client's object or of its data loaders."""
    attributes = dict(getattr(theirs, "__dict__", {}))
    for name, loader in [(name, value) for name, value in attributes.items() if isinstance(value, DataLoader)]:
        of_sampler = getattr(loader.sampler, "generator", None)
        attributes |= {f"{name}.generator": loader.generator, f"{name}.sampler.generator": of_sampler}
    for name, value in attributes.items():
        key = seed_for(seed, "generator", name)
        if isinstance(value, torch.Generator):
            value.manual_seed(key)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(key).state  # pyright: ignore[reportCallIssue]
        elif isinstance(value, np.random.RandomState):
            value.seed(key % 2**32)
        elif isinstance(value, random.Random):
            value.seed(key)


def _loss_of(y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return _half_square if y.is_floating_point() else F.cross_entropy


def _half_square(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean() / 2


def _has(thing: object, names: Sequence[str]) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def _parameters(build: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return signature(build).parameters
    except (ValueError, TypeError):
        raise UserError(f"{name_of(build)}: Python cannot list its parameters.") from None


def _accepted_names(build: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that ``build`` accepts as keyword arguments; with ``**kwargs`` all of ``names``."""
    parameters = _parameters(build)
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if has_any or name in parameters]
