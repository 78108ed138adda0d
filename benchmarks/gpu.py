"""Checks of the package on a real GPU, in ten minutes: each line has PASS or FAIL, and the observation.

python benchmarks/gpu.py [--only WORDS]      # exit code 0: all passed; 1: not all; 2: torch finds no GPU

The tests check the same on a simulated GPU (``testing/pretend_gpu.py``), which has neither the speed nor the rounding
of a GPU. The last line is pfl's benchmark on CIFAR-10 (``image_classification/baseline.yaml``; Granqvist et al. 2024,
arXiv:2404.06430): 1,000 users of 50 images, 50 users in a round, one local epoch, batch size 10, learning rate 0.1,
1,626,442 parameters. Images are random, as the speed does not depend on them. Goal: 1,500 rounds in 60 s.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from round_time import machine
from torch import Tensor, nn

from fedcommons import sweep
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config.presets import experiment
from fedcommons.core.algorithm import Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.runtime import gpu_memory, ray_cluster
from fedcommons.seeding import set_default_generator
from fedcommons.testing.comparing import bits, differing
from fedcommons.testing.federations import digits
from fedcommons.testing.on_device import check_on, two_rounds
from fedcommons.tune import gpu_share
from lightning_modules import Classifier
from lightning_modules.networks import CNN

LOOP = LocalSGD(1, 10)
METHODS = (FedAvg, FedProx, SCAFFOLD, FedDyn, FedPVR, FedNova)
ROUNDS, SECONDS = 1500, 60.0
"""Number of rounds of pfl's benchmark, and the goal for their seconds."""

ACTORS = (1, 4, 8, 12)
"""Numbers of actors that share the GPU in pfl's benchmark, one measurement each."""

PLAIN = 30
"""Number of GPU operations of a plain training step on the simulated GPU (``test_on_a_gpu.py``)."""

Seen = tuple[bool, str]
"""Result of a check: whether it passed, and the observation in words."""


def pfl_network() -> nn.Module:
    """Return pfl's CNN: two convolutions without padding, pooling and two linear layers, 1,626,442 parameters."""
    set_default_generator("initial weights of the benchmark")
    convolutions = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10))


def small_network() -> nn.Module:
    set_default_generator("initial weights of the benchmark")
    return CNN((3, 32, 32), 10)


def images(clients: int, each: int, shape: tuple[int, ...] = (3, 32, 32)) -> Clients:
    """Return clients with ``each`` random images and labels per client."""
    draws, n = torch.Generator().manual_seed(1), clients * each
    x = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=draws)
    return Clients(Examples(x, torch.randint(0, 10, (n,), generator=draws)), list(np.arange(n).reshape(clients, each)))


def worker(network: Callable[[], nn.Module], loop: LocalSGD, data: RunData) -> Worker:
    device = default_device()
    module = Classifier(network(), lr=0.1, mean=(0.5,) * 3, std=(0.25,) * 3)
    return Worker(Work(module, device, loop), FedAvg(), data.to(device))


def course(
    clients: Clients, share: float, loop: LocalSGD, network: Callable[[], nn.Module], executor: Executor | None = None
) -> Iterator[Standing]:
    """Yield the state of the server after each round of FedAvg, without evaluation."""
    data = RunData(clients, clients, {})
    build = partial(worker, network, loop)
    start = FedAvg().start(build(data).work.snapshot(), facts := Facts(len(clients), clients.sizes, 10**9), 0)
    plan = Plan(facts, share, 4, 0)
    return (now for now, _ in rounds.run(FedAvg(), executor or Serial(build, data), plan, Standing(0, start)))


def rate(rounds_: Iterator[Standing], seconds: float = 3.0, least: int = 3) -> tuple[float, Standing]:
    """Return rounds per second after two warm-up rounds, and the state of the server after the last round."""
    last = [*islice(rounds_, 2)][-1]
    started, n = time.perf_counter(), 0
    while n < least or time.perf_counter() - started < seconds:
        last, n = next(rounds_), n + 1
    return n / (time.perf_counter() - started), last


