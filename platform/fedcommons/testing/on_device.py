"""Check that an algorithm gives the CPU's results if its clients train on a real or simulated GPU (``pretend_gpu``)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedcommons.core.algorithm import Algorithm
from fedcommons.core.client_worker import floating_buffers
from fedcommons.core.worker import default_device
from fedcommons.errors import UserError
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import data, norm
from fedcommons.testing.comparing import bits, listed, require, require_same, tensors_of
from fedcommons.testing.federations import Federation
from fedcommons.testing.pretend_gpu import CPU, GPU, PretendGPU, Seen, place
from fedcommons.testing.spy import before_each_call

PRETEND = "pretend"

BY_DESIGN = ("core/local_training.py", "privacy/dp_sgd.py", "algorithms/ball.py", "data/transforms.py")
"""Files that draw random numbers on the CPU and copy them to the device, so that all devices use equal numbers."""

ROUNDING = 1e-3
"""Maximum relative difference (Euclidean norm) from the CPU's results after two rounds on a real device."""

Check = Callable[[Algorithm, Federation], None]


def check_on(device: str) -> Check:
    """Return the check for a device: "pretend" (the simulated GPU) or torch's name of a device, such as "cuda".

    Raises:
        UserError: there is no such device.
    """
    if device == PRETEND:
        return a_gpu_that_is_not_there_gives_the_bits_of_the_cpu
    try:
        real = torch.device(device)
    except RuntimeError:
        raise UserError(f'device must be "{PRETEND}", "cuda" or another of torch\'s, got {device!r}.') from None
    default = default_device()  # also turns TF32 off on a GPU, so that results are near the CPU's
    if real.type not in ("cpu", default.type):
        raise UserError(f'device: torch finds no {real.type} on this machine; device="{PRETEND}" needs none.')

    def the_device_gives_what_the_cpu_gives(algorithm: Algorithm, federation: Federation) -> None:
        """Check that server state and clients' memory after two rounds are equal to the CPU's, up to rounding."""
        on_device, differences = two_rounds(algorithm, federation.on(real)), {}
        for what, x in _vectors(two_rounds(algorithm, federation)).items():
            off = norm(_vectors(on_device)[what].double() - x.double())
            if not off <= ROUNDING * max(norm(x), 1):
                differences[what] = off
        names = listed(list(differences))
        require(not differences, f"on {device} it gives other {names} than on the CPU, by {differences}")

    return the_device_gives_what_the_cpu_gives


def a_gpu_that_is_not_there_gives_the_bits_of_the_cpu(algorithm: Algorithm, federation: Federation) -> None:
    """Check training on the simulated GPU.

    The results must have the CPU's bits. No local step may wait for the GPU or copy tensors between CPU and GPU.

    Raises:
        AssertionError: the message describes the first violation.
    """
    with PretendGPU() as gpu:
        on_gpu = two_rounds(algorithm, federation.on(GPU), gpu)
    resting = [what for what, x in _vectors(on_gpu).items() if place(x) != CPU]
    require(not resting, f"{listed(resting)} stays on the GPU between rounds")
    require(gpu.events.launches, "nothing ran on the GPU")
    on_cpu = two_rounds(algorithm, federation)
    require_same(bits(on_gpu), bits(on_cpu), "on a GPU that rounds as the CPU does there are other bits of")
    waits, copies = (_lines_with(gpu.steps, event) for event in ("waits", "copies"))
    require(not waits, f"a local step waits for the GPU (item(), float(), a mask, a copy, ...) in {listed(waits)}")
    require(not copies, f"a local step copies between CPU and GPU in {listed(copies)}")


def _lines_with(steps: Sequence[Seen], event: str) -> list[str]:
    """Return the program lines with events of this name in optimizer steps, except in the files ``BY_DESIGN``."""
    lines = sum((getattr(step, event) for step in steps), Counter[str]())
    return [line for line in sorted(lines) if not line.startswith(BY_DESIGN)]


def two_rounds(algorithm: Algorithm, federation: Federation, gpu: PretendGPU | None = None) -> Standing:
    """Run two rounds with averaged BatchNorm statistics and one job per client; return the federation's state.

    gpu: the simulated GPU whose events are counted; None: the clients train on the federation's device.
    """
    plan = federation.plan(2, blocks=len(federation.data.clients))
    start = replace(federation.start(algorithm, plan), buffers=floating_buffers(federation.module()))
    executor = federation.serial(algorithm)
    if gpu is not None:  # ``gpu.steps`` omits the first step of each job and local training
        before_each_call(executor.worker, "run", gpu.begin)
        before_each_call(executor.worker.work, "local", gpu.begin)
    return federation.run(algorithm, plan, executor, start)[-1][0]


def _vectors(standing: Standing) -> dict[str, torch.Tensor]:
    """Return the tensors of the server state and of the clients' memory by name."""
    payloads = tensors_of(standing).items()
    return {prefix + name: data(x) for prefix, payload in payloads for name, x in payload.items()}
