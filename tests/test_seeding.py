"""Seeds: a hash of the key and of nothing else."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fedcommons.seeding import (
    generator,
    global_states,
    keyed_globals,
    numpy_generator,
    seed_for,
    set_default_generator,
    wide_generator,
    wide_key,
)


def test_draws_are_those_of_the_committed_results() -> None:
    """Drawn with the code of commit ebba669 (torch 2.15.0, numpy 2), on which the committed results rest.

    So a key has the same seed in every process, as Python's own hash of a string has not.
    """
    assert seed_for(0, "client", 1, 2) == 6594582887402449827
    assert torch.randint(2**31, (2,), generator=generator(0, "order", 1, 2)).tolist() == [1650811670, 1130353740]
    assert numpy_generator(0, "participants", 1).integers(2**31, size=2).tolist() == [1199699932, 1167105709]
    set_default_generator(3, "initial weights")
    assert torch.randint(2**31, (2,)).tolist() == [1851717105, 2085676073]


def test_another_key_has_another_seed_which_fits_in_63_bits() -> None:
    assert seed_for(1, 2) != seed_for("1", 2)  # a number and its spelling
    assert wide_key(1, 2) != wide_key("1", 2)
    keys = [(run, what, a, b) for run in range(3) for what in ("order", "noise") for a in range(30) for b in range(30)]
    seeds = [seed_for(*key) for key in [*keys, (0, "order", 3), (0, "order", 37)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sum(seed >= 2**62 for seed in seeds) > len(seeds) / 3  # all 63 bits are used
    wide = {wide_key(0, client, "dp noise", round) for round in range(30) for client in range(200)}
    assert len(wide) == 6000
    assert (
        np.random.Philox(key=wide_key(0, "noise")).random_raw() == wide_generator(0, "noise").bit_generator.random_raw()
    )
    assert min(wide) < 2**118
    assert 2**128 - 2**118 < max(wide) < 2**128


@pytest.mark.parametrize("make", [generator, numpy_generator, wide_generator])
def test_generators_of_one_key_draw_the_same_numbers_and_of_another_others(make: object) -> None:
    def draw(number: int) -> list[float]:
        rng = make(0, "noise", number)  # pyright: ignore[reportCallIssue]
        return torch.rand(5, generator=rng).tolist() if isinstance(rng, torch.Generator) else rng.random(5).tolist()

    torch.manual_seed(1)
    first = draw(1)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)  # making one has drawn nothing from the process's own
    assert draw(1) == first != draw(2)


def test_global_generators_are_keyed_inside_and_as_before_afterwards() -> None:
    def draw(*key: int | str) -> tuple[float, float, float, float]:
        set_default_generator(*key)
        weight = float(nn.Linear(4, 3).weight.detach()[0, 0])
        before = global_states()
        with keyed_globals(*key):
            values = random.random(), float(np.random.rand()), float(torch.rand(())), weight  # noqa: NPY002
            assert global_states() != before
        assert global_states() == before
        return values

    first = draw(0, "a")
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    assert draw(0, "a") == first
    assert all(a != b for a, b in zip(first, draw(1, "a"), strict=True))
