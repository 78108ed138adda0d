"""Every random draw takes a key: run seed, purpose, round, client, ...

A seed is a hash of its key, so a new client, another executor or one draw more never changes anybody else's numbers.
"""

import hashlib

import numpy as np
import torch


def seed_for(*key: int | str) -> int:
    """A 63-bit seed for this key, e.g. ``seed_for(run, "order", round, client)``; the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for this key; one on a GPU draws other numbers than one on the CPU."""
    return torch.Generator(device).manual_seed(seed_for(*key))


def numpy_generator(*key: int | str) -> np.random.Generator:
    """A numpy generator for this key."""
    return np.random.default_rng(seed_for(*key))


def set_default_generator(*key: int | str) -> None:
    """Key torch's default generators, which dropout and initialisation draw from and cannot be handed another."""
    seed = seed_for(*key)
    torch.default_generator.manual_seed(seed)  # cheaper than torch.manual_seed, which visits every backend
    if torch.cuda.is_initialized():  # not is_available: that looks for a driver each time
        torch.cuda.manual_seed_all(seed)
