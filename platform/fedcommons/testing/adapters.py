"""Adapters that run clients of other frameworks as fedcommons methods, without an import of these frameworks.

The user passes a client class, or a function that builds a client object. The adapter calls the class or function with
those of the following arguments that its signature names:

module      a copy of the torch module with the untrained weights; ``module(x)`` returns logits or predictions
loss        ``loss(module(x), y)``: mean cross entropy, or half the mean squared error if y are floats
x, y        tensors with the client's n examples, shapes (n, ...) and (n,)
rate, epochs, batch_size, seed      settings of the local training; ``rate`` is the learning rate

The client object must have one of these interfaces:

Flower's NumPyClient    ``fit(parameters, config) -> (parameters, n_examples, metrics)``; parameters: list of arrays in
                        the order of ``module.parameters()``
Flower's ClientApp      ``@app.train()``: the message has the records ``arrays``, with the names of the module's
                        ``state_dict``, and ``config``; the reply has arrays, and metrics with ``num-examples``; the
                        context has ``partition-id`` (the client's number), ``run_config`` (equal to ``config``) and
                        ``state``
PFLlib's client         ``set_parameters(model)``, ``train()``, ``.model``, and ``.train_samples`` or ``len(.data)``

``config`` has the user's and the strategy's values, and ``server_round`` (ClientApp: also ``server-round``).
If a value is the word rate, epochs, batch_size or seed, the client gets the value of this setting. Numbers in a
client's metrics are recorded.

The adapter builds a new object for each client and round. Then it sets the attributes that the client's last round
changed (``kept_attributes``): tensors, arrays, Python literals, lists and dicts of them, and the ``state_dict`` of a
torch module that the new object has too, such as a personal model. Other attributes, such as optimizers, are new in
each round, and a warning names those that changed. The adapter seeds the generators of torch, numpy and Python before
it builds the object, and again before training. PFLlib's clients seed torch with 0 when they are built, so they would
draw the same batches in every round and for every seed. Random generators of the object and of its data loaders are
seeded too, unless the object takes ``seed``.

The server averages the clients' models weighted by their numbers of examples, unless the user passes a strategy:

Flower's strategies     of ``flwr.serverapp.strategy`` (Message API) or ``flwr.server.strategy``. Clients get their
                        configs. Each round they must choose all clients (fraction 1), because
                        ``federation.participation`` samples the clients; other strategies are refused
other classes           ``aggregate_fit(server_round, results, failures) -> (parameters, metrics)``. A result is a pair
                        of a client's name and an object with ``.parameters`` (list of arrays), ``.num_examples`` and
                        ``.metrics``. Such a strategy sends no config

The strategy's object lasts for a run; a resumed run restores its attributes by the same rule, and is refused if other
attributes have changed. If the strategy's class or function has a parameter ``initial_parameters``, the strategy gets
the initial weights. Strategies and clients may send further arrays after those of the model, as SCAFFOLD does. The
adapter calls no evaluation of strategies or clients.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import Parameter, isclass, signature
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedcommons.core.algorithm import Facts, Merged, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work, trainable_parameters
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalResult
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError, before_any_work, name_of, quote, user_code_context
from fedcommons.flat_tensors import Flat, Payload, flat
from fedcommons.privacy.release import UNCOVERED, uncovered
from fedcommons.seeding import keyed_globals, seed_for
from fedcommons.testing.arrays import EXTRA, METRIC, arrays_in, flat_of, numbers_in, packed, payload_of, unpacked
from fedcommons.testing.federations import digits
from fedcommons.testing.flower import AppClient, is_flowers
from fedcommons.testing.kept_attributes import attributes, changed, lost_attributes, restore, warn
from fedcommons.testing.strategies import Server

HANDED = ("module", "loss", "x", "y", "rate", "epochs", "batch_size", "seed")
OURS, PFLLIB = ("start", "down", "client", "merge"), ("set_parameters", "train")
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Adapted:
    """A method that runs clients of another framework (see ``adapted``).

    config: the mapping ``config`` of Flower's clients. server: the strategy's object, which lasts for a run.
    """

    build: Callable[..., Any]
    strategy: Callable[..., Any] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    server: Server | None = field(default=None, init=False, repr=False, compare=False)

    capabilities: ClassVar[Capabilities] = Capabilities(refuses_batch_norm=True, knows_number=True)

    def __post_init__(self) -> None:
        if self.strategy:
            takes_weights = bool(_accepted_names(self.strategy, ["initial_parameters"]))
            object.__setattr__(self, "server", Server(self.strategy, takes_weights, self.config))

    @property
    def shown_as(self) -> str:
        """Return the name for messages: that of the user's client, or of the function that builds the client."""
        return f"the client {name_of(self.build)}"

    @property
    def takes_loss(self) -> bool:
        """Return whether the client accepts the argument ``loss``, so that a test can train it on least squares."""
        return "loss" in _accepted_names(self.build, HANDED)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        state: State = {"model": model, "seed": torch.tensor(seed)}
        if self.server:
            state = {**state, "n_clients": torch.tensor(facts.n_clients)}
            state |= {"initial": model} if self.server.takes_weights else {}
            is_real = not model.buffer.is_meta  # a check before the run has shapes without values
            values = model if is_real else Flat(model.layout, torch.zeros(model.layout.size))
            self.server.start(values, seed)
            self.server.configure(state if is_real else {**state, "model": values}, 1)
        return state

    def down(self, state: State, round: int, client: int) -> Message:
        common = {name: x for name, x in state.items() if name == "model" or name.startswith(EXTRA)}
        if self.server:
            self.server.configure(state, round)
        return Message(common, packed(self.server.configs.get(client, {}) if self.server else {}))

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if data.weight is not None:
            raise ValueError("a client of another framework cannot use weights of examples")
        x = flat(message.common, "model")
        with keyed_globals(seed, "built"):
            theirs = self.build_object(work, data, seed)
        keyed = None if "seed" in _accepted_names(self.build, HANDED) else theirs
        _key_generators(keyed, seed)
        built = attributes(theirs)
        restore(theirs, memory)
        metrics: Mapping[str, Any] = {}
        with keyed_globals(seed, "adapted"):
            if _is_flower(theirs):
                values = self._settings(work, data, seed)
                config = {"server_round": round, **self.config, **unpacked(message.individual)}
                config = {name: values.get(str(value), value) for name, value in config.items()}
                arrays, n, metrics = theirs.fit([*arrays_in(message.common).values()], config)
            else:
                theirs.set_parameters(_module(work, x))
                theirs.train()
                arrays = [p.detach().numpy(force=True) for p in trainable_parameters(theirs.model).values()]
                n = theirs.train_samples if hasattr(theirs, "train_samples") else len(theirs.data)
        if not isinstance(n, Integral) or n < 1:
            raise ValueError(f"a client must return its number of examples, a whole number from 1, got {quote(n)}")
        sent, numbers = payload_of(arrays, x), numbers_in(metrics)
        _key_generators(keyed, seed)  # as in a new object, so that their state does not count as changed
        changes = changed(theirs, built)
        if names := lost_attributes(changes):
            text = "may have changed attributes that are lost, as each round begins with a new object"
            warn(f"{name_of(self.build)} {text}: {names}")
        changes = {path: value for path, value in changes.items() if not lost_attributes({path: value})}
        work.load(flat(sent, "model"))
        with torch.no_grad():
            loss = float(_loss_of(data.y)(work.module(data.x), data.y))
        reply = Reply(weight=float(n), memory=changes if changes or memory else None, metrics={"loss": loss, **numbers})
        if self.strategy:
            sent |= {f"{METRIC}{name}": torch.tensor(number) for name, number in numbers.items()}
            return replace(reply, each=sent, releases=[uncovered(tuple(sent))])
        trained = LocalResult(flat_of(arrays, x), reply.metrics, UNCOVERED)
        return weighted_reply(x, trained, reply.weight, reply.memory)

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        if self.server:
            return self.server.merge(state, replies, round, seed)
        return {**state, "model": weighted_mean(flat(state, "model"), total, replies)}

    def _settings(self, work: Work, data: ClientData, seed: int) -> dict[str, Any]:
        epochs = work.loop.epochs_for(len(data), data.n_own, work.share)
        return dict(rate=float(work.rates[0]), epochs=epochs, batch_size=work.loop.batch_size, seed=seed)

    def build_object(self, work: Work, data: ClientData, seed: int) -> Any:
        """Build a client's object with those arguments, listed in the module's docstring, that ``build`` accepts."""
        module = _module(work, work.initial)
        values = dict(module=module, loss=_loss_of(data.y), x=data.x, y=data.y, **self._settings(work, data, seed))
        names = _accepted_names(self.build, HANDED)
        theirs = self.build(**{name: value for name, value in values.items() if name in names}, **self.constants)
        is_app = callable(theirs) and is_flowers(type(theirs))
        return AppClient(theirs, module, tuple(work.named), work.number or 0) if is_app else theirs