def digest() -> str:
    """Return a hash of the models' bits after two rounds of each method in this process."""
    hasher = sha256()
    for method in METHODS:
        standing = two_rounds(method(), digits().on(default_device()))
        hasher.update(standing.model.buffer.cpu().numpy().tobytes())
    return hasher.hexdigest()[:16]


def same_bits_twice() -> Seen:
    others = [
        subprocess.run([sys.executable, __file__, "--digest"], capture_output=True, text=True, encoding="utf-8")
        for _ in range(2)
    ]
    hashes = {digest(), *(other.stdout.strip() for other in others)}
    return len(hashes) == 1, f"two rounds of {len(METHODS)} methods in three processes: {sorted(hashes)}"


def as_on_the_cpu() -> Seen:
    faults = []
    for method in METHODS:
        try:
            check_on(default_device().type)(method(), digits())
        except AssertionError as error:
            faults.append(f"{method.__name__}: {error}")
    return not faults, "; ".join(faults) or f"{len(METHODS)} methods, two rounds, up to rounding"


def no_step_waits() -> Seen:
    """Check that no call waits for the GPU from a client's second step on; torch raises an error at such a call."""
    inside = worker(small_network, replace(LOOP, batch_size=5), RunData(c := images(1, 50), c, {}))
    step = inside.work.module.training_step

    def watched(batch: tuple[Tensor, ...], number: int) -> Tensor:
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        value = step(batch, number)
        assert isinstance(value, Tensor)
        return value

    inside.work.module.training_step = watched
    try:
        inside.work.local(inside.work.initial, inside.data.clients[0], 0)
    except RuntimeError as error:
        return False, f"{error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True, "nine steps, none waits"


def launches() -> Seen:
    """Check the number of GPU kernels per step, from the difference between trainings of 20 and of 10 steps."""
    counts = []
    for n in (100, 200):
        inside = worker(small_network, LOOP, RunData(c := images(1, n), c, {}))
        inside.work.local(inside.work.initial, inside.data.clients[0], 0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            inside.work.local(inside.work.initial, inside.data.clients[0], 0)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() or () if e.device_type.name == "CUDA" and "Memcpy" not in e.name]
        counts.append(len(kernels))
    each = (counts[1] - counts[0]) / 10
    return 0 < each <= 3 * PLAIN, f"{each:g} kernels a step; operations on the pretended GPU: {PLAIN}"


def precisions() -> Seen:
    speeds, clients = {}, images(10, 500)
    for precision in ("fp32", "tf32", "bf16"):
        loop = replace(LOOP, batch_size=100, precision=precision)
        speeds[precision] = 50 * rate(course(clients, 1.0, loop, pfl_network))[0]
    text = ", ".join(f"{name} {value:.0f}" for name, value in speeds.items())
    return speeds["tf32"] >= 0.9 * speeds["fp32"], f"steps a second, B = 100, pfl's network: {text}"


def at_once() -> Seen:
    """Check that batches of clients and of private examples are fast, and equal single ones up to rounding."""
    clients, off, results = images(20, 50), [], []
    private = replace(LOOP, dp=DPSGD(1.0, 1.0))
    for name, single, many in (
        ("batched clients", LOOP, replace(LOOP, batched=True)),
        ("dp.at_once 64", private, replace(private, dp=DPSGD(1.0, 1.0, at_once=64))),
    ):
        first = [next(course(clients, 1.0, loop, small_network)).model.buffer.cpu() for loop in (single, many)]
        off.append(float((first[0] - first[1]).norm() / first[0].norm()))
        speed = [rate(course(clients, 1.0, loop, small_network))[0] for loop in (single, many)]
        results.append((speed[1] / speed[0], f"{name}: {speed[1] / speed[0]:.2f} times as fast, {off[-1]:.1e} apart"))
    return max(off) < 1e-3 and min(faster for faster, _ in results) >= 1, "; ".join(text for _, text in results)


