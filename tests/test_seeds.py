"""Seeds: a hash of the key and of nothing else."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fedcommons.seeds import (
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
    drawn = torch.randint(2**31, (2,), generator=generator(0, "order", 1, 2))
    assert drawn.tolist() == [1650811670, 1130353740]
    assert numpy_generator(0, "participants", 1).integers(2**31, size=2).tolist() == [1199699932, 1167105709]
    set_default_generator(3, "initial weights")
    assert torch.randint(2**31, (2,)).tolist() == [1851717105, 2085676073]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "order", 3, 7), (1, "order", 3, 7)),
        ((0, "order", 3, 7), (0, "batches", 3, 7)),
        ((0, "order", 3, 7), (0, "order", 4, 7)),
        ((0, "order", 3, 7), (0, "order", 3, 8)),
        ((0, "order", 3, 7), (0, "order", 3)),
        ((0, "order", 3, 7), (0, "order", 37)),
        ((1, 2), ("1", 2)),  # a number and its spelling
    ],
)
def test_another_key_has_another_seed(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert seed_for(*one) != seed_for(*other)
    assert wide_key(*one) != wide_key(*other)


def test_seeds_of_many_keys_differ_and_fit_in_63_bits() -> None:
    seeds = [seed_for(run, "order", number, client) for run in range(3) for number in range(30) for client in range(30)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sum(seed >= 2**62 for seed in seeds) > len(seeds) / 3  # all 63 bits are used


def test_torch_on_a_cpu_reads_32_bits_of_a_seed_and_a_wide_generator_all_of_its_key() -> None:
    """What makes ``wide_generator`` necessary; where this fails it may not be any more."""
    s = seed_for(0, "noise")
    a, b = (torch.Generator().manual_seed(seed) for seed in (s, (s + 2**32) % 2**63))
    assert torch.equal(torch.rand(5, generator=a), torch.rand(5, generator=b))
    key = wide_key(0, "noise")
    first = wide_generator(0, "noise").bit_generator.random_raw()
    of_each_bit = [np.random.Philox(key=key ^ (1 << bit)).random_raw() for bit in range(128)]
    assert first == np.random.Philox(key=key).random_raw()
    assert len({first, *of_each_bit}) == 129


def test_wide_keys_of_rounds_and_clients_are_distinct_and_fill_128_bits() -> None:
    keys = {wide_key(0, client, "dp noise", round) for round in range(30) for client in range(200)}
    assert len(keys) == 6000
    assert min(keys) < 2**118
    assert 2**128 - 2**118 < max(keys) < 2**128


@pytest.mark.parametrize("make", [generator, numpy_generator, wide_generator])
def test_generators_of_one_key_draw_the_same_numbers_and_of_another_others(make: object) -> None:
    def draw(number: int) -> list[float]:
        of = make(0, "noise", number)  # pyright: ignore[reportCallIssue]
        return torch.rand(5, generator=of).tolist() if isinstance(of, torch.Generator) else of.random(5).tolist()

    torch.manual_seed(1)
    first = draw(1)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)  # making one has drawn nothing from the process's own
    assert draw(1) == first != draw(2)


def test_the_default_generator_is_keyed_for_initial_weights_and_dropout() -> None:
    def drawn(*key: int | str) -> list[torch.Tensor]:
        set_default_generator(*key)
        return [nn.Linear(4, 3).weight.detach(), nn.Dropout(0.5)(torch.ones(64))]

    for a, b, other in zip(drawn(0, "weights"), drawn(0, "weights"), drawn(1, "weights"), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, other)


def test_global_generators_are_keyed_inside_and_as_before_afterwards() -> None:
    def drawn(*key: int | str) -> tuple[float, float, float]:
        before = global_states()
        with keyed_globals(*key):
            found = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
            assert global_states() != before
        assert global_states() == before
        return found

    first = drawn(0, "a")
    random.random()
    np.random.rand()  # noqa: NPY002
    torch.rand(1)
    assert drawn(0, "a") == first
    assert all(a != b for a, b in zip(first, drawn(1, "a"), strict=True))
