"""CPU milliseconds per training step of a DDPM: in fp32, bf16, channels-last layout and compiled, in turns.

python benchmarks/ddpm_steps.py [--repeats 5] [--compile]

Batches of 64 images and the U-Nets of preset small, in one process. ``--compile`` adds torch.compile, whose first step
takes minutes on two cores. The first step is measured in wall-clock seconds, as compilers run in other processes.
"""

import argparse
import statistics
import sys
import time
from datetime import date

import torch
from round_time import cpu_name

from fedcommons.core.worker import set_up_process
from fedcommons.seeding import set_default_generator
from lightning_modules.ddpm import DDPM

NETWORKS = (((1, 8, 8), (16, 32)), ((1, 28, 28), (16, 32, 32)), ((3, 32, 32), (16, 32, 32)))


class Stepping:
    """A DDPM and its optimizer; seconds: CPU seconds of each step; first: wall-clock seconds of the first step.

    way: text with the variant: ``fp32``, ``bf16``, ``channels last``, ``compiled``.
    """

    def __init__(self, way: str, shape: tuple[int, ...], channels: tuple[int, ...]) -> None:
        set_default_generator("initial weights")
        self.way, self.seconds, self.first = way, list[float](), 0.0
        self.model = DDPM(shape=shape, n_classes=10, channels=channels, lr=2e-3, schedule="squaredcos_cap_v2")
        if "channels last" in way:
            self.model.unet.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if way == "compiled":
            self.model.unet.compile()
        self.adam = torch.optim.Adam(self.model.parameters(), 2e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        start, clock = time.process_time(), time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in self.way):
            loss = self.model.training_step((x, y), 0)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.seconds.append(time.process_time() - start)
        self.first = self.first or time.perf_counter() - clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    options = parser.parse_args()
    set_up_process()
    ways = ["fp32", "fp32, channels last", "bf16", "bf16, channels last", *(["compiled"] if options.compile else [])]
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}\n")
    print("| images | U-Net | way | CPU ms a step | ratio to fp32 | first step, s |\n|---|---|---|---|---|---|")
    for shape, channels in NETWORKS:
        draws = torch.Generator().manual_seed(0)
        x = torch.randint(256, (64, *shape), dtype=torch.uint8, generator=draws)
        y = torch.randint(10, (64,), generator=draws)
        each = [Stepping(way, shape, channels) for way in ways]
        for _ in range(2 + options.repeats):
            for variant in each:
                variant.step(x, y)
        base = statistics.median(each[0].seconds[2:])
        for variant in each:
            took = statistics.median(variant.seconds[2:])
            size, net = "x".join(map(str, shape)), "-".join(map(str, channels))
            print(
                f"| {size} | {net} | {variant.way} | {1000 * took:.0f} | {took / base:.2f} | {variant.first:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
