"""CPU seconds of a FedDM client's matching iterations on ConvNet, compared with bare loops of the same work, in turns.

python benchmarks/feddm.py [--repeats 5] [--classes 10] [--images 32] [--side 32]

The client has --images real images of each class, with three channels, 10 synthetic images per class (ipc), and a
ConvNet of width 32. The bare loops draw weights, run forward and backward passes and make steps, without the package:
either with all classes in one forward pass, or with a pass for each class. Goals: ratios of 1.1 to the first loop,
which does the same work, and of 0.8 to the second.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
from round_time import cpu_name
from torch import Tensor

from fedcommons.algorithms.feddm import FedDM
from fedcommons.core.algorithm import Message
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import set_up_process
from fedcommons.data.clients import ClientData
from lightning_modules import Classifier
from lightning_modules.networks import ConvNet

ITERATIONS, IPC, RADIUS = 5, 10, 5.0


def bare(network: ConvNet, real: Tensor, labels: Tensor, at_once: bool) -> None:
    """Run the matching iterations; real: (k m, 3, side, side), m images of each of k classes, sorted by class.

    at_once: all classes in one forward pass (True), or a pass for each class (False).
    """
    weights, k = [p.detach().clone() for p in network.parameters()], int(labels[-1]) + 1
    images = real.unflatten(0, (k, -1))[:, :IPC].flatten(0, 1).clone().requires_grad_()
    optimizer = torch.optim.SGD([images], 1.0, 0.5)

    def features(x: Tensor) -> Tensor:
        h = network.embed(x)
        return torch.cat([h, network.last(h)], 1)

    def loss(x: Tensor, s: Tensor, classes: int) -> Tensor:
        with torch.no_grad():
            target = features(x).unflatten(0, (classes, -1)).mean(1)
        return (features(s).unflatten(0, (classes, -1)).mean(1) - target).square().sum()

    for _ in range(ITERATIONS):
        with torch.no_grad():
            steps = [torch.randn_like(w) for w in weights]
            factor = RADIUS / torch.stack([s.norm() for s in steps]).norm()
            for p, w, s in zip(network.parameters(), weights, steps, strict=True):
                p.copy_(w + factor * s)
        if at_once:
            (images.grad,) = torch.autograd.grad(loss(real, images, k), images)
        else:
            parts = zip(real.chunk(k), images.chunk(k), strict=True)
            gradients = [torch.autograd.grad(loss(x, s, 1), images)[0] for x, s in parts]
            images.grad = torch.stack(gradients).sum(0)
        optimizer.step()
    with torch.no_grad():
        for p, w in zip(network.parameters(), weights, strict=True):
            p.copy_(w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--images", type=int, default=32, help="real images of each class")
    parser.add_argument("--side", type=int, default=32, help="pixels on a side")
    options = parser.parse_args()
    set_up_process()
    labels = torch.arange(options.classes).repeat_interleave(options.images)
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(256, (len(labels), 3, options.side, options.side), generator=draws, dtype=torch.uint8)
    module = Classifier(ConvNet(tuple(x.shape[1:]), 10, width=32), lr=0.1)
    work, data = Work(module, torch.device("cpu"), LocalSGD(1, 32)), ClientData(x, labels)
    method, message = FedDM(ipc=IPC, iterations=ITERATIONS, radius=RADIUS), Message({"model": work.initial})
    network, real = module.network, module.normalise(x)
    assert isinstance(network, ConvNet)
    calls: dict[str, Callable[[], object]] = {
        "FedDM's client": lambda: method.client(work, message, {}, data, 1, 0),
        "bare, all classes at once": lambda: bare(network, real, labels, True),
        "bare, class by class": lambda: bare(network, real, labels, False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(options.repeats + 1):
        for name, call in calls.items():
            work.load(work.initial)
            start = time.process_time()
            call()
            if repeat:
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(s) / ITERATIONS for name, s in seconds.items()}
    ours = medians["FedDM's client"]
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}")
    print(f"\n{len(labels)} real images of {options.side}x{options.side}:\n")
    print("| | CPU seconds an iteration | FedDM's client against it |\n|---|---|---|")
    for name, s in medians.items():
        print(f"| {name} | {s:.4f} | {ours / s:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
