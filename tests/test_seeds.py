"""Seeds: a hash of the key and of nothing else."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedcommons.seeds import generator, numpy_generator, seed_for, set_default_generator, wide_generator, wide_key

KEYS = [(0, "order", 1, 2), (3, "initial weights"), ("validation split", "digits")]

# torch is what takes seconds to import, and a seed needs none of it.
_FRESH = """
import json, sys
from unittest.mock import MagicMock
sys.modules["torch"] = MagicMock()
from fedcommons.seeds import seed_for
print(json.dumps([seed_for(*key) for key in json.loads(sys.argv[1])]))
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_key_has_the_same_seed_in_a_fresh_process(hash_seed: str) -> None:
    # Python's own hash of a string differs between processes: the trap for a seed made with hash().
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, json.dumps(KEYS)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert json.loads(done.stdout) == [seed_for(*key) for key in KEYS]


@pytest.mark.parametrize(
    "other",
    [
        (1, "order", 3, 7),
        (0, "batches", 3, 7),
        (0, "order", 4, 7),
        (0, "order", 3, 8),
        (0, "order", 3),
        (0, "order", 37),
    ],
    ids=["run", "purpose", "round", "client", "shorter", "run together"],
)
def test_another_key_has_another_seed(other: tuple[int | str, ...]) -> None:
    assert seed_for(*other) != seed_for(0, "order", 3, 7)


def test_a_number_and_its_spelling_are_two_keys() -> None:
    assert seed_for(1, 2) != seed_for("1", 2)


def test_seeds_of_many_keys_differ_and_fit_in_63_bits() -> None:
    seeds = [seed_for(run, "order", number, client) for run in range(3) for number in range(30) for client in range(30)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sum(seed >= 2**62 for seed in seeds) > len(seeds) / 3  # all 63 bits are used


def test_draws_are_those_of_the_committed_results() -> None:
    """Drawn with the code of commit ebba669 (torch 2.15.0, numpy 2), on which the committed results rest."""
    assert seed_for(0, "client", 1, 2) == 6594582887402449827
    drawn = torch.randint(2**31, (2,), generator=generator(0, "order", 1, 2))
    assert drawn.tolist() == [1650811670, 1130353740]
    assert numpy_generator(0, "participants", 1).integers(2**31, size=2).tolist() == [1199699932, 1167105709]
    set_default_generator(3, "initial weights")
    assert torch.randint(2**31, (2,)).tolist() == [1851717105, 2085676073]


def test_torch_on_a_cpu_knows_32_bits_of_a_seed() -> None:
    """What makes ``wide_generator`` necessary; where this fails it may not be any more."""
    s = seed_for(0, "noise")
    a, b = (torch.Generator().manual_seed(seed) for seed in (s, (s + 2**32) % 2**63))
    assert torch.equal(torch.rand(5, generator=a), torch.rand(5, generator=b))


@pytest.mark.parametrize("purpose", ["dp noise", "dp batch"])
@pytest.mark.long
def test_wide_keys_of_three_hundred_rounds_of_a_thousand_clients_are_distinct(purpose: str) -> None:
    keys = {wide_key(0, client, purpose, round) for round in range(300) for client in range(1000)}
    assert len(keys) == 300_000
    assert min(keys) < 2**120
    assert max(keys) > 2**128 - 2**120  # they fill 128 bits


def test_a_wide_generator_takes_every_bit_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed plus 2^32, and every other single bit: another stream."""

    def first(key: int) -> int:
        monkeypatch.setattr("fedcommons.seeds.wide_key", lambda *_: key)
        return wide_generator("any").bit_generator.random_raw()

    key = wide_key(0, "noise")
    assert len({first(key), first((key + 2**32) % 2**128), *(first(key ^ 1 << bit) for bit in range(128))}) >= 129


def test_generators_of_one_key_draw_the_same_numbers_and_of_another_others() -> None:
    a, b, other = (torch.rand(5, generator=generator(0, "noise", r)) for r in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    c, d, another = (numpy_generator(0, "noise", r).random(5) for r in (1, 1, 2))
    assert np.array_equal(c, d)
    assert not np.array_equal(c, another)
    e, f, third = (wide_generator(0, "noise", r).random(5) for r in (1, 1, 2))
    assert np.array_equal(e, f)
    assert not np.array_equal(e, third)


def test_keyed_generators_neither_see_nor_move_the_process_wide_ones() -> None:
    torch.manual_seed(1)
    first = generator(0, "noise").initial_seed(), numpy_generator(0, "noise").random()
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)  # making them has drawn nothing
    assert (generator(0, "noise").initial_seed(), numpy_generator(0, "noise").random()) == first


def test_the_default_generator_is_keyed_for_initial_weights() -> None:
    def weights(*key: int | str) -> torch.Tensor:
        set_default_generator(*key)
        return nn.Linear(4, 3).weight.detach()

    assert torch.equal(weights(0, "initial weights"), weights(0, "initial weights"))
    assert not torch.equal(weights(0, "initial weights"), weights(1, "initial weights"))


def test_the_default_generator_is_keyed_for_dropout() -> None:
    dropout, x = nn.Dropout(0.5), torch.ones(64)

    def dropped(*key: int | str) -> torch.Tensor:
        set_default_generator(*key)
        return dropout(x)

    assert torch.equal(dropped(0, "dropout", 1, 2), dropped(0, "dropout", 1, 2))
    assert not torch.equal(dropped(0, "dropout", 1, 2), dropped(0, "dropout", 1, 3))