def graphs() -> Seen:
    """Check that CUDA graphs give the same bits as without, also with batch norm and dropout, and are faster."""
    other, device = [], default_device()
    for method in METHODS:
        plain = partial(digits, (9, 5, 14), method=method())
        for each in (plain(), plain(momentum=0.9) if method is FedAvg else plain(dropout=0.3, batch_norm=True)):
            clients = each.training(LocalSGD(2, 4, clip_norm=1.0)).on(device)
            by_graphs = clients.training(replace(clients.loop, graphs=True))
            ends = [bits(two_rounds(method(), each)) for each in (clients, by_graphs, clients)]
            if not ends[0] == ends[1] == ends[2]:
                other.append(f"{method.__name__}: other {differing(ends[0], ends[1])}")
    results = []
    for precision in ("fp32", "tf32", "bf16"):
        loops = [LocalSGD(1, 10, precision=precision, graphs=by_graphs) for by_graphs in (False, True)]
        speeds = [rate(course(images(20, 50), 1.0, loop, pfl_network))[0] for loop in loops]
        results.append((speeds[1] / speeds[0], f"{precision} {speeds[1] / speeds[0]:.2f} times as fast"))
        first = [next(course(images(20, 50), 1.0, loop, pfl_network)).model.buffer for loop in loops]
        other += [] if torch.equal(*first) else [f"pfl's network, {precision}"]
    text = ", ".join(text for _, text in results)
    return not other and min(faster for faster, _ in results) >= 1, "; ".join([text, *other])


def actors() -> Seen:
    from fedcommons.federation.ray_executor import RayActors

    clients, texts, bits = images(8, 500), [], set[bytes]()
    data = RunData(clients, clients, {})
    ray_cluster.connect(num_cpus=4)
    for n in (1, 2, 4):
        executor = RayActors(partial(worker, pfl_network, LOOP), data, n, 1 / n)
        rounds_ = course(clients, 1.0, LOOP, pfl_network, executor)
        bits.add(next(rounds_).model.buffer.numpy().tobytes())
        texts.append(f"{n}: {rate(rounds_)[0]:.2f}")
        executor.close()
    return len(bits) == 1, f"actors on the GPU and rounds a second: {', '.join(texts)}; {len(bits)} different bits"


def a_share() -> Seen:
    with patch.dict(os.environ):  # the measurement changes the environment of its process
        need, total = gpu_share.measured(".", experiment("smoke", values={"federation.gpus_per_actor": "auto"}))
    share = gpu_share.share(need, total, 4, 1)
    return 0 < need < total and share == 0.25, f"{need / 2**20:.0f} of {total / 2**20:.0f} MiB: a share of {share:g}"


def a_full_gpu() -> Seen:
    """Check that an out-of-memory error names the client, and that the same worker's next job is correct."""
    clients = images(4, 50)
    inside = worker(small_network, LOOP, RunData(clients, clients, {}))
    right = next(course(clients, 1.0, LOOP, small_network)).model.buffer.clone()
    real = inside.work.module.training_step

    def full(batch: tuple[Tensor, ...], number: int) -> Tensor:
        return torch.empty(2**50, dtype=torch.uint8, device=batch[0].device)

    inside.work.module.training_step = full
    data, message = inside.data, ""
    try:
        next(course(clients, 1.0, LOOP, small_network, executor := Serial(lambda _: inside, data)))
    except torch.OutOfMemoryError:
        message = "not reported as a client's error"
    except ClientError as error:
        message = error.sentence
    inside.work.module.training_step = real
    after = next(course(clients, 1.0, LOOP, small_network, executor)).model.buffer
    return "out of memory" in message and torch.equal(after, right), message[:120]


def a_lost_gpu() -> Seen:
    """Check, in a separate process, the error after a failed assertion on the device."""
    done = subprocess.run([sys.executable, __file__, "--lose"], capture_output=True, text=True, encoding="utf-8")
    output = done.stdout.strip() or done.stderr.strip()
    return output.endswith("lost, and nothing begins"), output[-1500:]


def lose() -> str:
    """Break this process's GPU by an invalid label, try to start again, and return the observation."""
    clients = images(1, 10)
    clients.store.y.fill_(77)
    try:
        next(course(clients, 1.0, LOOP, small_network))
    except ClientError as error:
        message = error.sentence[:80]
    else:
        return "no error"
    try:
        default_device()
    except UserError:
        return f"{message}: lost, and nothing begins" if gpu_memory.is_lost() else f"{message}: not known as lost"
    return f"{message}: the next experiment would begin"


