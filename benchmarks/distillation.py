"""CPU seconds per server epoch of DENSE and Co-Boosting, compared with bare loops of the same work, in turns.

python benchmarks/distillation.py [--repeats 5] [--clients 5] [--side 8] [--epochs 3]

Each epoch trains a generator of width 32 for 10 steps, adds 64 of its images to the pool of synthetic images, and
trains the small CNN on the pool. Images have one channel, or three with side 32. The bare loops have a network per
client and contain only the arithmetic. Goal: a ratio of 1.1.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import torch
from round_time import cpu_name
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.coboosting import CoBoosting
from fedcommons.algorithms.dense import DENSE
from fedcommons.algorithms.ensemble import Upsampler
from fedcommons.algorithms.one_shot_models import teach
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, set_up_process
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from lightning_modules import Classifier
from lightning_modules.networks import CNN

STEPS = 10


def kl(target: Tensor, other: Tensor, t: float) -> Tensor:
    """Return t^2 KL(softmax(target/t) || softmax(other/t)) of each row of logits."""
    return t**2 * F.kl_div((other / t).log_softmax(1), (target / t).softmax(1), reduction="none").sum(1)


def bare(module: Classifier, epochs: int, shape: tuple[int, ...], clients: list[nn.Module], how: Any) -> None:
    """Run server epochs of ``how`` (DENSE or Co-Boosting) with these client networks in plain torch."""
    boosts, student, normalise = isinstance(how, CoBoosting), copy.deepcopy(module), module.normalise
    decay = how.server_decay if boosts else 0.0
    sgd = torch.optim.SGD(student.parameters(), how.server_lr, how.server_momentum, weight_decay=decay)
    w = torch.full((len(clients),), 1 / len(clients))
    pool, logits, labels = (
        torch.zeros(0, *shape, dtype=torch.uint8),
        torch.zeros(len(clients), 0, 10),
        torch.zeros(0).long(),
    )

    def each(x: Tensor) -> Tensor:
        return torch.stack([client(x) for client in clients])

    def mixed(f: Tensor) -> Tensor:
        return torch.tensordot(w / w.sum(), f, 1)

    for _ in range(epochs):
        network = Upsampler(shape, how.latent, how.width)
        z, y = torch.randn(how.generated, how.latent).requires_grad_(), torch.randint(10, (how.generated,))
        adam = torch.optim.Adam([*network.parameters(), z], how.generator_lr, (0.5, 0.999))
        best, best_pixels = float("inf"), torch.zeros(0)
        student.eval().requires_grad_(False)
        for _ in range(how.generator_steps):
            pixels = network(z)
            x = normalise(255 * pixels)
            f, s = mixed(each(x)), student(x)
            apart = kl(f, s, how.boundary_temperature)
            if boosts:
                ce = F.cross_entropy(f, y, reduction="none")
                loss = ((1 - (-ce.detach()).exp()) * ce - apart).mean()
            else:
                loss = F.cross_entropy(f, y) - ((f.argmax(1) != s.argmax(1)) * apart).mean()
            if (value := float(loss.detach())) < best:
                best, best_pixels = value, pixels.detach()
            adam.zero_grad()
            loss.backward()
            if boosts:
                nn.utils.clip_grad_norm_(network.parameters(), how.clip)
            adam.step()
        if boosts and len(pool):
            for rows in torch.randperm(len(pool)).split(how.server_batch):
                v = w.requires_grad_()
                (g,) = torch.autograd.grad(
                    F.cross_entropy(torch.tensordot(v / v.sum(), logits[:, rows], 1), labels[rows]), v
                )
                w = (w.detach() - how.weight_step * g.sign()).clamp(0, 1)
        images = (255 * best_pixels).round().to(torch.uint8)
        with torch.no_grad():
            logits = torch.cat([logits, each(normalise(images))], 1)
        pool, labels = torch.cat([pool, images]), torch.cat([labels, y])
        student.train().requires_grad_(True)
        for rows in torch.randperm(len(pool)).split(how.server_batch):
            x, target = normalise(pool[rows]), mixed(logits[:, rows])
            if boosts:
                pixels = (pool[rows] / 255).requires_grad_()
                u = 2 * torch.rand(len(rows), 10) - 1
                f = mixed(each(normalise(255 * pixels)))
                (g,) = torch.autograd.grad((u * (f / how.temperature).softmax(1)).sum(), pixels)
                x = normalise(255 * (pixels.detach() + how.move / 255 * g.sign()))
                with torch.no_grad():
                    target = mixed(each(x))
            sgd.zero_grad()
            kl(target, student(x), how.temperature).mean().backward()
            if boosts:
                nn.utils.clip_grad_norm_(student.parameters(), how.clip)
            sgd.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--side", type=int, default=8, help="pixels on a side; 32 has three channels")
    parser.add_argument("--epochs", type=int, default=3, help="of the server")
    options = parser.parse_args()
    set_up_process()
    torch.manual_seed(0)
    shape = (3 if options.side == 32 else 1, options.side, options.side)
    module, n = Classifier(CNN(shape, 10), lr=0.1), options.clients
    clients: list[nn.Module] = [Classifier(CNN(shape, 10), lr=0.1).eval().requires_grad_(False) for _ in range(n)]
    store = Examples(torch.zeros((0, *shape), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    empty = Clients(store, [np.zeros(0, int)])
    work, flat = Work(module, torch.device("cpu"), LocalSGD(1, 32)), [
        torch.cat([p.reshape(-1) for p in client.parameters()]) for client in clients
    ]  # fmt: skip
    state = {
        "model": work.initial, "ensemble": torch.stack(flat), "weights": torch.full((n,), 1 / n),
        "statistics": torch.zeros(n, 0), "velocity": torch.zeros_like(work.initial.buffer),
    }  # fmt: skip
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}")
    print(f"\n{n} clients, {shape}, {options.epochs} epochs:\n")
    print("| | CPU seconds an epoch | bare | ratio |\n|---|---|---|---|")
    for how in (DENSE, CoBoosting):
        method: Any = how(server_epochs=options.epochs, generator_steps=STEPS)
        worker = Worker(work, method, RunData(empty, empty, n_classes=10))
        plain = copy.deepcopy(Classifier(CNN(shape, 10), lr=0.1))
        calls: tuple[Callable[[], object], ...] = (
            lambda worker=worker, method=method: teach(worker, ServerTask(method, state, 1), 0),
            lambda plain=plain, method=method: bare(plain, options.epochs, shape, clients, method),
        )
        seconds: tuple[list[float], ...] = ([], [])
        for repeat in range(options.repeats + 1):
            for call, times in zip(calls, seconds, strict=True):
                start = time.process_time()
                call()
                if repeat:
                    times.append((time.process_time() - start) / options.epochs)
        ours, other = (statistics.median(times) for times in seconds)
        print(f"| {how.__name__} | {ours:.4f} | {other:.4f} | {ours / other:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
