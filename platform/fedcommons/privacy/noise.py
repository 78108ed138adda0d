"""Random streams for the noise of every ``Release`` and for Poisson batches, which must stay as secret as the noise.

The key of a stream contains a hash of the facts that decide the results of an experiment or artifact
(``Source.facts``). It also contains a hash of the data that a client has received and of its examples. The other
elements are purpose, round, client, number of the call, and step. So two messages share noise only if they are the same
message, and no noise cancels in a difference.

seeded: an attacker who knows these facts, including the seed, can draw the noise again and subtract it. No epsilon is
guaranteed; an epsilon can be stated only *if the noise were secret*.
secret: the key has in addition 256 bits of salt from the system, and the stream comes from a cipher (ChaCha20). The
other random draws of examples in private steps, such as dropout, are then seeded from it too (``Draws.seeds``).

Floats: uniform numbers have 53 bits. Normal numbers are computed from uniform numbers in float64 (Box and Muller 1958):
four are summed and halved. This counters an attack that reads a value from the grid of floats on which its noise lies
(Holohan and Braghin 2021, arXiv:2107.10138). It only hardens the noise: the proofs of privacy are for real numbers.
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
    """A stream of random numbers, which each call continues; numpy's ``Generator`` satisfies this protocol."""

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Draw from N(0, 1), in type ``dtype`` or a more precise type."""
        ...

    def random(self, size: Size) -> np.ndarray:
        """Draw from U[0, 1), in float64."""
        ...


class CipherStream:
    """A stream from the cipher ChaCha20; key: 32 bytes, used for this stream only."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def _integers(self, n: int) -> np.ndarray:
        """Return n integers of 53 bits."""
        return np.frombuffer(self._stream.update(bytes(8 * n)), "<u8") >> np.uint64(11)

    def random(self, size: Size) -> np.ndarray:
        """See ``Stream``."""
        return (self._integers(int(np.prod(size))) * 2.0**-53).reshape(size)

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """See ``Stream``; always float64, for every ``dtype``."""
        n = int(np.prod(size))
        of_radius, of_angle = self._integers(2 * n).reshape(2, n), self._integers(2 * n).reshape(2, n)
        radius, angle = np.sqrt(-2 * np.log((of_radius + 1.0) * 2.0**-53)), of_angle * (2 * np.pi * 2.0**-53)
        return ((radius * np.cos(angle) + radius * np.sin(angle)).sum(0) / 2).reshape(size)


@dataclass(frozen=True)
class Source:
    """The source of all noise of an experiment or an artifact.

    facts: a hash of the facts that decide its results. salt: 32 secret bytes; if empty, the noise follows from the
    facts.
    """

    facts: int = 0
    salt: bytes = field(default=b"", repr=False)

    def stream(self, *key: int | str) -> Stream:
        """Return the stream of this key."""
        if not self.salt:
            return wide_generator(self.facts, *key)
        return CipherStream(hashlib.blake2b(repr((self.facts, *key)).encode(), key=self.salt, digest_size=32).digest())


SEED_ALONE = Source()
"""The source for federations that run in tests and dry runs."""


def of_audit(seed: int) -> Source:
    """Return a source whose salt follows from the seed, so that an audit tests the same cipher as secret noise."""
    return Source(seed, hashlib.blake2b(f"salt of an audit {seed}".encode(), digest_size=32).digest())


@dataclass(frozen=True)
class Draws:
    """The streams of one call of ``Noise.call``, for one private training or one noisy value."""

    source: Source
    key: tuple[int | str, ...] = ()
    streams: set[tuple[int | str, ...]] = field(default_factory=set, repr=False, compare=False)

    def stream(self, *key: int | str) -> Stream:
        """Return the stream of one step, for one purpose.

        Raises:
            ValueError: the stream was requested before: noise that two values share cancels in their difference.
        """
        if key in self.streams:
            raise ValueError(f"the stream {key} of this call has been drawn; read on in it, or call for noise again")
        self.streams.add(key)
        return self.source.stream(*self.key, *key)

    def stream_for(self, value: Tensor, *key: int | str) -> Stream:
        """Return the stream of the noise on ``value``, which another run may compute with different rounding.

        With secret noise, a value that differs in one bit gets different noise. If two values had the same noise, their
        difference would disclose how they differ. Seeded noise hides nothing, and does not depend on rounding.
        """
        return self.stream(*key, *([_digest([value])] if self.source.salt else []))

    def seeds(self, n: int, step: int) -> list[int]:
        """Return n seeds for a step's other random draws, such as dropout; an empty list if the noise is seeded.

        An example's seed belongs to its index in the data set. A seed by position in the batch would disclose which
        other examples are in the batch.
        """
        if not self.source.salt:
            return []
        return (self.stream("other draws", step).random(n) * 2.0**53).astype(np.int64).tolist()


class Noise:
    """The noise of one client in one round, or of one artifact; it counts its calls.

    received: the client's message and memory, on which its round depends besides its data and the experiment.
    """

    def __init__(self, source: Source, *key: int | str, received: Iterable[Payload] = ()) -> None:
        self.source, self.key, self.received, self.calls, self.is_closed = source, key, received, 0, False

    def close(self) -> None:
        """End the client's round: noise in a later server job would depend on the earlier jobs of its worker."""
        self.is_closed = True

    def call(self, purpose: str, *data: Tensor) -> Draws:
        """Return draws that differ from those of all other calls; ``data``: columns of the examples to be protected.

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
    """Return a hash of types, shapes and values of the tensors."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
