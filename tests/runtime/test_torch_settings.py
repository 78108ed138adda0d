"""What a user has set in torch or the environment changes no bit, and is theirs again afterwards, or is refused."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, backends
from torch.nn import functional

from fedcommons import Experiment, UserError, check_algorithm, experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.worker import fresh_torch
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from fedcommons.runtime.rounding_env import ROUNDING
from fedcommons.tracking.run_folder import RunFolder

Context = Callable[[], AbstractContextManager]


def _settings() -> tuple:
    """What a caller can ask torch; some of it torch refuses to say, after a new setting has been used beside an old."""
    first = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*first, torch.get_default_device(), *(_query(ask) for ask in ASKED))


def _query(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except RuntimeError as error:
        return str(error).partition("\n")[0]


ASKED: tuple[Callable[[], object], ...] = (
    lambda: (torch.get_num_threads(), backends.mkldnn.enabled),
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
    lambda: backends.cuda.matmul.fp32_precision,
    lambda: backends.cuda.matmul.allow_tf32,
    lambda: backends.cudnn.conv.fp32_precision,  # pyright: ignore[reportAttributeAccessIssue]
    lambda: (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
    lambda: backends.mkldnn.deterministic,
    lambda: torch._C._get_nnpack_enabled(),
    backends.mha.get_fastpath_enabled,
    backends.cuda.flash_sdp_enabled,
    lambda: tuple(np.geterr().values()),
)


@contextmanager
def _float64_and_no_grad() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)


@contextmanager
def _inference_mode_on_a_device() -> Iterator[None]:
    with torch.inference_mode(), torch.device("meta"):
        yield


CONTEXTS = [_float64_and_no_grad, _inference_mode_on_a_device]


def _config(folder: Path, **values: object) -> Experiment:
    """MOON compares with models of the server, the batches are augmented, and everything is measured."""
    base = {
        "federation.rounds": 2, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 1, "data.limit": 60,
        "algorithm": "moon", "artifacts": str(folder / "artifacts"),
    }  # fmt: skip
    return experiment("smoke", "digits", {**base, **values})


def _run(config: Experiment, folder: Path) -> tuple[bytes, ...]:
    run(config, folder, say=lambda text: None)
    return tuple((folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json", "partition.json"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[bytes, ...]]:
    """A run with DP-SGD and without any settings: its folder and its record."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    return folder, _run(_config(folder.parent, **{"dp.local": True}), folder)


@pytest.mark.parametrize("setting", CONTEXTS)
@pytest.mark.long
def test_a_run_has_the_same_bits(setting: Context, usual: tuple[Path, tuple[bytes, ...]], tmp_path: Path) -> None:
    with setting():
        before = _settings()
        record = _run(_config(tmp_path, **{"dp.local": True}), tmp_path / "run")
        assert _settings() == before
    assert record == usual[1]


@pytest.mark.long
def test_replays_and_checks_are_the_same(usual: tuple[Path, tuple[bytes, ...]]) -> None:
    def play() -> str:
        check_algorithm(FedAvg(), only=["neither_the_worker_nor_the_order_decides_a_bit"])
        return str(replay(usual[0], 2, 1, lambda text: None))

    plain = play()
    with _float64_and_no_grad():
        before = _settings()
        assert play() == plain
        assert _settings() == before


@pytest.mark.parametrize("setting", CONTEXTS)
def test_inside_torch_is_as_in_a_fresh_process_and_an_error_restores_the_setting(setting: Context) -> None:
    def stopped() -> None:
        with fresh_torch():
            assert _settings()[:4] == (torch.float32, True, False, torch.device("cpu"))
            torch.set_num_threads(3)
            raise KeyboardInterrupt

    with setting():
        before = _settings()
        with pytest.raises(KeyboardInterrupt):
            stopped()
        assert _settings() == before


