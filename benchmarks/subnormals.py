"""Number and cost of subnormal float32 numbers in local steps, estimators and generators.

python benchmarks/subnormals.py

The program counts subnormal numbers in the results of all torch calls, except uninitialised memory. Then it measures
CPU seconds of the same run with and without ``torch.set_flush_denormal``. On Intel's CPUs, operations on subnormal
numbers may take a hundred times longer than on normal numbers, on AMD's little longer. Runs are longer than in preset
smoke.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from round_time import machine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcommons.config.dotted import override
from fedcommons.config.presets import experiment as of_preset
from fedcommons.runs import experiment

TINY = torch.finfo(torch.float32).tiny

RUNS: Mapping[str, Mapping[str, Any]] = {
    "SGD, lr 0.3": {"client.lr": 0.3, "client.epochs": 20},
    "momentum 0.9, weight decay 0.01": {"client.momentum": 0.9, "client.weight_decay": 0.01, "client.epochs": 20},
    "Adam, lr 0.01": {"client.optimizer": "adam", "client.lr": 0.01, "client.epochs": 20},
    "DP-SGD": {"dp.local": True, "client.epochs": 20},
    "estimators": {"measure.every": 1, "client.epochs": 20},
    "DDPMs": {"sharing.setting": "shuffled_synthetic", "generator.epochs": 60},
}


class Count(TorchDispatchMode):
    """Count the float32 numbers that torch calls return, and the subnormal ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.subnormal = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" not in str(func):
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and not t.is_meta:
                    size = t.detach().abs()
                    self.numbers += t.numel()
                    self.subnormal += int(((size > 0) & (size < TINY)).sum())
        return result


def seconds(fields: Mapping[str, Any], flush: bool) -> float:
    """Return the CPU seconds of a run; flush: whether subnormal numbers are set to zero."""
    as_it_is = torch.set_flush_denormal
    with tempfile.TemporaryDirectory() as folder, patch("torch.set_flush_denormal", lambda on: as_it_is(flush)):
        began = time.process_time()
        play(fields, Path(folder))
        return time.process_time() - began


def play(fields: Mapping[str, Any], folder: Path) -> None:
    """Run an experiment of preset smoke with these fields; an empty folder of artifacts makes generators train anew."""
    off = {"tracking.wandb": "off", "artifacts": str(folder / "artifacts")}
    experiment.run(override(of_preset("smoke", "digits"), {**fields, **off}), folder / "run", say=lambda _: None)


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print("| run | subnormal | as they are, s | flushed, s | ratio |\n" + 5 * "|---" + "|")
    for name, fields in RUNS.items():
        count = Count()
        with tempfile.TemporaryDirectory() as folder, count:
            play(fields, Path(folder))
        plain, flushed = ([seconds(fields, flush) for _ in range(3)] for flush in (False, True))
        plain_s, flushed_s = statistics.median(plain), statistics.median(flushed)
        share = 100 * count.subnormal / count.numbers
        print(f"| {name} | {share:.2g} % | {plain_s:.3g} | {flushed_s:.3g} | {flushed_s / plain_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
