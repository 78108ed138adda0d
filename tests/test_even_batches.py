"""Batches of about equal sizes: no generator steps as far for a last image alone as for a whole batch."""

from typing import Any

import pytest
import torch

from fedcommons.config import experiment as config
from fedcommons.generators.cvae import CVAE
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.gan import GAN
from fedcommons.generators.loop import batch_of
from fedcommons.runs import inputs

DIGITS = inputs.load(config.Data(limit=40)).train


@pytest.mark.parametrize("n", [1, 64, 65, 129, 130, 1000])
@pytest.mark.parametrize("most", [1, 7, 64])
def test_even_batches_are_as_many_as_others_and_none_is_small(n: int, most: int) -> None:
    sizes = [len(part) for part in torch.arange(n).split(batch_of(n, most, True))]
    assert len(sizes) == -(-n // most)
    assert max(sizes) <= most
    assert sizes[-1] > max(sizes) - len(sizes)
    assert batch_of(n, most, False) == most


@pytest.mark.parametrize(("kind", "fields"), [(DDPM, {"channels": (8, 16)}), (GAN, {"channels": (8, 16)}),
                                              (CVAE, {"channels": (8, 16), "hidden": 16})])  # fmt: skip
def test_they_change_a_training_only_where_the_last_batch_was_smaller(kind: Any, fields: dict[str, Any]) -> None:
    """Of 20 images ten a batch are even; of 21 the last batch had one image."""
    for n, is_equal in ((20, True), (21, False)):
        each = (kind(batch_size=10, epochs=1, even_batches=flag, **fields) for flag in (False, True))
        mixed, even = (part.fit(DIGITS[torch.arange(n)], 10, 0, [1])[1].weights for part in each)
        assert all(torch.equal(mixed[name], even[name]) for name in mixed) == is_equal
