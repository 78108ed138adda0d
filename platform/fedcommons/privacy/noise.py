"""The noise behind every ``Release``, and the Poisson batches that must stay as secret as it. One place makes both.

A stream of draws is keyed by what decides the results of an experiment or artifact (``Source.facts``), by what a client
has received, the digest of its data, the purpose, round, client, number of the call, and step. So two messages share
noise only if they are the same message, and none cancels.

seeded: anybody who knows these facts, the seed among them, can draw the noise again and subtract it. No epsilon is
earned; one can be stated *if the noise were secret*.
secret: the key has 256 bits of salt from the system besides, and the stream is a cipher's (ChaCha20). What else
examples draw in private steps is then seeded from it too (``Draws.seeds``).

Floats: uniform numbers have 53 bits; normal ones are made of them in float64 (Box and Muller 1958), four summed and
halved, against the attack that reads a value from the grid of floats its noise lies on (Holohan and Braghin 2021,
arXiv:2107.10138). It is a hardening: the proofs of privacy are for real numbers.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedcommons.flat_tensors import Payload
from fedcommons.flat_tensors import data as data_of
from fedcommons.seeding import wide_generator

Size = int | tuple[int, ...]


class Stream(Protocol):
    """A stream of draws, read on from call to call; numpy's ``Generator`` is one."""

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Draws of N(0, 1), of type ``dtype`` or better."""
        ...

    def random(self, size: Size) -> np.ndarray:
        """Draws of U[0, 1), float64."""
        ...


class CipherStream:
    """A stream of ChaCha20; key: 32 bytes, used for nothing else."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def _integers(self, n: int) -> np.ndarray:
        """n integers of 53 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * n)), "<u8") >> np.uint64(11)

    def random(self, size: Size) -> np.ndarray:
        """See ``Stream``."""
        return (self._integers(int(np.prod(size))) * 2.0**-53).reshape(size)

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """See ``Stream``; float64, whatever ``dtype`` is."""
        n = int(np.prod(size))
        of_radius, of_angle = self._integers(2 * n).reshape(2, n), self._integers(2 * n).reshape(2, n)
        radius, angle = np.sqrt(-2 * np.log((of_radius + 1.0) * 2.0**-53)), of_angle * (2 * np.pi * 2.0**-53)
        return ((radius * np.cos(angle) + radius * np.sin(angle)).sum(0) / 2).reshape(size)


@dataclass(frozen=True)
class Source:
    """What all noise of an experiment or an artifact is drawn from.

    facts: a hash of what decides its results. salt: 32 secret bytes; empty, and whoever knows the facts knows the
    noise.
    """

    facts: int = 0
    salt: bytes = field(default=b"", repr=False)

    def stream(self, *key: int | str) -> Stream:
        """The stream of this key."""
        if not self.salt:
            return wide_generator(self.facts, *key)
        return CipherStream(hashlib.blake2b(repr((self.facts, *key)).encode(), key=self.salt, digest_size=32).digest())


SEED_ALONE = Source()
"""For federations that are played in tests and dry runs."""


def of_audit(seed: int) -> Source:
    """Return a source with a salt that follows from the seed, so that an audit sees the stream of secret noise."""
    return Source(seed, hashlib.blake2b(f"salt of an audit {seed}".encode(), digest_size=32).digest())


@dataclass(frozen=True)
class Draws:
    """The streams of one call: of one private training, or of one noisy value."""

    source: Source
    key: tuple[int | str, ...] = ()
    given: set[tuple[int | str, ...]] = field(default_factory=set, repr=False, compare=False)

    def stream(self, *key: int | str) -> Stream:
        """The stream of one step, for one purpose.

        Raises:
            ValueError: it has been asked for before: what two values share cancels in their difference.
        """
        if key in self.given:
            raise ValueError(f"the stream {key} of this call has been drawn; read on in it, or call for noise again")
        self.given.add(key)
        return self.source.stream(*self.key, *key)

    def hiding(self, value: Tensor, *key: int | str) -> Stream:
        """The stream of the noise on this value, which whoever draws it again may compute otherwise.

        Where noise is secret, a value that differs in a bit has other noise: of two with the same, their difference
        would tell how. Seeded noise hides nothing, and stays the same whatever rounding does.
        """
        return self.stream(*key, *([_digest([value])] if self.source.salt else []))

    def seeds(self, n: int, step: int) -> list[int]:
        """n seeds of what a step draws besides, such as dropout, where noise is secret; none where it is seeded.

        For an example the seed is that of its number, in a batch or not: one of its place would tell who else is there.
        """
        if not self.source.salt:
            return []
        return (self.stream("other draws", step).random(n) * 2.0**53).astype(np.int64).tolist()


class Noise:
    """The noise of one client in one round, or of one artifact; it counts its calls.

    received: what the client's round depends on besides its data and the experiment: its message and its memory.
    """

    def __init__(self, source: Source, *key: int | str, received: Iterable[Payload] = ()) -> None:
        self.source, self.key, self.received, self.calls, self.is_closed = source, key, received, 0, False

    def close(self) -> None:
        """End the round: what a server's job would draw depended on what its worker did before."""
        self.is_closed = True

    def call(self, purpose: str, *data: Tensor) -> Draws:
        """Draws that no other call has; ``data``: columns of the examples that the noise is to hide.

        Raises:
            ValueError: the client's round is over.
        """
        if self.is_closed:
            raise ValueError("noise is drawn in a client's round alone, not in what the server runs on a worker")
        self.calls += 1
        of_received = [tensor for part in self.received for tensor in _tensors(part)]
        return Draws(self.source, (purpose, *self.key, self.calls, _digest([*of_received, *data])))


def _tensors(payload: Payload) -> list[Tensor]:
    return [data_of(payload[name]) for name in sorted(payload)]


def _digest(tensors: Iterable[Tensor]) -> str:
    """A hash of types, shapes and values."""
    told = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        told.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        told.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()
