"""The sensitivity test accuses no method, generator or stage of the package, whatever the seed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedcommons.config.parts import KINDS, constants, make
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.testing import check_generator, check_stage, digits
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared

OTHERWISE: dict[str, dict[str, Any]] = {
    "feddm": {"init": "noise"},
    "feddpms": {"privacy": "sound"},
    "shuffled_real": {"p": 0.3},
    "raw_copies": {"c": 0.3},
    "merf": {"noise_multiplier": 3.0, "features": 40, "per_class": 2, "steps": 3},
    "ndpdc": {"noise_multiplier": 3.0, "iterations": 3, "per_class": 2, "width": 8, "batch": 2},
}
"""Constants that make a part private, or that it must be given."""

BY_DP_SGD = [name for name in KINDS["generator"].known if "noise_multiplier" in constants("generator", name)]
SMALL = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "channels": (8, 16), "noise_multiplier": 1.5, "draws": 2}

SMALL_CLIP = LocalSGD(epochs=1, batch_size=3, dp=DPSGD(noise_multiplier=0.5, clip=0.1))

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KINDS["algorithm"].known)
@pytest.mark.long
def test_no_method_is_accused(name: str, seed: int, quick: Callable[[str], Algorithm]) -> None:
    method: Any = quick(name)
    for local in (LOCAL, SMALL_CLIP)[: 1 + seed % 2]:
        what_leaves_a_client_moves_as_declared(replace(method, **OTHERWISE.get(name, {})), local, seed)


@pytest.mark.parametrize(("name", "values"), [("feddm", {}), ("feddpms", {}), ("scaffold", {"option": 1})])
@pytest.mark.long
def test_methods_that_declare_that_nothing_protects_something_are_not_accused(
    name: str, values: dict[str, Any], quick: Callable[[str], Algorithm]
) -> None:
    """Images that start from real ones, codes as printed, a plain gradient."""
    method: Any = quick(name)
    what_leaves_a_client_moves_as_declared(replace(method, **values), LOCAL)


@pytest.mark.parametrize("name", BY_DP_SGD)
def test_no_private_generator_is_accused(name: str) -> None:
    check_generator(make("generator", name, SMALL), digits((12,)).data.clients.store)


@pytest.mark.parametrize("name", KINDS["sharing"].known)
def test_no_stage_is_accused(name: str) -> None:
    """Those with synthetic images are played with noisy class counts too."""
    for seed in (0, 1):
        check_stage(make("sharing", name, OTHERWISE.get(name, {})), seed=seed)
