"""Every random draw takes a key: run seed, purpose, round, client, ...

A seed is a hash of its key, so a new client, another executor or one draw more never changes anybody else's numbers.
How much of the seed counts is up to the generator: torch's takes the low 32 of its 63 bits on a CPU, all on a GPU, and
numpy's all. Two keys may therefore share a stream on a CPU; where none may, and none may be guessed, the draws come
from ``wide_generator``.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it takes seconds to import
    import torch


def seed_for(*key: int | str) -> int:
    """A 63-bit seed for this key, e.g. ``seed_for(run, "order", round, client)``; the same on every machine."""
    return _hash(key, 8) >> 1


def wide_key(*key: int | str) -> int:
    """128 bits for this key: what ``wide_generator`` is seeded with."""
    return _hash(key, 16)


def _hash(key: tuple[int | str, ...], size: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def generator(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A torch generator for this key, which on a CPU knows 2^32 streams; one on a GPU draws other numbers."""
    import torch

    return torch.Generator(device).manual_seed(seed_for(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """A numpy generator for this key, of 2^63 streams."""
    return np.random.default_rng(seed_for(*key))


def wide_generator(*key: int | str) -> np.random.Generator:
    """A numpy generator for this key, of 2^128 streams: for draws that hide something.

    Philox takes the 128 bits as they are. It is no cipher: who knows the key, or much of a stream, is not kept out.
    """
    return np.random.Generator(np.random.Philox(key=wide_key(*key)))


def set_default_generator(*key: int | str) -> None:
    """Key torch's default generators, which dropout and initialisation draw from and cannot be handed another."""
    import torch

    seed = seed_for(*key)
    torch.default_generator.manual_seed(seed)  # cheaper than torch.manual_seed, which visits every backend
    if torch.cuda.is_initialized():  # not is_available: that looks for a driver each time
        torch.cuda.manual_seed_all(seed)
