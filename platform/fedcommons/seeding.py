"""Seeds and random generators. Every use of random numbers has a key, such as (run seed, purpose, round, client).

A seed is a hash of the key. So random numbers for one key do not change if a client is added, another executor is used,
or more random numbers are drawn for another key.

A seed has 63 bits. torch's CPU generator uses only the low 32 bits, so two keys may have the same random stream on a
CPU. torch's GPU generator and numpy's generator use all bits. Random numbers that must differ for all keys and be hard
to guess come from ``wide_generator``.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import
    import torch


def seed_for(*key: int | str) -> int:
    """Return a 63-bit seed for a key, equal on every machine, e.g. ``seed_for(run, "order", round, client)``.

    Args:
        key: integers and strings that identify the use of the seed; their order and types matter.
    """
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def wide_key(*key: int | str) -> int:
    """Return the 128-bit seed of ``wide_generator`` for a key."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=16).digest(), "little")


def generator(*key: int | str, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """Return a torch generator for a key: one of 2^32 random streams on a CPU. A GPU generator has other streams.

    Args:
        key: integers and strings that identify the use of the random numbers (see ``seed_for``).
        device: device of the generator, on which it draws; default: the CPU.
    """
    import torch

    return torch.Generator(device).manual_seed(seed_for(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """Return a numpy generator for a key: one of 2^63 random streams.

    Args:
        key: integers and strings that identify the use of the random numbers (see ``seed_for``).
    """
    return np.random.default_rng(seed_for(*key))


def wide_generator(*key: int | str) -> np.random.Generator:
    """Return a numpy generator for a key: one of 2^128 random streams, for random numbers that protect data.

    The generator Philox uses the 128 bits of the seed unchanged. Philox is not a cipher: an attacker who knows the
    seed, or a long piece of the stream, can predict the stream.
    """
    return np.random.Generator(np.random.Philox(key=wide_key(*key)))


def set_default_generator(*key: int | str) -> None:
    """Seed torch's default generators, because dropout and weight initialisation can use no other generators."""
    import torch

    seed = seed_for(*key)
    torch.default_generator.manual_seed(seed)  # cheaper than torch.manual_seed, which visits every backend
    if torch.cuda.is_initialized():  # not is_available, which searches for a GPU driver in every call
        torch.cuda.manual_seed_all(seed)


def global_states() -> tuple[Any, ...]:
    """Return the states of Python's, numpy's and torch's global random generators, in a form that == can compare."""
    import torch

    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (other libraries use this generator)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes()


@contextmanager
def keyed_globals(*key: int | str) -> Iterator[None]:
    """Context that seeds the global generators of torch, numpy and Python, for code that accepts no generator.

    The states of all these generators are restored afterwards.
    """
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with torch.random.fork_rng(devices=gpus), keyed_besides_torch(*key):
        set_default_generator(*key, "torch")
        yield


@contextmanager
def keyed_besides_torch(*key: int | str) -> Iterator[None]:
    """Context that seeds the global generators of numpy and Python and restores both states afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (other libraries use this generator)
    try:
        random.seed(seed_for(*key, "python"))
        np.random.seed(seed_for(*key, "numpy") % 2**32)  # noqa: NPY002
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
