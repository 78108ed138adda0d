"""``benchmarks/gpu.py`` without a GPU: it says so, and what of it has a meaning on a CPU passes there."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedcommons.core.dp_sgd import DPSGD

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.long
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = subprocess.run([sys.executable, FOLDER / "gpu.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch finds no GPU here: nothing was tried.\n"


@pytest.mark.parametrize("check", ["as_on_the_cpu", "a_full_gpu"])
@pytest.mark.long
def test_checks_that_mean_something_on_a_cpu_pass_there(check: str, gpu: ModuleType) -> None:
    passed, said = getattr(gpu, check)()
    assert passed, said


@pytest.mark.long
def test_the_digest_is_of_the_bits(gpu: ModuleType) -> None:
    assert gpu.digest() == gpu.digest()


def test_its_rounds_are_the_same_at_once_and_one_by_one(gpu: ModuleType) -> None:
    clients = gpu.images(4, 20)
    for one, many in (
        (gpu.LOOP, replace(gpu.LOOP, batched=True)),
        (replace(gpu.LOOP, dp=DPSGD(1.0, 1.0)), replace(gpu.LOOP, dp=DPSGD(1.0, 1.0, at_once=64))),
    ):
        a, b = (next(gpu.course(clients, 0.5, loop, gpu.small_network)).model.buffer for loop in (one, many))
        assert not torch.equal(
            a, gpu.worker(gpu.small_network, one, gpu.RunData(clients, clients, {})).work.initial.buffer
        )
        assert (a - b).norm() <= 1e-4 * a.norm()


def test_the_network_is_the_published_one(gpu: ModuleType) -> None:
    assert sum(p.numel() for p in gpu.pfl_network().parameters()) == 1_626_442
    seconds, last = gpu.rate(gpu.course(gpu.images(4, 10), 0.5, gpu.LOOP, gpu.pfl_network), seconds=0.0, least=1)
    assert seconds > 0
    assert last.round == 3


def test_every_check_is_called_and_has_a_name_of_its_own(gpu: ModuleType) -> None:
    returning = {
        name for name, one in vars(gpu).items() if getattr(one, "__annotations__", {}).get("return") == gpu.Seen
    }
    assert {check.__name__ for check in gpu.CHECKS} == returning