SET: dict[str, Callable[[], object]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "precision of all": lambda: setattr(backends, "fp32_precision", "bf16"),
    "tf32 of cuBLAS": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "tf32 as before": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "old and new": lambda: (torch.set_float32_matmul_precision("medium"), setattr(backends, "fp32_precision", "tf32")),
    "denormals": lambda: torch.set_flush_denormal(True), "float64": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"), "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True), "threads": lambda: torch.set_num_threads(2),
    "no oneDNN": lambda: setattr(backends.mkldnn, "enabled", False),
    "oneDNN deterministic": lambda: setattr(backends.mkldnn, "deterministic", True),
    "no NNPACK": lambda: backends.nnpack.set_flags(False),
    "cuDNN": lambda: backends.cudnn.set_flags(False, True, 3, False), "numpy": lambda: np.seterr(all="raise"),
}  # fmt: skip
"""What one line of a caller's can set."""


def _work() -> str:
    """Return numbers that settings change: of products, convolutions, attention, denormals, an overflow."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, w = torch.rand(20, 1, 8, 8), torch.rand(32, 1, 3, 3, requires_grad=True)
    hidden = functional.conv2d(x, w).relu().flatten(1)
    loss = functional.linear(hidden, torch.rand(10, hidden.shape[1])).square().mean()
    loss.backward()
    query, key, value = torch.rand(3, 2, 4, 16, 8)
    attended = functional.scaled_dot_product_attention(query, key, value)
    small, large = torch.full((3,), 1e-39) * 0.5, np.float64(1e308) * np.float64(10)
    tensors: list[Tensor | None] = [hidden, loss, w.grad, attended, small, torch.tensor([float(large)])]
    return repr([(str(t.dtype), t.double().sum().item()) for t in tensors if t is not None])


def _apart(action: Callable[[], object]) -> object:
    """Return the action's result from a fork of this process, which takes all that it sets with it; JSON."""
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


@pytest.fixture(scope="module")
def plain() -> object:
    def work() -> list[str]:
        with fresh_torch():
            return [_work(), str(_settings())]

    return _apart(work)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SET)
@pytest.mark.long
def test_no_setting_of_a_caller_changes_a_bit_and_each_is_restored(name: str, plain: object) -> None:
    def play() -> tuple[list[str], str, str]:
        SET[name]()
        before = str(_settings())
        with fresh_torch():
            results = [_work(), str(_settings())]  # the work here shows no effect of a GPU's settings
        return results, before, str(_settings())

    results, before, after = _apart(play)  # pyright: ignore[reportGeneralTypeIssues]
    assert results == plain
    assert after == before


CONFIG = experiment("smoke", "digits", {"tracking.wandb": "off", "data.limit": 60, "federation.rounds": 1})


def test_a_run_goes_on_only_where_libraries_round_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROUNDING:
        monkeypatch.delenv(name, raising=False)
    RunFolder(tmp_path / "plain", CONFIG, resume=False)
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(name, "AVX2")
        RunFolder(tmp_path / name, CONFIG, resume=False)
        RunFolder(tmp_path / name, CONFIG, resume=True)
        with pytest.raises(UserError, match=rf"{name} is not set there and 'AVX2' here"):
            RunFolder(tmp_path / "plain", CONFIG, resume=True)
        monkeypatch.delenv(name)
        with pytest.raises(UserError, match=rf"{name} is 'AVX2' there and not set here"):
            RunFolder(tmp_path / name, CONFIG, resume=True)
    for earlier in ("{}", '{"variables": 5}', '{"variables": {"PATH": "x"}}', "[]", "{"):  # older or damaged
        (tmp_path / "plain" / "environment.json").write_text(earlier)
        RunFolder(tmp_path / "plain", CONFIG, resume=True)


@pytest.mark.ray
def test_actors_that_round_otherwise_refuse(ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"tracking.wandb": "off", "data.limit": 60, "federation.executor": "ray_actors", "federation.actors": 1}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # Ray was started without
    with pytest.raises(UserError, match="would round otherwise"):
        run(experiment("smoke", "digits", fields), tmp_path, say=lambda text: None)
