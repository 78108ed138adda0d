"""Every random draw takes a key: run seed, purpose, round, client, ...

A seed is a hash of its key, so a new client, another executor or one more draw does not change any other draws.

Of the 63 bits of a seed torch's CPU generator uses the low 32; torch's GPU generator and numpy's use all. So two keys
may share a stream on a CPU. Draws that must differ for all keys and be hard to guess come from ``wide_generator``.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # it takes seconds to import
    import torch


def seed_for(*key: int | str) -> int:
    """A 63-bit seed for this key, e.g. ``seed_for(run, "order", round, client)``; the same on every machine."""
    return _hash(key, 8) >> 1


def wide_key(*key: int | str) -> int:
    """128 bits for this key, with which ``wide_generator`` is seeded."""
    return _hash(key, 16)


def _hash(key: tuple[int | str, ...], size: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def generator(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A torch generator for this key: one of 2^32 streams on a CPU. A GPU's generator draws other numbers."""
    import torch

    return torch.Generator(device).manual_seed(seed_for(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """A numpy generator for this key: one of 2^63 streams."""
    return np.random.default_rng(seed_for(*key))


def wide_generator(*key: int | str) -> np.random.Generator:
    """A numpy generator for this key: one of 2^128 streams, for draws that hide something.

    Philox takes the 128 bits as they are. It is no cipher: whoever knows the key, or much of a stream, can predict it.
    """
    return np.random.Generator(np.random.Philox(key=wide_key(*key)))


def set_default_generator(*key: int | str) -> None:
    """Seed torch's default generators; dropout and initialisation draw from these and take no other."""
    import torch

    seed = seed_for(*key)
    torch.default_generator.manual_seed(seed)  # cheaper than torch.manual_seed, which visits every backend
    if torch.cuda.is_initialized():  # not is_available: that looks for a driver each time
        torch.cuda.manual_seed_all(seed)


def global_states() -> tuple[Any, ...]:
    """Return the states of Python's, numpy's and torch's global random generators, to be compared."""
    import torch

    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (it is the one that others use)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def keyed_globals(*key: int | str) -> Iterator[None]:
    """Seed what code draws from that takes no generator: torch's defaults, numpy's global and Python's ``random``.

    Afterwards they are as they were.
    """
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(devices=gpus), keyed_besides_torch(*key):
        set_default_generator(*key, "torch")
        yield


@contextmanager
def keyed_besides_torch(*key: int | str) -> Iterator[None]:
    """Seed numpy's global generator and Python's ``random``; afterwards they are as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (it is the one that others use)
    try:
        random.seed(seed_for(*key, "python"))
        np.random.seed(seed_for(*key, "numpy") % 2**32)  # noqa: NPY002
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
