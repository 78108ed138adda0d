"""Trained models from a run's folder alone: as modules, as named tensors, and as ONNX."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedcommons
from fedcommons import Result, UserError, experiment, load
from fedcommons.runs import inputs
from fedcommons.runs.experiment import run

FIELDS = {
    "federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 0, "client.epochs": 1,
    "data.limit": 300, "wandb": "off",
}  # fmt: skip
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, n_classes, width: int = 8):
        super().__init__()
        print("executed")
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, n_classes)

    def forward(self, x):
        return self.head(self.body(x))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("models") / "run"
    return fedcommons.run(experiment("smoke", values=FIELDS), folder, say=quiet)


def quiet(text: str) -> None:
    pass


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def accuracy(result: Result, module: torch.nn.Module, which: str) -> float:
    part = getattr(inputs.load(result.experiment.data), which)
    with torch.no_grad():
        return float((module(part.x).argmax(1) == part.y).float().mean())


def test_a_folder_alone_gives_the_models_of_the_last_and_the_best_round(done: Result, tmp_path: Path) -> None:
    """Best: the first with the largest validation accuracy. Checkpoints are not needed."""
    shutil.copytree(done.folder, tmp_path / "away")
    shutil.rmtree(tmp_path / "away" / "checkpoints")
    result, every = load(tmp_path / "away"), lines(done.folder)
    last, best = result.model, result.best
    assert accuracy(done, last, "test") == pytest.approx(every[-1]["test/accuracy"], abs=1e-6)
    top = max(line["validation/accuracy"] for line in every[1:])
    assert accuracy(done, best, "validation") == pytest.approx(top, abs=1e-6)
    assert result.summary == done.summary
    tensors = load_file(done.folder / "model.safetensors")
    assert tensors.keys() == last.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in last.state_dict().items())


@pytest.mark.long
def test_a_run_that_is_killed_and_goes_on_leaves_the_same_files(done: Result, tmp_path: Path) -> None:
    def kill(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(done.experiment, tmp_path / "run", say=quiet, on_round=kill)
    run(done.experiment, tmp_path / "run", resume=True, say=quiet)
    for name in ("model.safetensors", "best.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (done.folder / name).read_bytes(), name


@pytest.mark.long
def test_a_users_module_is_executed_only_if_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NET, encoding="utf-8")
    values = {**FIELDS, "model": "nets.py:Net", "data.validation": 0.0, "federation.rounds": 1}
    result = fedcommons.run(experiment("smoke", values=values), "run", say=quiet)
    assert {"network.body.2.running_mean"} <= load_file("run/model.safetensors").keys()
    assert not Path("run/best.safetensors").exists()  # without validation data there is no best round
    capsys.readouterr()
    with pytest.raises(UserError, match=r"'nets.py:Net'; to have it executed, name it"):
        _ = load("run").model
    with pytest.raises(UserError, match="name it"):
        _ = load("run", may_run=["other.py:Net"]).model
    assert "executed" not in capsys.readouterr().out
    module = load("run", may_run=["nets.py:Net"]).model
    assert accuracy(result, module, "test") == pytest.approx(lines(Path("run"))[-1]["test/accuracy"], abs=1e-6)
    Path("nets.py").write_text(NET + "# changed\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not the code that run was run with"):
        _ = load("run", may_run=["nets.py:Net"]).model


def test_what_is_no_finished_run_or_damaged_is_refused(done: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        load(tmp_path)
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="is damaged"):
        _ = load(tmp_path / "run").model
    (tmp_path / "run" / "best.safetensors").unlink()
    with pytest.raises(UserError, match=r"no best\.safetensors"):
        _ = load(tmp_path / "run").best


@pytest.mark.long
def test_an_exported_model_has_the_logits(done: Result, tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    with pytest.raises(UserError, match="unknown export 'onyx'"):
        sweeps("run").run(["--export", "onyx", "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    shutil.copytree(done.folder, tmp_path / "run")
    result = load(tmp_path / "run")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]

    x = inputs.load(done.experiment.data).test.x[:7]
    (logits,) = ReferenceEvaluator(str(result.export("onnx"))).run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), result.model(x), atol=1e-4, rtol=1e-4)
