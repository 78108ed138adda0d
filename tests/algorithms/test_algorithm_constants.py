"""What the algorithms refuse: constants out of range, experiments, models and data that they are not defined for."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from closed_forms import Digits
from torch import Tensor, nn

from fedcommons import Algorithm, Facts, Message, UserError, flatten
from fedcommons.algorithms.apfl import APFL
from fedcommons.algorithms.dense import DENSE
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbabu import FedBABU
from fedcommons.algorithms.fedcvae import FedCVAE
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.fedgen import FedGEN
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedper import FedPer
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.fedrep import FedRep
from fedcommons.algorithms.gradient_coding import GradientCoding
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.data import datasets
from fedcommons.runs.check_module import require_distillable
from fedcommons.testing.federations import Federation


def _client(algorithm: Algorithm, federation: Federation) -> None:
    state = algorithm.start(federation.model, federation.plan(1).facts, 0)
    algorithm.client(federation.work(), algorithm.down(state, 1, 0), {}, federation.data.clients[0], 1, 0)


def _changed(federation: Federation, change: Callable[[Any], None]) -> Federation:
    """Its modules are changed by ``change``."""

    def module() -> Any:
        change(created := federation.module())
        return created

    return replace(federation, module=module)


OPTIMIZERS: list[tuple[Algorithm, dict[str, Any], str]] = [
    *((method, {}, r"SGD with one learning rate.*Adam") for method in (FedNova(), FedPVR(), SCAFFOLD(1), SCAFFOLD(2))),
    (FedNova(), {"momentum": 0.9, "nesterov": True}, "Nesterov"),
    (FedPVR(), {"momentum": 0.9}, r"FedPVR.*momentum is 0\.9"),
    (APFL(), {"momentum": 0.9}, r"APFL.*momentum is 0\.9"),
]


@pytest.mark.parametrize(("algorithm", "options", "said"), OPTIMIZERS)
def test_an_optimizer_with_which_the_formula_would_be_wrong_is_refused(
    algorithm: Algorithm, options: dict[str, Any], said: str, digits: Digits
) -> None:
    def change(module: Any) -> None:
        if options:
            optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
            module.configure_optimizers = lambda: optimizer
        else:
            module.optimizer = "adam"

    with pytest.raises(ValueError, match=said):
        _client(algorithm, _changed(digits(), change))


def test_a_head_that_does_not_exist_and_fedmix_without_means_are_refused(digits: Digits) -> None:
    federation = digits()
    with pytest.raises(ValueError, match="Classifier must have an attribute head"):
        _client(MOON(), _changed(federation, lambda module: setattr(module, "head", None)))
    with pytest.raises(ValueError, match=r"Classifier.head .* got 'network.lost'"):
        _client(FedDM(), _changed(federation, lambda module: setattr(module, "head", "network.lost")))
    rows = replace(federation.data.clients[0], commons=None)
    with pytest.raises(ValueError, match=r"FedMix needs .* the means"):
        FedMix().client(federation.work(), Message({"model": federation.model}), {}, rows, 1, 0)


COMING = Facts(4, [1] * 4, 1, arrival=[0.5] * 4)


@pytest.mark.parametrize(
    ("algorithm", "facts", "said"),
    [(FedPVR(layers="network.last,head*"), COMING, r"'head\*' matches no layer; .*network.conv1, .*network.last"),
     (FedPer("network.first"), COMING, "^fedper.layers.*matches no layer.*network.last"),
     (FedPer(None), COMING, "^fedper.layers.*has no head.*network.last"),
     (FedRep("network.first"), COMING, "^fedrep.layers.*matches no layer.*network.last"),
     (FedBABU(None), COMING, "^fedbabu.layers.*has no head.*network.last"),
     (GradientCoding(), replace(COMING, arrival=None), "probability that a client's reply arrives"),
     (GradientCoding(), replace(COMING, arrival=[0.5, 0.0, 0.5, 0.5]), "probability that a client's reply arrives")],
)  # fmt: skip
def test_missing_layers_and_replies_are_refused(algorithm: Algorithm, facts: Facts, said: str, digits: Digits) -> None:
    with pytest.raises(UserError, match=said):
        algorithm.start(digits().model, facts, 0)


TWO = {name: torch.ones(2, 2) for name in ("body.1", "head.0", "head.1")}


@pytest.mark.parametrize(
    ("head", "batch_norm", "model", "said"),
    [((), (), TWO, "names its head"), (("lost",), (), TWO, "lost is frozen"),
     (("head.0",), (), {"head.0": torch.ones(2, 2, 3, 3)}, r"linear layer, .* shape \(2, 2, 3, 3\)"),
     (("head.0", "head.1"), ("body.1", "head.1"), TWO, "head without BatchNorm, .* head.1 is of BatchNorm"),
     (("head.0", "head.1"), ("body.1",), TWO, None)],
)  # fmt: skip
def test_a_head_without_a_feature_vector_is_refused_by_fedgen(
    head: tuple[str, ...], batch_norm: tuple[str, ...], model: Mapping[str, Tensor], said: str | None
) -> None:
    facts = Facts(2, [3, 4], 5, n_classes=10, head=head, batch_norm=batch_norm)
    with pytest.raises(UserError, match=said) if said else nullcontext():
        FedGEN(iterations=4, noise_size=3, hidden=8, batch_size=6).start(flatten(dict(model)), facts, 0)


class _Outputs(nn.Module):
    """It takes floating images as they are, and has no ``normalise`` that says how uint8 ones are scaled."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.last = nn.Linear(64, n)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x / 255 if x.dtype == torch.uint8 else x).flatten(1))


class _Normalised(_Outputs):
    def normalise(self, x: Tensor) -> Tensor:
        return x / 255


@pytest.mark.parametrize(
    ("algorithm", "module", "is_float", "said"),
    [
        (FedAvg(), _Outputs(11), False, None),
        (DENSE(), _Outputs(11), False, r"DENSE distils logits, .*\(2, 11\) instead of \(2, 10\)"),
        (FedCVAE(), _Outputs(10), True, r"FedCVAE makes images .* torch.float32 of shape \(1, 8, 8\)"),
        (FedCVAE(), _Outputs(10), False, None),  # its images are uint8 throughout
        (DENSE(), _Normalised(10), False, None),
        (DENSE(), _Outputs(10), False, r"give the module normalise\(x\)"),
    ],
)
def test_no_distillation_is_refused(algorithm: Algorithm, module: nn.Module, is_float: bool, said: str | None) -> None:
    dataset = datasets.load("digits", datasets.digits)
    train = replace(dataset.train, x=dataset.train.x.float()) if is_float else dataset.train
    with pytest.raises(UserError, match=said) if said else nullcontext():
        require_distillable(algorithm, module, replace(dataset, train=train))
