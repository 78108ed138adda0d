"""Trained models from a run's folder alone: as modules, as named tensors, and as ONNX."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedcommons
from fedcommons import Result, UserError, experiment, load
from fedcommons.runs import inputs

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
        layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, n_classes)]
        self.body = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("models") / "run"
    return fedcommons.run(experiment("smoke", values=FIELDS), folder, say=quiet)


def quiet(text: str) -> None:
    pass


def accuracy(result: Result, module: torch.nn.Module, which: str) -> float:
    part = getattr(inputs.load(result.experiment.data), which)
    with torch.no_grad():
        return float((module(part.x).argmax(1) == part.y).float().mean())


def test_a_folder_alone_gives_the_models_of_the_last_and_the_best_round(done: Result, tmp_path: Path) -> None:
    """Best: the first with the largest validation accuracy. Checkpoints are not needed."""
    shutil.copytree(done.folder, tmp_path / "away")
    shutil.rmtree(tmp_path / "away" / "checkpoints")
    result, every = load(tmp_path / "away"), done.rounds
    last, best = result.model, result.best
    assert accuracy(done, last, "test") == pytest.approx(every["test/accuracy"].iloc[-1], abs=1e-6)
    top = every["validation/accuracy"].iloc[1:].max()
    assert accuracy(done, best, "validation") == pytest.approx(top, abs=1e-6)
    assert result.summary == done.summary
    tensors = load_file(done.folder / "model.safetensors")
    assert tensors.keys() == last.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in last.state_dict().items())


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
    assert "executed" not in capsys.readouterr().out
    module = load("run", may_run=["nets.py:Net"]).model
    assert accuracy(result, module, "test") == pytest.approx(result.rounds["test/accuracy"].iloc[-1], abs=1e-6)
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
def test_an_exported_model_has_the_logits(done: Result, tmp_path: Path) -> None:
    shutil.copytree(done.folder, tmp_path / "run")
    result = load(tmp_path / "run")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]

    x = inputs.load(done.experiment.data).test.x[:7]
    (logits,) = ReferenceEvaluator(str(result.export("onnx"))).run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), result.model(x), atol=1e-4, rtol=1e-4)