LOSES = '''
from dataclasses import dataclass
from pathlib import Path

import torch

from fedcommons.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Loses(FedAvg):
    """FedAvg; the first process that trains a client loses its GPU."""

    def client(self, *arguments):
        mark = Path(__file__).parent / "lost"
        if not mark.exists():
            mark.touch()
            torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
        return super().client(*arguments)
'''


def a_sweep_that_loses_a_gpu() -> Seen:
    """Check that a sweep whose first process loses its GPU finishes in other processes, with the same results."""
    fields = {"algorithm": "lab.py:Loses", "federation.rounds": 2, "client.epochs": 1, "tracking.wandb": "off"}
    before, runs = Path.cwd(), list[list[float]]()
    with TemporaryDirectory() as folder:
        Path(folder, "lab.py").write_text(LOSES, encoding="utf-8")
        os.chdir(folder)
        try:
            experiments = [experiment("smoke", values={**fields, "seed": seed}) for seed in (0, 1, 2)]
            for name in ("first", "second"):  # the GPU is not lost in the second sweep
                runs.append(sweep(experiments, name).sort_values("seed")["last_accuracy"].tolist())
            return runs[0] == runs[1] and Path("lost").exists(), f"accuracies {runs[0]}, without a loss {runs[1]}"
        finally:
            os.chdir(before)


def pfl_definition() -> Seen:
    """Check the seconds of pfl's 1,500 rounds: without and with CUDA graphs, and in actors that share the GPU."""
    from fedcommons.federation.ray_executor import RayActors

    assert sum(p.numel() for p in pfl_network().parameters()) == 1_626_442
    clients, seconds, models = images(1000, 50), dict[str, float](), dict[str, set[bytes]]()
    data = RunData(clients, clients, {})
    ray_cluster.connect(num_cpus=max(ACTORS))

    def measure(name: str, loop: LocalSGD, executor: Executor | None = None) -> None:
        models.setdefault(loop.precision, set())
        rounds_ = course(clients, 0.05, loop, pfl_network, executor)
        models[loop.precision].add(next(rounds_).model.buffer.numpy().tobytes())
        seconds[f"{loop.precision} {name}"] = ROUNDS / rate(rounds_, seconds=6)[0]
        if executor:
            executor.close()

    for precision in ("fp32", "tf32", "bf16"):
        loop = replace(LOOP, precision=precision, graphs=True)
        measure("step by step", replace(loop, graphs=False))
        measure("graphs", loop)
        for n in ACTORS:
            executor = RayActors(partial(worker, pfl_network, loop), data, n, 1 / n)
            measure(f"graphs in {n} actors", loop, executor)
    same = all(len(different) == 1 for different in models.values())
    each = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    return same and min(
        seconds.values()
    ) <= SECONDS, f"{ROUNDS} rounds: {each}; goal {SECONDS:.0f} s; same bits: {same}"


CHECKS: tuple[Callable[[], Seen], ...] = (
    same_bits_twice, as_on_the_cpu, no_step_waits, launches, precisions, at_once, graphs, actors, a_share, a_full_gpu,
    a_lost_gpu, a_sweep_that_loses_a_gpu, pfl_definition,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, separated by commas: checks with one of them in their names")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lose", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here: nothing was tried.", file=sys.stderr)
        return 2
    if options.digest or options.lose:
        print(digest() if options.digest else lose())
        return 0
    print(f"{machine()}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", flush=True)
    failed = 0
    for check in CHECKS:
        if not any(word in check.__name__ for word in options.only.split(",")):
            continue
        started = time.perf_counter()
        try:
            passed, text = check()
        except Exception as error:  # the other checks are still informative
            passed, text = False, f"{type(error).__name__}: {error}"
        failed += not passed
        seconds = time.perf_counter() - started
        print(f"{'PASS' if passed else 'FAIL'} {check.__name__} ({seconds:.0f} s): {text}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
