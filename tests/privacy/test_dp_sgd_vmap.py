"""Clipped gradients of many examples at once, of generators and by ``dp.at_once``: those of a loop that takes one."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel
from torch import Tensor, nn
from torch.func import functional_call

from fedcommons import Algorithm, LocalSGD, UserError, experiment
from fedcommons.config import registry
from fedcommons.core.functional_step import Step
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.dp_sgd import DPSGD, clipped
from fedcommons.privacy.dp_sgd_vmap import clipped_sum, noisy_sum, require_examples_apart, steps
from fedcommons.privacy.noise import SEED_ALONE, Draws, Noise, Source
from fedcommons.runs.build import build, noise_key
from fedcommons.testing.client_work import differences
from fedcommons.testing.federations import Federation

N, D = 6, 2  # examples, and draws for each


def draws() -> Draws:
    return Draws(SEED_ALONE, ("tests",))


@pytest.mark.long
def test_each_gradient_is_that_of_a_loop_on_the_real_network_with_attention() -> None:
    """A U-Net with noisy images, labels, t and noise; and the sum of clipped gradients, for every physical batch."""
    torch.default_generator.manual_seed(0)
    network = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16), norm_num_groups=8,
        down_block_types=("AttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        layers_per_block=1, num_class_embeds=10, attention_head_dim=4,
    )  # fmt: skip

    def loss(named: dict[str, Tensor], x: Tensor, y: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        rows = x.expand(len(t), *x.shape) + 0.5 * noise
        result = functional_call(network, named, (rows, t), {"class_labels": y.expand(len(t))}).sample
        return (result - noise).square().mean()

    x = torch.randn(N, 1, 8, 8) * torch.linspace(0.1, 9, N).view(-1, 1, 1, 1)
    columns = [x, torch.arange(N), torch.randint(1000, (N, D)), torch.randn(N, D, 1, 8, 8)]
    named, each = dict(network.named_parameters()), []
    for j in range(N):
        of_layers = torch.autograd.grad(loss({**named}, *(column[j] for column in columns)), [*named.values()])
        each.append(torch.cat([g.reshape(-1) for g in of_layers]))
        alone = noisy_sum(named, loss, [column[j : j + 1] for column in columns], 1e9, 4).values
        assert (alone - each[j]).norm() < 1e-5 * each[j].norm()
    norms = torch.stack([g.norm() for g in each])
    clip = float(norms.median())
    assert (norms > 1.1 * clip).any()
    assert (norms < 0.9 * clip).any()
    wanted = torch.stack([clipped(g, clip)[0] for g in each]).sum(0)
    for physical_batch in (1, 4):
        total = noisy_sum(named, loss, columns, clip, physical_batch)
        assert (total.values - wanted).norm() < 1e-5 * wanted.norm()
        assert total.bound == clip


def test_draws_are_averaged_before_clipping_and_what_is_not_finite_adds_nothing() -> None:
    """Clipped apart, two opposite gradients of unequal size would not leave the clipped mean."""

    def loss(named: dict[str, Tensor], x: Tensor) -> Tensor:  # x (draws,): the gradient is the mean of x
        return named["w"] * x.mean()

    rows = torch.tensor([[5.0, -3.0], [0.2, 0.4], [torch.inf, 1.0], [torch.nan, 1.0], [0.0, 0.0]])
    for n in (2, 5):
        total = noisy_sum({"w": torch.zeros(())}, loss, [rows[:n]], 0.9, 8)
        assert float(total.values) == pytest.approx(0.9 + 0.3)
    assert not clipped_sum([torch.zeros(2, 3), torch.zeros(2, 1)], 1.0)[0].any()


class Zero(nn.Module):
    """A loss that is zero everywhere: all that moves the weights is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(200, 10)), nn.Parameter(torch.zeros(500))

    def forward(self, x: Tensor) -> Tensor:
        return 0 * (self.w.sum() + self.b.sum()) * x


def test_an_empty_batch_makes_a_step_of_noise_that_counts_like_any_other() -> None:
    module, sizes, at, moved, releases = Zero(), [], torch.zeros(2500), [], []

    def draw(rows: int, _: object) -> list[Tensor]:
        sizes.append(rows)
        return []

    for release in steps(
        module, torch.optim.SGD(module.parameters(), 1.0), lambda named, x: functional_call(module, named, (x,)),
        [torch.ones(3)], draw, DPSGD(noise_multiplier=1.5, clip=0.4), batch_size=1, epochs=10, physical_batch=4,
        noise=draws(),
    ):  # fmt: skip
        now = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        moved.append(now - at)
        releases.append(release)
        at = now
    assert 0 in sizes
    assert len(set(releases)) == 1
    assert releases[0].covered
    assert (releases[0].q, releases[0].sigma, releases[0].sensitivity, releases[0].steps) == (1 / 3, 1.5, 0.4, 1)
    noises = [draws().stream("noise", step).standard_normal(2500, dtype=np.float32) for step in range(10 * 3)]
    # divided by the expected size B = 1, not by that of the batch
    assert torch.allclose(torch.stack(moved), -0.6 * torch.from_numpy(np.stack(noises)), rtol=0, atol=1e-5)