def adapted(
    build: Callable[..., Any],
    strategy: Callable[..., Any] | None = None,
    constants: Mapping[str, Any] = NOTHING,
    config: Mapping[str, Any] = NOTHING,
) -> Adapted:
    """Return a method whose clients have Flower's or PFLlib's interface.

    Args:
        build: the client's class, or a function that builds the client object.
        strategy: a function that builds a strategy with Flower's interface; None: the server averages models weighted
            by numbers of examples.
        constants: further arguments of ``build``, by name; default: none.
        config: what a strategy would send to the clients as ``config``; default: only the number of the round.

    Raises:
        UserError: the client has no known interface, or cannot be built in a test on handwritten digits; ``build`` has
            a required parameter that the adapter cannot pass, or does not accept one of the constants; or the strategy
            has neither ``aggregate_fit`` nor ``aggregate_train``.
    """
    interfaces = f"ours ({', '.join(OURS)}), Flower's (fit(parameters, config)), PFLlib's ({', '.join(PFLLIB)})"
    unknown = UserError(f"{name_of(build)} has none of the interfaces that a client can have: {interfaces}.")
    if isclass(build) and not (_is_flower(build) or _has(build, PFLLIB)):
        raise unknown
    for name, parameter in _parameters(build).items():
        is_free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not (is_free or parameter.default is not parameter.empty or name in (*HANDED, *constants)):
            raise UserError(f"{name_of(build)} asks for {name}; it can take {', '.join(HANDED)} and constants.")
    if odd := [name for name in constants if name in HANDED or not _accepted_names(build, [name])]:
        raise UserError(f"{name_of(build)} takes no constant {quote(odd[0])}.")
    result, federation = Adapted(build, strategy, dict(constants), dict(config)), digits(linear=True)
    with before_any_work(), user_code_context(build):
        theirs = result.build_object(federation.work(), federation.data.clients[0], 0)
        if result.server:
            result.server.start(federation.model, 0)
    if not (_is_flower(theirs) or _has(theirs, PFLLIB)):
        raise unknown
    names = ("aggregate_fit", "aggregate_train")
    if result.server and not any(hasattr(result.server.strategy, name) for name in names):
        raise UserError(f"{name_of(strategy)} has neither {' nor '.join(names)}, one of which a strategy must have.")
    return replace(result)  # without the server of the test


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


def _is_flower(thing: object) -> bool:
    """Return whether the object, or the objects of the class, have Flower's ``fit(parameters, config)``."""
    return _has(thing, ["fit"]) and "config" in _parameters(thing.fit)  # pyright: ignore[reportAttributeAccessIssue]


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
