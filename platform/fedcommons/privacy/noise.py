"""Random streams for the noise of differential privacy and for Poisson batches. Both must stay secret.

The key of a stream contains a hash of the configuration that decides the results of an experiment or of a set of
synthetic images (``Source.facts``). It also contains a hash of the data that a client has received and of the client's
examples. The other elements of the key are purpose, round, client, number of the call, and step. So two messages share
noise only if they are equal, and no noise cancels in a difference of two messages.

The option ``dp.noise`` has two values:

seeded   the stream follows from the key. An attacker who knows the configuration, including the seed, can draw the
         noise again and subtract it. So there is no guarantee: an epsilon holds only *if the noise were secret*.
secret   the key also contains 256 secret random bits (the salt), and the stream is the output of the cipher ChaCha20.
         Other random numbers in private steps, such as dropout masks, are seeded by the salt too (``Draws.seeds``).

Uniform numbers have 53 random bits. A normal number is half of the sum of four normal numbers that are computed in
float64 from uniform numbers (Box and Muller 1958). The sum counters an attack that finds the value under the noise from
the gaps between possible floats (Holohan and Braghin 2021, arXiv:2107.10138). The proofs of differential privacy hold
for real numbers only, so the sum is a precaution and no proof.
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
    """A stream of random numbers: each call returns the next numbers. numpy's ``Generator`` satisfies this protocol."""

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Draw numbers from N(0, 1) in an array of shape ``size``, of type ``dtype`` or a more precise type."""
        ...

    def random(self, size: Size) -> np.ndarray:
        """Draw uniform numbers from [0, 1) in a float64 array of shape ``size``."""
        ...


class CipherStream:
    """A stream of random numbers from the cipher ChaCha20. key: 32 secret bytes that no other stream uses."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def _integers(self, n: int) -> np.ndarray:
        """Return the next n random integers in [0, 2^53)."""
        return np.frombuffer(self._stream.update(bytes(8 * n)), "<u8") >> np.uint64(11)

    def random(self, size: Size) -> np.ndarray:
        """Draw uniform numbers from [0, 1), in float64; see ``Stream``."""
        return (self._integers(int(np.prod(size))) * 2.0**-53).reshape(size)

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Draw from N(0, 1), always in float64, whatever ``dtype`` is; see ``Stream``."""
        n = int(np.prod(size))
        of_radius, of_angle = self._integers(2 * n).reshape(2, n), self._integers(2 * n).reshape(2, n)
        radius, angle = np.sqrt(-2 * np.log((of_radius + 1.0) * 2.0**-53)), of_angle * (2 * np.pi * 2.0**-53)
        return ((radius * np.cos(angle) + radius * np.sin(angle)).sum(0) / 2).reshape(size)


@dataclass(frozen=True)
class Source:
    """The source of all noise of an experiment or of a stored set of synthetic images.

    facts: a hash of the configuration that decides the results. salt: 32 secret bytes; if empty, anyone who knows
    ``facts`` can compute the noise.
    """

    facts: int = 0
    salt: bytes = field(default=b"", repr=False)

    def stream(self, *key: int | str) -> Stream:
        """Return the random stream of this key: the cipher ChaCha20 if there is a salt, else a seeded generator."""
        if not self.salt:
            return wide_generator(self.facts, *key)
        return CipherStream(hashlib.blake2b(repr((self.facts, *key)).encode(), key=self.salt, digest_size=32).digest())


SEED_ALONE = Source()
"""The noise source of tests and dry runs: it has no salt, and ``facts`` is 0 instead of a hash."""


def of_audit(seed: int) -> Source:
    """Return a source of secret noise for audits. The salt follows from the seed, so an audit can be repeated."""
    return Source(seed, hashlib.blake2b(f"salt of an audit {seed}".encode(), digest_size=32).digest())


@dataclass(frozen=True)
class Draws:
    """A factory of random streams for one private training or one noisy value; it returns each stream only once."""

    source: Source
    key: tuple[int | str, ...] = ()
    streams: set[tuple[int | str, ...]] = field(default_factory=set, repr=False, compare=False)

    def stream(self, *key: int | str) -> Stream:
        """Return the random stream with this key, such as ("noise", step). Each stream can be requested once.

        Raises:
            ValueError: the stream was requested before. Two values with equal noise would disclose their difference.
        """
        if key in self.streams:
            raise ValueError(
                f"the stream {key} of this call has been drawn before; continue that stream, or use Noise.call again"
            )
        self.streams.add(key)
        return self.source.stream(*self.key, *key)

    def stream_for(self, value: Tensor, *key: int | str) -> Stream:
        """Return the random stream for the noise on ``value``; with secret noise, the stream depends on ``value``.

        A repeated run may round the value differently. If both values had equal noise, their difference would be
        disclosed. So the key of secret noise contains a hash of the value. Seeded noise does not depend on the value.
        """
        return self.stream(*key, *([_digest([value])] if self.source.salt else []))

    def seeds(self, n: int, step: int) -> list[int]:
        """Return n seeds for the step's random numbers other than noise, such as dropout masks.

        If the noise is seeded, the list is empty. If n is the number of examples, seed j belongs to example j of the
        data set, not to position j of a batch. So no example's random numbers depend on the other examples of a batch.
        """
        if not self.source.salt:
            return []
        return (self.stream("other draws", step).random(n) * 2.0**53).astype(np.int64).tolist()


class Noise:
    """The noise of one client in one round, or of one stored set of synthetic images.

    received: the message and the memory that the client has at the start of the round. calls: how often ``call`` ran.
    """

    def __init__(self, source: Source, *key: int | str, received: Iterable[Payload] = ()) -> None:
        self.source, self.key, self.received, self.calls, self.is_closed = source, key, received, 0, False

    def close(self) -> None:
        """End the client's round: later calls, such as those of server jobs on this worker, raise an error."""
        self.is_closed = True

    def call(self, purpose: str, *data: Tensor) -> Draws:
        """Return streams that differ from those of all other calls.

        purpose: name of the noise's use, a part of the streams' key. data: columns of the protected examples.

        Raises:
            ValueError: the client's round is over.
        """
        if self.is_closed:
            raise ValueError("noise is drawn only in a client's round, not in jobs that the server runs on a worker")
        self.calls += 1
        of_received = [data_of(part[name]) for part in self.received for name in sorted(part)]
        return Draws(self.source, (purpose, *self.key, self.calls, _digest([*of_received, *data])))


def _digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash, 32 hexadecimal digits, of the types, shapes and values of the tensors."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