def test_a_layer_that_mixes_examples_is_refused_by_name() -> None:
    for layer in (nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)):
        module = nn.Sequential(nn.Conv2d(1, 4, 3), layer)
        with pytest.raises(UserError, match=rf"{type(layer).__name__} \(1\) .* GroupNorm"):
            require_examples_apart(module)
    require_examples_apart(nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)))


DP = DPSGD(noise_multiplier=0.5, clip=0.5)
LOOP = LocalSGD(2, 6, dp=DP)
SIZES = (11, 5, 17)


def _with(at_once: int, **more: object) -> LocalSGD:
    return replace(LOOP, dp=replace(DP, at_once=at_once), **more)


NOT_AT_ONCE = ("fedvae", "feddpms", "fedbn")
"""Methods whose modules draw or keep statistics: such a run is refused."""


@pytest.mark.parametrize("name", registry.KINDS["algorithm"].components)
@pytest.mark.long
def test_clients_of_every_method_send_what_they_send_one_example_at_a_time(
    name: str, quick: Callable[[str], Algorithm], digits: Callable[..., Federation]
) -> None:
    federation = digits((11, 20, 7), method=quick(name)).training(replace(LOOP, epochs=1))
    work, data = federation.work(), federation.data.clients[0]
    is_refused = dp_sgd_vmap.flaw(Step(work.module), work.named, (data.x[:2], data.y[:2])) is not None
    assert is_refused == (name in NOT_AT_ONCE)
    if is_refused:
        return
    pairs = [*differences(quick(name), federation, federation.training(_with(4, epochs=1)), rounds=2)]
    assert [pair for pair in pairs if not pair[1] <= 1e-5] == []
    assert bool(pairs) == (name != "one_shot")  # whose clients send nothing


def _trained(digits: Callable[..., Federation], loop: LocalSGD, **more: object) -> Mapping[str, object]:
    """Return what a client with weights sends and logs, and its number of calls of a module that logs labels."""
    federation, calls = digits(SIZES, **more).training(loop), list[int]()
    work, data = federation.work(), federation.data.clients[2]
    work.noise = Noise(Source(5), 0, 0)
    step = work.module.training_step

    def logging(batch: tuple[Tensor, ...], number: int) -> Tensor:
        calls.append(number)
        work.module.log("label", batch[1].double().mean())
        value = step(batch, number)
        assert isinstance(value, Tensor)
        return value

    work.module.training_step = logging
    data = replace(data, weight=torch.linspace(0.5, 2, len(data)))
    result = work.local(federation.model, data, 3)
    return {"model": result.model.buffer.clone(), "spent": result.spent, "calls": len(calls), **result.metrics}


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}, {"augment": True}, {"precision": "tf32"}])
def test_weights_logs_and_options_equal_the_loop(more: Mapping[str, object], digits: Callable[..., Federation]) -> None:
    single, many = (_trained(digits, _with(k, **more)) for k in (1, 4))
    assert single.keys() == many.keys() == {"model", "spent", "calls", "loss", "label", "steps"}
    assert single["spent"] == many["spent"]
    assert int(single["calls"]) > 2 * int(many["calls"]) > 0  # pyright: ignore[reportArgumentType]
    for name in ("model", "loss", "label"):
        assert torch.allclose(torch.as_tensor(single[name]).float(), torch.as_tensor(many[name]).float(), rtol=1e-5)
    if not more:  # how many are taken at once decides rounding alone
        for k in (2, 64):
            torch.testing.assert_close(_trained(digits, _with(k))["model"], many["model"], rtol=1e-5, atol=1e-6)


def test_a_module_that_draws_is_refused_with_the_reason(digits: Callable[..., Federation]) -> None:
    """Under vmap examples would share a draw, or draw by their place in the batch."""
    work, data = (federation := digits((4,), dropout=0.5)).work(), federation.data.clients[0]
    assert "random" in (dp_sgd_vmap.flaw(Step(work.module), work.named, (data.x[:2], data.y[:2])) or "")


def test_how_many_examples_are_taken_at_once_is_part_of_the_experiment() -> None:
    keys = {noise_key(experiment("smoke", values={"dp.local": True, **more})) for more in ({}, {"dp.at_once": 8})}
    assert len(keys) == 2
    with pytest.raises(UserError, match=r"dp\.at_once above 1 needs dp\.local true"):
        build(experiment("smoke", values={"dp.at_once": 8}))
