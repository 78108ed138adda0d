"""What a user has set in torch decides nothing here, and is theirs again afterwards."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.core.local import onednn
from fedcommons.core.worker import fresh_torch
from fedcommons.federation import rounds
from fedcommons.federation.memory import ClientMemory
from fedcommons.runs import probe
from fedcommons.runs.build import _load, assemble, prepare
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from fedcommons.testing import check_algorithm

Context = Callable[[], AbstractContextManager]


def _settings() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
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
def _default_device_and_no_gradients() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_device(None)


@contextmanager
def _inference_mode_on_a_device() -> Iterator[None]:
    with torch.inference_mode(), torch.device("meta"):
        yield


@contextmanager
def _no_onednn() -> Iterator[None]:
    with onednn(False):
        yield


@pytest.fixture(
    params=[_float64_and_no_grad, _default_device_and_no_gradients, _inference_mode_on_a_device, _no_onednn]
)
def setting(request: pytest.FixtureRequest) -> Context:
    _load.cache_clear()  # data that another test has loaded are not made under its setting
    return request.param


def _config(folder: Path, **values: object) -> Experiment:
    """MOON compares with models of the server, the batches are augmented, and everything is measured."""
    base = {
        "federation.rounds": 2, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 1, "data.limit": 60,
        "algorithm": "moon", "artifacts": str(folder / "artifacts"),
    }  # fmt: skip
    return presets.experiment("smoke", "digits", {**base, **values})


def _run(config: Experiment, folder: Path) -> tuple[bytes, ...]:
    run(config, folder, say=lambda text: None)
    return tuple((folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json", "partition.json"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[bytes, ...]]:
    """A run with DP-SGD and without any settings: its folder and its record."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    return folder, _run(_config(folder.parent, **{"dp.local": True}), folder)


def test_a_run_has_the_same_bits_and_the_setting_is_restored(
    setting: Context, usual: tuple[Path, tuple[bytes, ...]], tmp_path: Path
) -> None:
    with setting():
        before = _settings()
        record = _run(_config(tmp_path, **{"dp.local": True}), tmp_path / "run")
        assert _settings() == before
    assert record == usual[1]


@pytest.mark.parametrize("setting", [_float64_and_no_grad])
def test_a_run_with_generators_has_the_same_bits(setting: Context, tmp_path: Path) -> None:
    """Their training and sampling draw numbers, which are others in another type."""
    fields = {
        "sharing.setting": "shuffled_synthetic", "generator.epochs": 1, "generator.sampling_steps": 2,
        "generator.channels": (8, 8), "measure.every": 0, "federation.rounds": 1, "partition.n_clients": 2,
    }  # fmt: skip
    usual = _run(_config(tmp_path / "usual", **fields), tmp_path / "usual" / "run")
    with setting():
        assert _run(_config(tmp_path / "set", **fields), tmp_path / "set" / "run") == usual


def test_a_run_that_ends_early_restores_the_setting(setting: Context, tmp_path: Path) -> None:
    def stop(number: int, metrics: object) -> None:
        raise KeyboardInterrupt

    with setting():
        before = _settings()
        with pytest.raises(KeyboardInterrupt):
            run(_config(tmp_path), tmp_path / "run", on_round=stop, say=lambda text: None)
        assert _settings() == before


def test_replays_and_probes_are_the_same(
    setting: Context, usual: tuple[Path, tuple[bytes, ...]], tmp_path: Path
) -> None:
    config = _config(tmp_path, **{"federation.rounds": 1, "algorithm": "fedavg", "model.name": "linear"})

    def play() -> tuple:
        return str(replay(usual[0], 2, 1, lambda text: None)), probe.probe(config, None, lambda text: None)

    plain = play()
    with setting():
        before = _settings()
        assert play() == plain
        assert _settings() == before


def test_the_parts_of_a_run_called_one_by_one_start_from_the_same_model(setting: Context, tmp_path: Path) -> None:
    def start() -> torch.Tensor:
        ready = assemble(prepare(_config(tmp_path)))
        ready.executor().close()
        return ready.start(ClientMemory()).model.buffer

    usual = start()
    with setting():
        found = start()
    assert found.dtype == torch.float32
    assert found.equal(usual)


@pytest.mark.parametrize("setting", [_float64_and_no_grad])
def test_a_round_that_is_played_by_hand_has_the_same_bits(setting: Context, tmp_path: Path) -> None:
    def play() -> torch.Tensor:
        ready = assemble(prepare(_config(tmp_path)))
        now, _ = next(rounds.run(ready.algorithm, ready.executor(), ready.plan, ready.start(ClientMemory())))
        return now.model.buffer

    usual = play()
    with setting():
        assert play().equal(usual)


def test_an_algorithm_can_be_checked(setting: Context) -> None:
    with setting():
        check_algorithm(FedAvg(), only=["two_rounds_keep_names_shapes_and_types"])


def test_inside_torch_is_as_in_a_fresh_process(setting: Context) -> None:
    fresh = (torch.float32, True, False, torch.device("cpu"))
    with setting():
        before = _settings()
        with fresh_torch():
            assert _settings()[:4] == fresh
            torch.set_num_threads(3)
        assert _settings() == before
