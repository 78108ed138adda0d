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
from fedcommons.config.registry import make
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


def method(name: str, **constants: Any) -> Algorithm:
    return make("algorithm", name, constants)


OPTIMIZERS: list[tuple[Algorithm, dict[str, Any], str]] = [
    *((method(name), {}, r"SGD with one learning rate.*Adam") for name in ("fednova", "fedpvr", "scaffold")),
    (method("scaffold", option=1), {}, r"SGD with one learning rate.*Adam"),
    (method("fednova"), {"momentum": 0.9, "nesterov": True}, "Nesterov"),
    (method("fedpvr"), {"momentum": 0.9}, r"FedPVR.*momentum is 0\.9"),
    (method("apfl"), {"momentum": 0.9}, r"APFL.*momentum is 0\.9"),
]


@pytest.mark.parametrize(("algorithm", "options", "message"), OPTIMIZERS)
def test_an_optimizer_with_which_the_formula_would_be_wrong_is_refused(
    algorithm: Algorithm, options: dict[str, Any], message: str, digits: Digits
) -> None:
    def change(module: Any) -> None:
        if options:
            optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
            module.configure_optimizers = lambda: optimizer
        else:
            module.optimizer = "adam"

    with pytest.raises(ValueError, match=message):
        _client(algorithm, _changed(digits(), change))


def test_a_head_that_does_not_exist_and_fedmix_without_means_are_refused(digits: Digits) -> None:
    federation = digits()
    with pytest.raises(ValueError, match="Classifier must have an attribute head"):
        _client(method("moon"), _changed(federation, lambda module: setattr(module, "head", None)))
    with pytest.raises(ValueError, match=r"Classifier.head .* got 'network.lost'"):
        _client(method("feddm"), _changed(federation, lambda module: setattr(module, "head", "network.lost")))
    rows = replace(federation.data.clients[0], commons=None)
    with pytest.raises(ValueError, match=r"FedMix needs .* the means"):
        method("fedmix").client(federation.work(), Message({"model": federation.model}), {}, rows, 1, 0)


COMING = Facts(4, [1] * 4, 1, arrival=[0.5] * 4)


@pytest.mark.parametrize(
    ("algorithm", "facts", "text"),
    [(method("fedpvr", layers="network.last,head*"), COMING, r"'head\*' matches no .*network.conv1, .*network.last"),
     (method("fedper", layers="network.first"), COMING, "^fedper.layers.*matches no layer.*network.last"),
     (method("fedper", layers=None), COMING, "^fedper.layers.*has no head.*network.last"),
     (method("fedrep", layers="network.first"), COMING, "^fedrep.layers.*matches no layer.*network.last"),
     (method("fedbabu", layers=None), COMING, "^fedbabu.layers.*has no head.*network.last"),
     (method("gradient_coding"), replace(COMING, arrival=None), "probability that a client's reply arrives"),
     (method("gradient_coding"), replace(COMING, arrival=[0.5, 0.0, 0.5, 0.5]), "that a client's reply arrives")],
)  # fmt: skip
def test_missing_layers_and_replies_are_refused(algorithm: Algorithm, facts: Facts, text: str, digits: Digits) -> None:
    with pytest.raises(UserError, match=text):
        algorithm.start(digits().model, facts, 0)


TWO = {name: torch.ones(2, 2) for name in ("body.1", "head.0", "head.1")}


@pytest.mark.parametrize(
    ("head", "batch_norm", "model", "message"),
    [((), (), TWO, "names its head"), (("lost",), (), TWO, "lost is frozen"),
     (("head.0",), (), {"head.0": torch.ones(2, 2, 3, 3)}, r"linear layer, .* shape \(2, 2, 3, 3\)"),
     (("head.0", "head.1"), ("body.1", "head.1"), TWO, "head without BatchNorm, .* head.1 is of BatchNorm"),
     (("head.0", "head.1"), ("body.1",), TWO, None)],
)  # fmt: skip
def test_a_head_without_a_feature_vector_is_refused_by_fedgen(
    head: tuple[str, ...], batch_norm: tuple[str, ...], model: Mapping[str, Tensor], message: str | None
) -> None:
    facts = Facts(2, [3, 4], 5, n_classes=10, head=head, batch_norm=batch_norm)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        method("fedgen").start(flatten(dict(model)), facts, 0)


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
    ("algorithm", "module", "is_float", "text"),
    [
        (method("fedavg"), _Outputs(11), False, None),
        (method("dense"), _Outputs(11), False, r"DENSE distils logits, .*\(2, 11\) instead of \(2, 10\)"),
        (method("fedcvae"), _Outputs(10), True, r"FedCVAE makes images .* torch.float32 of shape \(1, 8, 8\)"),
        (method("fedcvae"), _Outputs(10), False, None),  # its images are uint8 throughout
        (method("dense"), _Normalised(10), False, None),
        (method("dense"), _Outputs(10), False, r"give the module normalise\(x\)"),
    ],
)
def test_no_distillation_is_refused(algorithm: Algorithm, module: nn.Module, is_float: bool, text: str | None) -> None:
    dataset = datasets.load("digits", datasets.digits)
    train = replace(dataset.train, x=dataset.train.x.float()) if is_float else dataset.train
    with pytest.raises(UserError, match=text) if text else nullcontext():
        require_distillable(algorithm, module, replace(dataset, train=train))
