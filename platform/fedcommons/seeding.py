"""Seeds and random generators. Every random draw has a key: run seed, purpose, round, client, ...

A seed is a hash of its key, so a new client, another executor or one more draw changes no other draw.

A seed has 63 bits. torch's CPU generator uses the low 32 bits, so two keys may share a stream on a CPU. torch's GPU
generator and numpy's generator use all bits. Draws that must differ for all keys and be hard to guess come from
``wide_generator``.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import
    import torch


def seed_for(*key: int | str) -> int:
    """Return a 63-bit seed for a key, e.g. ``seed_for(run, "order", round, client)``; the same on every machine."""
    return _hash(key, 8) >> 1


def wide_key(*key: int | str) -> int:
    """Return 128 bits for a key, the seed of ``wide_generator``."""
    return _hash(key, 16)


def _hash(key: tuple[int | str, ...], size: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def generator(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Return a torch generator for a key: one of 2^32 streams on a CPU. A GPU's generator draws other numbers."""
    import torch

    return torch.Generator(device).manual_seed(seed_for(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """Return a numpy generator for a key: one of 2^63 streams."""
    return np.random.default_rng(seed_for(*key))


def wide_generator(*key: int | str) -> np.random.Generator:
    """Return a numpy generator for a key: one of 2^128 streams, for draws that protect data.

    Philox uses the 128 bits unchanged. Philox is no cipher: an attacker with the key, or with much of a stream, can
    predict the stream.
    """
    return np.random.Generator(np.random.Philox(key=wide_key(*key)))


def set_default_generator(*key: int | str) -> None:
    """Seed torch's default generators; dropout and initialisation can draw from no other generator."""
    import torch

    seed = seed_for(*key)
    torch.default_generator.manual_seed(seed)  # cheaper than torch.manual_seed, which visits every backend
    if torch.cuda.is_initialized():  # is_available would look for a driver each time
        torch.cuda.manual_seed_all(seed)


def global_states() -> tuple[Any, ...]:
    """Return the states of Python's, numpy's and torch's global random generators in a comparable form."""
    import torch

    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (other libraries use this generator)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def keyed_globals(*key: int | str) -> Iterator[None]:
    """Seed the global generators, for code that accepts no generator: torch's, numpy's and Python's ``random``.

    All states are restored afterwards.
    """
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(devices=gpus), keyed_besides_torch(*key):
        set_default_generator(*key, "torch")
        yield


@contextmanager
def keyed_besides_torch(*key: int | str) -> Iterator[None]:
    """Seed numpy's global generator and Python's ``random``; restore their states afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (other libraries use this generator)
    try:
        random.seed(seed_for(*key, "python"))
        np.random.seed(seed_for(*key, "numpy") % 2**32)  # noqa: NPY002
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
