"""Cost of measuring zeta^2, sigma^2 and the smoothness L: CPU seconds, as multiples of a plain pass, and memory.

python benchmarks/estimators.py [vgg11 cnn] [--json] [--repeats 5] [--steps 100]

vgg11: 10 clients of 64 random 32x32 images. cnn: the small CNN on all digits, 10 clients. A plain pass is a
forward and backward pass over the same examples in batches of the same size and in evaluation mode; it runs in turns
with the measurement. Goals: zeta^2 and sigma^2 of all clients cost at most 1.6 passes with vgg11, 3 with cnn. L is
measured for the first client, by at most --steps products of the Lanczos iteration, in passes over that client's data.
Memory, only with vgg11 and on Linux: the largest resident size of a fresh process, minus that of a process that makes a
plain pass and keeps the gradients. It is measured for one batch's mean gradient and per-sample norms, and for the whole
measurement, with server and worker in one process. Goal: 100 MB; explicit per-sample gradients of one batch would take
32 times the model.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from memory import apart, resident
from round_time import machine
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.schema import Data
from fedcommons.convergence.estimators import BATCH, moments
from fedcommons.convergence.per_sample import gradients
from fedcommons.convergence.smoothness import hessian_vector, spectral_norm
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, set_up_process
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.federation.serial_executor import Serial
from fedcommons.runs.build import load
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11

NETWORKS = ("vgg11", "cnn")
N_CLIENTS = 10
BLOCKS = 4
GOALS = {"vgg11": 1.6, "cnn": 3.0}  # passes
GOAL_MB = 100


def federation(name: str) -> Serial:
    """Return a serial executor whose worker has the network and the data of ``N_CLIENTS`` clients."""
    torch.manual_seed(0)
    if name == "vgg11":
        n = N_CLIENTS * 64
        store, network = Examples(torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))), VGG11((3, 32, 32), 10)
    else:
        store, network = load(Data("digits")).train, CNN((1, 8, 8), 10)
    clients = Clients(store, np.array_split(np.arange(len(store)), N_CLIENTS))

    def build(data: RunData) -> Worker:
        return Worker(Work(Classifier(network, lr=0.1), torch.device("cpu"), LocalSGD(1, BATCH)), FedAvg(), data)

    return Serial(build, RunData(clients, clients, {}))


def plain(executor: Serial, n_clients: int = N_CLIENTS) -> None:
    """Run a plain pass over the examples of the first ``n_clients`` clients; the last batch's gradients stay."""
    work, clients = executor.worker.work, executor.worker.data.real
    work.module.eval()
    for i in range(n_clients):
        examples = clients[i]
        for batch in zip(examples.x.split(BATCH), examples.y.split(BATCH), strict=True):
            for parameter in work.module.parameters():
                parameter.grad = None
            loss = work.module.training_step(batch, 0)
            assert isinstance(loss, Tensor)
            loss.backward()


def measured(executor: Serial) -> None:
    """Measure zeta^2 and sigma^2 over all clients."""
    estimates = moments(executor, ModelTask(executor.worker.work.initial), "own", N_CLIENTS, BLOCKS)
    assert estimates.zeta_sq > 0 < estimates.sigma_sq


def seconds_of(act: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, which depend little on other load of the machine."""
    start = time.process_time()
    act()
    return time.process_time() - start


def in_turns(*acts: Callable[[], object], repeats: int) -> list[float]:
    """Return the median CPU seconds of each function; the functions run in turns, after one warm-up each."""
    seconds = [[seconds_of(act) for act in acts] for _ in range(repeats + 1)][1:]
    return [statistics.median(s) for s in zip(*seconds, strict=True)]


def lanczos(executor: Serial, most: int) -> tuple[float, int]:
    """Return the CPU seconds and the number of products of the Lanczos iteration for L of the first client."""
    module, examples, steps = executor.worker.work.module, executor.worker.data.real[0], 0
    batches = list(zip(examples.x.split(BATCH), examples.y.split(BATCH), strict=True))

    def apply(v: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return hessian_vector(module, batches, v)

    start = torch.randn(executor.worker.work.initial.layout.size, dtype=torch.float64)
    return seconds_of(lambda: spectral_norm(apply, start, most=most)), steps


def times(name: str, repeats: int, most: int) -> dict[str, float]:
    executor = federation(name)
    base, whole = in_turns(partial(plain, executor), partial(measured, executor), repeats=repeats)
    (of_first,) = in_turns(partial(plain, executor, 1), repeats=repeats)
    l_s, steps = lanczos(executor, most)
    return {"plain_s": base, "moments_s": whole, "moments": whole / base, "l": l_s / of_first, "l_steps": steps}


def one_batch(executor: Serial) -> None:
    """Compute the mean gradient and the squared norms of per-sample gradients of one batch."""
    examples = executor.worker.data.real[0]
    gradients(executor.worker.work.module, (examples.x[:BATCH], examples.y[:BATCH]))


def peak(act: Callable[[Serial], None]) -> dict[str, float]:
    """Run ``act`` on VGG-11 and return the largest resident size of this process, in MB."""
    act(federation("vgg11"))
    return {"mb": resident(largest=True)}  # getrusage would include the parent's memory from before exec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK", help="vgg11, cnn")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, as the last line")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each kind")
    parser.add_argument("--steps", type=int, default=100, help="most products with the Hessian")
    options = parser.parse_args()
    if unknown := set(options.networks) - set(NETWORKS):
        parser.error(f"unknown network {', '.join(sorted(unknown))}; known: {', '.join(NETWORKS)}")
    set_up_process()
    print(machine())
    print("| network | plain pass | zeta², sigma² | passes | goal | L: passes | steps |\n" + 7 * "|---" + "|")
    results: dict[str, dict[str, float]] = {}
    for name in options.networks:
        results[name] = apart(partial(times, name, options.repeats, options.steps))
        f = results[name]
        print(f"| {name} | {f['plain_s']:.3f} s | {f['moments_s']:.3f} s | {f['moments']:.2f} | {GOALS[name]:g} "
              f"| {f['l']:.0f} | {f['l_steps']} |", flush=True)  # fmt: skip
    if "vgg11" in options.networks:
        mb = {act.__name__: apart(partial(peak, act))["mb"] for act in (plain, one_batch, measured)}
        more = {name: mb[name] - mb["plain"] for name in ("one_batch", "measured")}
        explicit = BATCH * sum(p.numel() * p.itemsize for p in VGG11((3, 32, 32), 10).parameters()) / 1e6
        results["memory"] = mb
        print("\n| vgg11, batch of 32 | plain pass | a batch's norms | zeta², sigma² | goal | per-sample gradients |\n"
              + 6 * "|---" + "|")  # fmt: skip
        print(f"| resident at most | {mb['plain']:.0f} MB | {more['one_batch']:+.0f} MB | {more['measured']:+.0f} MB "
              f"| {GOAL_MB:+} MB | {explicit:+.0f} MB (not measured) |", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({name: {k: round(v, 3) for k, v in values.items()} for name, values in results.items()}))


if __name__ == "__main__":
    sys.exit(main())
