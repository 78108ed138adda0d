"""CPU seconds per private DDPM step, compared with a plain step on the same images, in turns; and of an epsilon.

python benchmarks/private_step.py [--repeats 5]

A private step draws a Poisson sample (here with sampling rate q = 1: all images), clips each image's gradient, adds
seeded or secret noise, makes a step of Adam and updates the average of the weights. A plain step computes the module's
loss, a backward pass, a step of Adam and the average. Goals on 8x8 images: seeded / plain 2.2, and secret / seeded 1.4.
The privacy ledger holds a client's 10^5 private steps, with one or with ten different pairs of sampling rate q and
noise multiplier sigma. Goal for computing the epsilon: 0.1 s.
"""

import argparse
import secrets
import statistics
import time
from collections.abc import Iterator
from datetime import date
from functools import partial

import torch
from round_time import cpu_name

from fedcommons.core.worker import set_up_process
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.dp_training import per_image
from fedcommons.privacy import dp_sgd_vmap, salts
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from lightning_modules import ddpm

SHAPES = ((8, (16, 32), 64, 1), (28, (8, 16), 64, 1), (28, (16, 32, 32), 32, 1), (28, (16, 32, 32), 16, 4))
"""Side of an image, channels of the U-Net, images per physical batch, draws of noise and timestep per image."""


def plain_steps(model: ddpm.DDPM, x: torch.Tensor, y: torch.Tensor, draws: int) -> Iterator[None]:
    """Yield after each plain step on all images, with ``draws`` draws of noise and timestep per image."""
    optimizer = model.configure_optimizers()
    while True:
        optimizer.zero_grad()
        model.training_step((x.repeat(draws, 1, 1, 1), y.repeat(draws)), 0).backward()
        optimizer.step()
        model.on_train_batch_end()
        yield


def private_steps(model: ddpm.DDPM, x: torch.Tensor, y: torch.Tensor, draws: int, salt: bytes = b"") -> Iterator[None]:
    """Yield after each step of DP-SGD on the same images; salt: secret of the noise, empty for seeded noise."""
    loss, draw = per_image(model, draws)
    for _ in dp_sgd_vmap.steps(
        model, model.configure_optimizers(), loss, [x, y], draw, DPSGD(1.0, 1.0),
        batch_size=len(x), epochs=1000, physical_batch=len(x), noise=Noise(Source(0, salt)).call("benchmark", x, y),
    ):  # fmt: skip
        model.on_train_batch_end()
        yield


def seconds(side: int, channels: tuple[int, ...], images: int, draws: int, repeats: int) -> list[float]:
    """Return the median CPU seconds of a plain step and of private steps with seeded and with secret noise."""
    kinds = plain_steps, private_steps, partial(private_steps, salt=secrets.token_bytes(salts.SIZE))
    x = torch.randint(256, (images, 1, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = torch.arange(images) % 10
    running = [steps(DDPM(channels=channels).build((1, side, side), 10, 0), x, y, draws) for steps in kinds]
    timed: list[list[float]] = [[] for _ in kinds]
    for repeat in range(repeats + 2):
        for steps, times in zip(running, timed, strict=True):
            start = time.process_time()
            next(steps)
            times += [time.process_time() - start] if repeat > 1 else []
    return [statistics.median(times) for times in timed]


def query(ways: int, steps: int) -> float:
    """Return the CPU seconds of computing an epsilon without a cached result; ways: number of pairs (q, sigma)."""
    kind = SAMPLED_GAUSSIAN
    events = [
        Release(
            0,
            ("model",),
            mechanism=kind,
            q=0.01 * (k + 1),
            sigma=1.0 + 0.1 * k + 0.01 * ways,
            sensitivity=1.0,
            steps=steps // ways,
        )
        for k in range(ways)
    ]
    ledger = Ledger.before_rounds(events)
    start = time.process_time()
    ledger.epsilon_of_all(0, 1e-5)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each")
    options = parser.parse_args()
    set_up_process()
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}")
    print(
        "\n| side | channels | images | draws | plain step, s | seeded, s | secret, s | seeded/plain | secret/seeded |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for side, channels, images, draws in SHAPES:
        plain, seeded, secret = seconds(side, channels, images, draws, options.repeats)
        net, ratio = "-".join(map(str, channels)), f"{seeded / plain:.2f} | {secret / seeded:.2f}"
        print(
            f"| {side} | {net} | {images} | {draws} | {plain:.4f} | {seeded:.4f} | {secret:.4f} | {ratio} |", flush=True
        )
    query(2, 2)  # imports Opacus
    for ways in (1, 10):
        print(f"\nA client's epsilon of 10^5 steps, {ways} (q, sigma): {query(ways, 100_000):.4f} s.")


if __name__ == "__main__":
    main()
