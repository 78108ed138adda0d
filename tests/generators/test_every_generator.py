"""What every generator of the package promises: run on each in ``config/registry.py``, without a name in it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from broken_noise import OfNoData
from torch import Tensor

from fedcommons import Examples, TrainedGenerator, UserError
from fedcommons.config import presets, registry
from fedcommons.config import schema as config
from fedcommons.config.dotted import choose, part_of
from fedcommons.generators.requests import takes, takes_noise
from fedcommons.privacy.noise import Source
from fedcommons.runs import build

SHAPE, N_CLASSES = (1, 8, 8), 10
DIGITS = build.load(config.Data(limit=22)).train[slice(0, 20)]
LABELS = torch.tensor([3, 0, 3, 9, 3])

pytestmark = pytest.mark.parametrize("name", registry.KINDS["generator"].components)


@cache
def tiny(name: str) -> Any:
    noise = {"generator.noise_multiplier": 1.5} if "noise_multiplier" in registry.constants("generator", name) else {}
    fields = presets.preset("smoke", "digits", name)
    values = {"sharing.setting": "shuffled_synthetic", "generator.name": name, "generator.batch_size": 12, **noise}
    return part_of(choose({**fields, **values, "generator.epochs": 1}), "generator")


def fit(
    name: str, seed: int = 0, epochs: Collection[int] = (1,), examples: Examples = DIGITS, *, flip: bool = False
) -> Mapping[int, TrainedGenerator]:
    return tiny(name).fit(examples, N_CLASSES, seed, epochs, flip=flip)


def alone(name: str, examples: Examples = DIGITS, *, flip: bool = False) -> Mapping[str, Tensor]:
    """Weights that depend on the data only through training: the noise does not depend on the data."""
    noise = {"noise": OfNoData(Source(0))} if takes_noise(tiny(name)) else {}
    return tiny(name).fit(examples, N_CLASSES, 0, [1], flip=flip, **noise)[1].weights


@cache
def trained(name: str) -> Mapping[str, Tensor]:
    return fit(name)[1].weights


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_weights_follow_from_the_seed_the_data_and_the_epochs_alone(name: str) -> None:
    assert all(t.device.type == "cpu" and not t.requires_grad and t.isfinite().all() for t in trained(name).values())
    torch.manual_seed(99)
    assert not same(fit(name, 1)[1].weights, trained(name))
    last, each = fit(name, epochs=[3]), fit(name, epochs=[1, 2, 3])
    assert (sorted(last), sorted(each)) == ([3], [1, 2, 3])
    assert same(each[1].weights, trained(name))
    assert same(each[3].weights, last[3].weights)
    assert not same(each[2].weights, each[3].weights)
    plain = alone(name)
    assert same(alone(name), plain)
    assert not same(alone(name, flip=True), plain)
    for image, label in ((0, 1), (1, 0)):
        x, y = DIGITS.x.clone(), DIGITS.y.clone()
        x[3] = 255 - x[3] if image else x[3]
        y[3] = (y[3] + label) % N_CLASSES
        assert not same(alone(name, Examples(x, y)), plain)


def test_samples_are_images_one_for_each_label_and_follow_the_seed(name: str) -> None:
    draw = tiny(name).sample
    images = draw(trained(name), SHAPE, N_CLASSES, LABELS, 0)
    torch.manual_seed(99)
    assert (images.dtype, images.shape, images.device.type) == (torch.uint8, (5, *SHAPE), "cpu")
    assert torch.equal(images, draw(trained(name), SHAPE, N_CLASSES, LABELS, 0))
    assert not torch.equal(images, draw(trained(name), SHAPE, N_CLASSES, LABELS, 1))
    assert not torch.equal(images[0], images[2])  # of one class, each from its own draws


@pytest.mark.long
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 12, 8), (2, 8, 9)])
def test_images_of_other_sides_and_channels_are_drawn_or_refused(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, (12, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    try:
        tiny(name).check_shape(shape, "data")
    except UserError:
        assert shape[2] % 2  # a width that cannot be halved
        return
    weights = fit(name, examples=Examples(x, torch.arange(12) % N_CLASSES))[1].weights
    images = tiny(name).sample(weights, shape, N_CLASSES, LABELS[:2], 0)
    assert (images.dtype, images.shape) == (torch.uint8, (2, *shape))


def test_a_receipt_states_noise_or_nothing_and_progress_runs_to_the_last_step(name: str) -> None:
    steps: list[tuple[int, int]] = []
    more: dict[str, Any] = {}
    if takes(tiny(name).fit, "progress"):
        more = {"progress": lambda *counts: steps.append(counts)}
    receipt = tiny(name).fit(DIGITS, N_CLASSES, 0, [2], **more)[2].receipt
    assert steps == [(step, 4) for step in (1, 2, 3, 4) if more]  # two batches an epoch
    assert receipt is not None
    assert receipt.release(0).covered == takes_noise(tiny(name))
    if not takes_noise(tiny(name)):  # else batches are Poisson samples; fewer images than a batch make one batch
        few, sizes = DIGITS[slice(0, 5)], (replace(tiny(name), batch_size=n) for n in (256, 5))
        assert same(*(part.fit(few, N_CLASSES, 0, [1])[1].weights for part in sizes))


@pytest.mark.long
def test_losses_are_of_each_image_and_of_the_seed(name: str) -> None:
    if hasattr(tiny(name), "losses"):
        few, all_ = (tiny(name).losses(trained(name), DIGITS[slice(0, n)], N_CLASSES, 0) for n in (3, 20))
        assert all_.shape == (20,)
        torch.testing.assert_close(few, all_[:3])
        assert not torch.equal(few, tiny(name).losses(trained(name), DIGITS[slice(0, 3)], N_CLASSES, 1))


def test_other_types_and_sides_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"generator.name .*{name}.* table has torch.float32"):
        tiny(name).check_type(torch.float32, "table")
    if hasattr(tiny(name), "channels"):
        with pytest.raises(UserError, match=r"generator.channels .*levels"):
            replace(tiny(name), channels=(8,) * 5).check_shape((1, 8, 8), "data")


def test_presets_fit_it_to_our_data_sets(name: str) -> None:
    noise = {"generator.noise_multiplier": 1.5} if takes_noise(tiny(name)) else {}
    values = {"sharing.setting": "shuffled_synthetic", "generator.name": name, **noise}
    for preset in presets.PRESETS:
        for data, side in (("digits", 8), ("mnist", 28), ("cifar10", 32)):
            if preset in ("smoke", "small") or data == "cifar10":
                part: Any = part_of(choose({**presets.preset(preset, data, name), **values}), "generator")
                part.check_shape((1, side, side), data)
