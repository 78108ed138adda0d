"""Runs in threads, and in processes whose settings somebody has changed: the bits of a run alone, or a sentence."""

import asyncio
import gc
import json
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults import cases
from faults.cases import Case
from faults.places import RUNS
from faults.processes import Ended
from faults.runs import Script
from faults.strangers import experiment
from faults.verdicts import Fault

import fedcommons as fc

SAME = ("rounds.jsonl", "summary.json")
"""Files of a run that are the same, byte for byte, wherever it runs."""


def _run(kind: str, out: str) -> fc.Result:
    return fc.run(experiment(kind), out, say=lambda text: None)


def _two(kind: str, other: str) -> Callable[[], object]:
    """Two runs in two threads; each ends, or is told in a sentence."""

    def act() -> str:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(_run, one, f"out{i}") for i, one in enumerate((kind, other))]
            errors = [one.exception() for one in both]
        for error in errors:
            if error and not isinstance(error, fc.UserError):
                raise error
        if all(errors):
            raise RuntimeError("neither went on")
        return " | ".join(str(error) for error in errors)

    return act


def _beside(kind: str, busy: Callable[[threading.Event], None]) -> Callable[[], object]:
    """A run beside a thread of the user's."""

    def act() -> str:
        stop = threading.Event()
        thread = threading.Thread(target=busy, args=(stop,), daemon=True)
        thread.start()
        try:
            return str(len(_run(kind, "out0").rounds))
        finally:
            stop.set()
            thread.join()

    return act


def _computes(stop: threading.Event) -> None:
    """With generators of its own: torch's default ones are the run's."""
    torchs, numpys = torch.Generator(), np.random.default_rng()
    while not stop.is_set():
        torch.rand(30, 30, generator=torchs).inverse()
        numpys.normal(size=30)


async def _awaited(kind: str) -> fc.Result:
    return _run(kind, "out0")


async def _in_thread(kind: str) -> fc.Result:
    return await asyncio.to_thread(_run, kind, "out0")


async def _gathered(kind: str) -> list[Any]:
    both = await asyncio.gather(*(asyncio.to_thread(_run, kind, f"out{i}") for i in range(2)), return_exceptions=True)
    for one in both:
        if isinstance(one, BaseException) and not isinstance(one, fc.UserError):
            raise one
    return both


@contextmanager
def _dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """A setting of the process; the caller finds it as it set it."""
    setter(value)
    yield
    setter(before)


def _env(name: str, value: str) -> ExitStack:
    os.environ[name] = value
    return ExitStack()


@contextmanager
def _interrupted() -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


WITHIN: Mapping[str, Callable[[], Any]] = {
    "torch.autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "torch.autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "matmul precision medium": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "matmul precision high": lambda: _set(torch.set_float32_matmul_precision, "high", "highest"),
    "default dtype float64": _dtype,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad disabled": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: _set(torch.set_default_device, "meta", None),
    "flush denormals": lambda: _set(torch.set_flush_denormal, True, False),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "two threads of torch": lambda: _set(torch.set_num_threads, 2, 1),
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "seeded": lambda: _set(torch.manual_seed, 7, 8),
    "np.errstate raise": lambda: np.errstate(all="raise"),
    "warnings are errors": lambda: _set(warnings.simplefilter, "error", "default"),
    "recursion limit 200": lambda: _set(sys.setrecursionlimit, 250, 1000),
    "no garbage collection": lambda: _set(lambda on: gc.enable() if on else gc.disable(), False, True),
    "umask 077": lambda: _set(os.umask, 0o077, 0o022),
    "an alarm 100 times a second": _interrupted,
    "ONEDNN_DEFAULT_FPMATH_MODE=BF16": lambda: _env("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
    "MKL_CBWR=COMPATIBLE": lambda: _env("MKL_CBWR", "COMPATIBLE"),
    "ATEN_CPU_CAPABILITY=default": lambda: _env("ATEN_CPU_CAPABILITY", "default"),
    "PYTHONHASHSEED=1": lambda: _env("PYTHONHASHSEED", "1"),
    "set_default_generator": lambda: _set(fc.set_default_generator, 5, 6),
    "sys.stdout None": lambda: _set(lambda out: setattr(sys, "stdout", out), None, sys.__stdout__),
}  # fmt: skip
"""Settings of the process within which a run must give the bits that it gives alone, or say that it cannot."""


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError as error:  # where old and new ways of setting it were mixed
        return str(error)


def _state() -> dict[str, Any]:
    """What a caller must find as it was."""
    return {
        "matmul precision": _precision(), "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"), "grad": torch.is_grad_enabled(), "cwd": os.getcwd(),
        "torch's draws": torch.random.get_rng_state().sum().item(), 
        "numpy's draws": str(np.random.get_state()),  # noqa: NPY002
       
        "Python's draws": hash(random.getstate()), "oneDNN": torch.backends.mkldnn.enabled, "errors": str(np.geterr()),
        "signals": str([signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]),
    }  # fmt: skip


def _within(kind: str, name: str, by_thread: bool) -> Callable[[], object]:
    """A run within a setting, which the caller finds as it was."""

    def act() -> str:
        with WITHIN[name]():
            before = _state()
            with ThreadPoolExecutor(1) as pool:
                gave = pool.submit(_run, kind, "out0").result() if by_thread else _run(kind, "out0")
            after = _state()
        changed = [what for what in before if before[what] != after[what]]
        Path("changed.json").write_text(json.dumps(changed), encoding="utf-8")
        return str(len(gave.rounds))

    return act


WAYS: Mapping[str, Callable[[str, str], Callable[[], object]]] = {
    "two threads": _two,
    "two threads, the same": lambda kind, other: _two(kind, kind),
    "an event loop": lambda kind, other: lambda: asyncio.run(_awaited(kind)),
    "a thread of an event loop": lambda kind, other: lambda: asyncio.run(_in_thread(kind)),
    "two in an event loop": lambda kind, other: lambda: asyncio.run(_gathered(kind)),
    "a thread that computes": lambda kind, other: _beside(kind, _computes),
}  # fmt: skip


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number: each setting once, then threads."""
    rng = random.Random(f"threads {seed} {number}")
    kind, other = rng.choice([*RUNS]), rng.choice([*RUNS])
    if number < len(WITHIN):
        name, by_thread = list(WITHIN)[number], rng.random() < 0.2
        what, action = f"{kind} within {name}{' in a thread' * by_thread}", _within(kind, name, by_thread)
    else:
        name = list(WAYS)[number % len(WAYS)]
        what, action = f"{kind}, {other} in {name}", WAYS[name](kind, other)

    def judge(here: Path, ended: Ended) -> list[Fault]:
        found = []
        for out in sorted(here.glob("out?")):
            if not (out / "summary.json").exists():
                continue  # it was refused
            one = kind if out.name == "out0" or "the same" in name or "two in" in name else other
            differ = [n for n in SAME if (out / n).read_bytes() != (templates / one / n).read_bytes()]
            mine, its = ((p / "environment.json").read_text() for p in (out, templates / one))
            if differ and mine == its:
                found.append(Fault("silent", f"{name}: another {differ[0]}", f"{out.name}, and nothing recorded"))
        if not list(here.glob("out?/summary.json")):
            found.append(Fault("silent", f"{name}: no result"))
        changed = json.loads(path.read_text()) if (path := here / "changed.json").exists() else []
        return found + [Fault("leftover", f"{name}: {what} of the caller") for what in changed]

    return Case(what, cases.api(action), judge=judge, seconds=60)
