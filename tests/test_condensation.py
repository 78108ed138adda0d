"""Random networks that all can draw again, and sums of their features that an image moves by one at most."""

import pytest
import torch

from fedcommons.data.examples import Examples
from fedcommons.generators.condensation import Networks, clipped, pixels, sums
from fedcommons.seeds import generator

SHAPE = (1, 8, 8)


def some(n: int, seed: int = 0) -> Examples:
    draws = generator(seed, "images of the test")
    x = torch.randint(256, (n, *SHAPE), generator=draws, dtype=torch.uint8)
    return Examples(x, torch.randint(10, (n,), generator=draws))


@pytest.mark.parametrize("augment", ["none", "all"])
def test_an_image_adds_a_vector_of_at_most_norm_one_to_its_class_alone_and_a_blank_one_nothing(augment: str) -> None:
    examples, phi = some(20), Networks(SHAPE, 10, 8, 1, augment, True, 5).at(0)
    whole = sums(phi, examples, 10)
    for i in range(20):
        x = examples.x.float()
        x[i] = torch.nan
        moved = whole - sums(phi, Examples(x, examples.y), 10)
        assert 0.5 < moved.norm() <= 1 + 1e-5
        assert moved[examples.y[i]].norm() == pytest.approx(moved.norm().item(), abs=1e-5)
        loud = examples.x.float()
        loud[i] *= 1e6
        assert (sums(phi, Examples(loud, examples.y), 10) - sums(phi, Examples(x, examples.y), 10)).norm() <= 1 + 1e-5


def test_only_features_that_are_too_long_are_cut() -> None:
    features = torch.tensor([[0.3, 0.4], [3.0, 4.0], [torch.inf, 0.0], [torch.nan, 1.0]])
    assert torch.allclose(clipped(features), torch.tensor([[0.3, 0.4], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0]]))


def test_sums_of_many_images_are_the_sums_of_their_parts_and_of_none_are_zero() -> None:
    """Also across the blocks in which features are computed."""
    phi, examples = Networks(SHAPE, 10, 8, None, "none", False, 0).at(0), some(600)
    whole, parts = sums(phi, examples, 10), [sums(phi, examples[slice(i, i + 70)], 10) for i in range(0, 600, 70)]
    assert torch.allclose(whole, torch.stack(parts).sum(0), rtol=0, atol=1e-4)
    assert torch.equal(sums(phi, examples[slice(0, 0)], 10), torch.zeros_like(whole))


def test_every_step_has_a_network_of_its_own_which_all_can_draw_again() -> None:
    x, y = pixels(some(5).x), torch.arange(5)
    networks, others = (Networks(SHAPE, 10, 8, None, "none", False, seed) for seed in (0, 1))
    first = networks.at(0)(x, y)
    assert torch.equal(networks.at(0)(x, y), first)
    for other in (networks.at(1), others.at(0)):
        assert (other(x, y) - first).norm() > 0.1


def test_real_and_fitted_images_of_a_class_go_through_the_same_augmentation() -> None:
    """So two copies of an image have the same features, and a copy of another class has others."""
    phi = Networks(SHAPE, 10, 8, 1, "all", False, 0).at(0)
    x = pixels(some(1).x).expand(3, -1, -1, -1)
    one, same, other = phi(x, torch.tensor([3, 3, 4]))
    assert torch.equal(one, same)
    assert (one - other).norm() > 0.1
