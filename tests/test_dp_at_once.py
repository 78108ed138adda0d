"""``dp.at_once``: several examples' gradients in one call are those of the loop, with the same noise and release."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedcommons import experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts
from fedcommons.core import dp_vectorised
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.noise import Noise, Source
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import noise_key
from fedcommons.tensors import Flat
from fedcommons.testing.batching import differences
from fedcommons.testing.federations import Federation
from fedcommons.testing.on_device import two_rounds
from fedcommons.testing.pretend_gpu import GPU, PretendGPU
from lightning_modules.classifier import Classifier

DP = DPSGD(noise_multiplier=0.5, clip=0.5)
LOOP = LocalSGD(2, 6, dp=DP)
SIZES = (11, 5, 17)


def _with(at_once: int, **more: object) -> LocalSGD:
    return replace(LOOP, dp=replace(DP, at_once=at_once), **more)


@pytest.mark.parametrize("name", parts.KINDS["algorithm"].known)
def test_clients_of_every_method_send_what_they_send_one_example_at_a_time(
    name: str, quick: Callable[[str], Algorithm], digits: Callable[..., Federation]
) -> None:
    federation = digits((11, 20, 20, 7, 16), method=quick(name)).training(replace(LOOP, epochs=1))
    work, data = federation.work(), federation.data.clients[0]
    if dp_vectorised.flaw(work.module, work.named, (data.x[:2], data.y[:2])):
        return  # such a run is refused
    found = [*differences(quick(name), federation, federation.training(_with(4, epochs=1)), rounds=2)]
    assert max((off for _, off in found), default=0) <= 1e-5


def _trained(digits: Callable[..., Federation], loop: LocalSGD, **more: object) -> Mapping[str, object]:
    """What a client with weights logs and sends; its module logs something of each example."""
    federation = digits(SIZES, **more).training(loop)
    work, data = federation.work(), federation.data.clients[2]
    work.noise = Noise(Source(5), 0, 0)
    step = work.module.training_step

    def logging(batch: tuple[Tensor, ...], number: int) -> Tensor:
        work.module.log("label", batch[1].double().mean())
        value = step(batch, number)
        assert isinstance(value, Tensor)
        return value

    work.module.training_step = logging
    data = replace(data, weight=torch.linspace(0.5, 2, len(data)))
    found = work.local(federation.model, data, 3)
    return {"model": found.model.buffer.clone(), "spent": found.spent, **found.metrics}


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}, {"augment": True}, {"precision": "tf32"}])
def test_weights_logs_and_options_are_those_of_the_loop(
    more: Mapping[str, object], digits: Callable[..., Federation]
) -> None:
    one, many = (_trained(digits, _with(k, **more)) for k in (1, 4))
    assert one.keys() == many.keys() == {"model", "spent", "loss", "label", "steps"}
    assert one["spent"] == many["spent"]
    for name in ("model", "loss", "label"):
        assert torch.allclose(torch.as_tensor(one[name]).float(), torch.as_tensor(many[name]).float(), rtol=1e-5)


def test_how_many_are_taken_at_once_decides_rounding_alone(digits: Callable[..., Federation]) -> None:
    found = [_trained(digits, _with(k), linear=True)["model"] for k in (2, 3, 6, 64)]
    for model in found[1:]:
        torch.testing.assert_close(model, found[0], rtol=1e-5, atol=1e-7)


def test_an_example_without_a_finite_gradient_adds_nothing(digits: Callable[..., Federation]) -> None:
    federation = digits((4,), linear=True)
    work = federation.work()
    x, y = federation.data.clients[0].x.float(), federation.data.clients[0].y
    dp = DPSGD(0.0, 0.5, at_once=3)
    of = partial(dp_vectorised.of_step, dp, work.module, work.named)
    good = of((x[:3], y[:3]), 0)[0]
    bad = of((torch.cat([x[:3], torch.full_like(x[:1], torch.inf)]), y), 0)[0]
    assert torch.equal(good.values, bad.values)
    assert good.bound == bad.bound == 0.5
    assert good.values.norm() <= 3 * 0.5


def test_an_empty_batch_is_noise_alone(digits: Callable[..., Federation]) -> None:
    federation = digits((4,))
    work, data = federation.work(), federation.data.clients[0]
    empty, sums = dp_vectorised.of_step(
        DPSGD(1.0, 0.5, at_once=3), work.module, work.named, (data.x[:0], data.y[:0]), 0
    )
    assert not empty.values.any()
    assert sums == {"loss": 0}


def test_on_a_gpu_a_step_launches_as_much_for_any_batch(digits: Callable[..., Federation]) -> None:
    def launches(at_once: int, examples: int) -> int:
        federation = digits((examples,)).training(LocalSGD(3, examples, dp=DPSGD(1.0, 1.0, at_once=at_once)))
        with PretendGPU() as gpu:
            two_rounds(FedAvg(), federation.on(GPU), gpu)
        return max(step.launches.total() for step in gpu.steps)

    at_once = [launches(64, n) for n in (4, 16)]
    assert at_once[0] == at_once[1] <= 150
    assert launches(1, 16) > 5 * at_once[0]


SMOKE = {"dp.local": True, "dp.at_once": 8}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dp.at_once": 8}, r"dp\.at_once above 1 needs dp\.local true"),
        ({**SMOKE, "client.precision": "bf16"}, r"client\.precision fp32 or tf32"),
        ({**SMOKE, "dp.at_once": 0}, r"dp\.at_once must lie in \[1, 1e9\]"),
    ],
)
def test_what_is_not_right_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        prepare(experiment("smoke", values=values))


def test_a_module_that_draws_is_refused_with_the_reason(digits: Callable[..., Federation]) -> None:
    """Under vmap examples would share a draw, or draw by their place in the batch."""
    federation = digits((4,), dropout=0.5)
    work, data = federation.work(), federation.data.clients[0]
    assert "random" in (dp_vectorised.flaw(work.module, work.named, (data.x[:2], data.y[:2])) or "")


def test_it_is_another_experiment() -> None:
    plain, many = (experiment("smoke", values=values) for values in ({"dp.local": True}, SMOKE))
    assert noise_key(plain) != noise_key(many)
    assert prepare(many).config.dp.at_once == 8


class Mixing(Classifier):
    """A loss that mixes the rows of a batch."""

    def training_step(self, batch: tuple[Tensor, ...], number: int) -> Tensor:
        value = super().training_step(batch, number) * batch[0].float().mean()
        assert isinstance(value, Tensor)
        return value


def test_a_module_whose_rows_meet_sees_one_at_a_time() -> None:
    """There a batch has one row, as in the loop."""
    models, x, y = [], torch.rand(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    for at_once in (1, 6):
        work = Work(Mixing(nn.Linear(5, 3), lr=0.1), torch.device("cpu"), _with(at_once))
        work.load(Flat(work.initial.layout, torch.zeros_like(work.initial.buffer)))
        work.noise = Noise(Source(1), 0, 0)
        models.append(work.local(work.snapshot(), ClientData(x, y), 0).model.buffer.clone())
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    assert models[0].abs().max() > 1e-2
