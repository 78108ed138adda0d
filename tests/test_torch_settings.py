"""What a user has set in torch decides nothing here, and is theirs again afterwards."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, backends
from torch.nn import functional

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch
from fedcommons.federation import rounds
from fedcommons.federation.memory import ClientMemory
from fedcommons.runs import probe
from fedcommons.runs.build import assemble, prepare
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from fedcommons.testing import check_algorithm


def _settings() -> tuple:
    """What a caller can ask torch; some of it torch refuses to say, after a new setting has been used beside an old."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        backends.mkldnn.enabled,
        *(_said(ask) for ask in ASKED),
    )


def _said(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except RuntimeError as error:
        return str(error).partition("\n")[0]


ASKED: tuple[Callable[[], object], ...] = (
    lambda: torch.is_autocast_enabled("cpu"),
    lambda: torch.tensor([1e-39]).mul(0.5).item(),
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.get_float32_matmul_precision,
    lambda: backends.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: backends.mkldnn.matmul.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: backends.mkldnn.conv.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: backends.mkldnn.rnn.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: backends.cuda.matmul.fp32_precision,
    lambda: backends.cuda.matmul.allow_tf32,
    lambda: backends.cudnn.allow_tf32,
    lambda: backends.cudnn.conv.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
    lambda: backends.mkldnn.deterministic,
    lambda: torch._C._get_nnpack_enabled(),
    backends.mha.get_fastpath_enabled,
    backends.cuda.flash_sdp_enabled,
    backends.cuda.math_sdp_enabled,
    lambda: tuple(np.geterr().values()),
)


def _apart(action: Callable[[], object]) -> Any:
    """What it returns in a fork of this process, which takes all that it sets with it; JSON."""
    read, write = os.pipe()
    if not (process := os.fork()):
        try:
            os.write(write, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(process, 0)
    return json.loads(text)


def _quiet(text: str) -> None: ...


def _config(folder: Path, **values: object) -> Experiment:
    """MOON compares with models of the server. The limit is of no other test, whose data would be in memory."""
    base = {
        "federation.rounds": 1, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 1, "data.limit": 61,
        "algorithm": "moon", "artifacts": str(folder / "artifacts"),
    }  # fmt: skip
    return presets.experiment("smoke", "digits", {**base, **values})


def _run(folder: Path, **values: object) -> str:
    run(_config(folder, **values), folder / "run", say=_quiet)
    return "".join((folder / "run" / name).read_text() for name in ("rounds.jsonl", "summary.json", "partition.json"))


def _with_generators(folder: Path) -> str:
    """Their training and sampling draw numbers, which are others in another type."""
    fields = {
        "sharing.setting": "shuffled_synthetic", "generator.epochs": 1, "generator.sampling_steps": 2,
        "generator.channels": (8, 8), "measure.every": 0, "partition.n_clients": 2,
    }  # fmt: skip
    return _run(folder, **fields)


def _started(folder: Path) -> str:
    ready = assemble(prepare(_config(folder)))
    ready.executor().close()
    return str(ready.start(ClientMemory()).model.buffer.double().tolist())


def _by_hand(folder: Path) -> str:
    ready = assemble(prepare(_config(folder)))
    now, _ = next(rounds.run(ready.algorithm, ready.executor(), ready.plan, ready.start(ClientMemory())))
    return str(now.model.buffer.double().tolist())


def _ends_early(folder: Path) -> str:
    def stop(number: int, metrics: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(_config(folder), folder / "run", on_round=stop, say=_quiet)
    return ""


ENTRIES: dict[str, Callable[[Path], object]] = {
    "a run": lambda folder: _run(folder, **{"dp.local": True}),
    "a run with generators": _with_generators,
    "the model of its parts": _started,
    "a round by hand": _by_hand,
    "a run that ends early": _ends_early,
    "a probe": lambda f: probe.probe(_config(f, **{"algorithm": "fedavg", "model.name": "linear"}), None, _quiet),
    "a check": lambda folder: check_algorithm(FedAvg(), only=["two_rounds_keep_names_shapes_and_types"]),
    "a replay": lambda folder: replay(folder.parent / "usual" / "run", 1, 1, _quiet),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.long
def test_every_entry_gives_the_same_bits_and_the_settings_are_restored(name: str, tmp_path: Path) -> None:
    def under_settings() -> tuple[str, str, str]:
        for each in ("float64", "no gradients", "threads", "autocast", "no oneDNN"):
            SET[each]()
        before = str(_settings())
        return str(ENTRIES[name](tmp_path / "set")), before, str(_settings())

    if name == "a replay":
        _run(tmp_path / "usual", **{"data.limit": 60})
    found, before, after = _apart(under_settings)
    assert after == before or name in ("the model of its parts", "a round by hand")  # these begin a process of a run
    assert found == str(ENTRIES[name](tmp_path / "plain"))


SET: dict[str, Callable[[], object]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "autocast on a GPU": lambda: torch.autocast("cuda", torch.float16).__enter__(),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "tf32 for all": lambda: setattr(backends, "fp32_precision", "tf32"),
    "precision of all": lambda: setattr(backends, "fp32_precision", "bf16"),
    "precision of oneDNN": lambda: backends.mkldnn.flags(enabled=True, fp32_precision="bf16").__enter__(),
    "precision of its products": lambda: setattr(_of("mkldnn.matmul"), "fp32_precision", "bf16"),
    "precision of its convolutions": lambda: setattr(_of("mkldnn.conv"), "fp32_precision", "bf16"),
    "tf32 of cuDNN": lambda: setattr(_of("cudnn.conv"), "fp32_precision", "tf32"),
    "tf32 of cuBLAS": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "tf32 as before": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "no tf32 as before": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "old and new": lambda: (torch.set_float32_matmul_precision("medium"), setattr(backends, "fp32_precision", "tf32")),
    "denormals": lambda: torch.set_flush_denormal(True),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "device": lambda: torch.set_default_device("meta"),
    "no gradients": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: torch.inference_mode().__enter__(),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "anomalies but NaN": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic or warned": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "threads": lambda: torch.set_num_threads(2),
    "no oneDNN": lambda: setattr(backends.mkldnn, "enabled", False),
    "oneDNN deterministic": lambda: setattr(backends.mkldnn, "deterministic", True),
    "no NNPACK": lambda: backends.nnpack.set_flags(False),
    "no flash attention": lambda: backends.cuda.enable_flash_sdp(False),
    "no fast path": lambda: backends.mha.set_fastpath_enabled(False),
    "cuDNN": lambda: backends.cudnn.set_flags(False, True, 3, False),
    "numpy": lambda: np.seterr(all="raise"),
}
"""What one line of a caller's can set."""


def _of(name: str) -> object:
    owner, _, op = name.partition(".")
    return getattr(getattr(backends, owner), op)


def _work() -> str:
    """Numbers on which settings act (products, convolutions, attention, denormals, an overflow), and the settings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, w = torch.rand(20, 1, 8, 8), torch.rand(32, 1, 3, 3, requires_grad=True)
    hidden = functional.conv2d(x, w).relu().flatten(1)
    loss = functional.linear(hidden, torch.rand(10, hidden.shape[1])).square().mean()
    loss.backward()
    query, key, value = torch.rand(3, 2, 4, 16, 8)
    attended = functional.scaled_dot_product_attention(query, key, value)
    small, large = torch.full((3,), 1e-39) * 0.5, np.float64(1e308) * np.float64(10)
    found: list[Tensor | None] = [hidden, loss, w.grad, attended, small, torch.tensor([float(large)])]
    numbers = [(str(t.dtype), t.double().sum().item()) for t in found if t is not None]
    return f"{numbers} {_settings()}".replace("ieee", "none")  # which mean the same


@pytest.fixture(scope="module")
def plain() -> object:
    def work() -> str:
        with fresh_torch():
            return _work()

    return _apart(work)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET)
@pytest.mark.long
def test_no_setting_of_a_caller_changes_a_bit_and_each_is_restored(name: str, plain: object) -> None:
    def play() -> tuple[str, str, str]:
        SET[name]()
        before = str(_settings())
        with fresh_torch():
            found = _work()
        return found, before, str(_settings())

    found, before, after = _apart(play)  # pyright: ignore[reportGeneralTypeIssues]
    assert found == plain
    assert after == before
