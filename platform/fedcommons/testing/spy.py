"""A wrapper that records the calls of an algorithm's functions, for the checks in ``contract``."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.algorithm import Algorithm, ChoosesClients, Facts, Merged, Message, Personal, Replies, Reply, State
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload
from fedcommons.testing.comparing import copies, differing, raw

_stirred = count()


@dataclass(frozen=True)
class Call:
    """A recorded call of the function ``client``: inputs, reply, and copies of tensors from the time of the call."""

    round: int
    message: Message
    memory: Payload
    reply: Reply
    handed: dict[str, bytes]  # a copy of the memory from which the client begins
    memory_copy: dict[str, bytes] | None  # a copy of the memory in the reply; None: the reply has no memory
    each: dict[str, bytes]  # a copy of ``Reply.each``


@dataclass
class Spy:
    """An algorithm that passes every call to the algorithm ``inner``, and records the calls.

    changed: names of arguments that a call has changed in place. Before each call the spy gives the global generators
    of torch, numpy and Python another seed, so that a method that draws from these generators
    does not repeat its results in a second run.
    """

    inner: Algorithm
    changed: set[str] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)  # calls of ``client`` in time order
    common: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)  # (round, ``common``) of each message

    def __post_init__(self) -> None:
        self.capabilities = capabilities_of(self.inner)
        if isinstance(self.inner, ChoosesClients):
            self.participants = partial(self._participants, self.inner)
        if isinstance(self.inner, Personal):
            self.personal = self.inner.personal

    @contextmanager
    def _watched(self, payloads: Mapping[str, Payload]) -> Iterator[None]:
        """Reseed the global generators, and add the names of tensors that change in this context to ``changed``."""
        seed = next(_stirred)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global generator, which no method should use)
        random.seed(seed)
        before = copies(payloads)
        yield
        self.changed.update(differing(before, copies(payloads)))

    def _participants(self, inner: ChoosesClients, state: State, round: int) -> Sequence[int]:
        with self._watched({"the state in participants: ": state}):
            return inner.participants(state, round)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        with self._watched({"the model in ": {"start": model}}):
            return self.inner.start(model, facts, seed)

    def down(self, state: State, round: int, client: int) -> Message:
        with self._watched({"the state in down: ": state}):
            message = self.inner.down(state, round, client)
        self.common.append((round, raw(message.common)))
        return message

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        old_memory = raw(memory)
        sent = {"message.common: ": message.common, "message.individual: ": message.individual}
        with self._watched({**sent, "memory: ": memory, "data: ": _tensors(data)}):
            reply = self.inner.client(work, message, memory, data, round, seed)
        new_memory = None if reply.memory is None else raw(reply.memory)
        self.calls.append(Call(round, message, memory, reply, old_memory, new_memory, raw(reply.each)))
        return reply

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        each = {f"replies[{i}].each: ": reply.each for i, reply in replies.items()}
        with self._watched({"the state in merge: ": state, "total: ": total, **each}):
            return self.inner.merge(executor, state, total, replies, round, seed)


def _tensors(rows: ClientData) -> dict[str, Tensor]:
    tensors = {"x": rows.x, "y": rows.y, "weight": rows.weight, "ids": rows.ids}
    if rows.commons is not None:  # all clients share these tensors, so a change would reach every client
        tensors |= {"commons.x": rows.commons.x, "commons.y": rows.commons.y}
    return {name: values for name, values in tensors.items() if values is not None}


def received(call: Call) -> int:
    """Return the number of bytes that the client downloads: those of all tensors of the message."""
    return sum(map(len, chain(raw(call.message.common).values(), raw(call.message.individual).values())))


def sent(call: Call) -> int:
    """Return the number of bytes that the client uploads; a tensor in both ``sums`` and ``each`` counts once."""
    return sum(map(len, {**raw(call.reply.sums), **raw(call.reply.each)}.values()))


def before_each_call(owner: object, method: str, do: Callable[[], None]) -> None:
    """Replace a method of ``owner`` by a function that calls ``do`` first."""
    inner = getattr(owner, method)

    def call(*args: Any, **named: Any) -> Any:
        do()
        return inner(*args, **named)

    object.__setattr__(owner, method, call)  # a worker is frozen
