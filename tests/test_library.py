"""fedcommons from Python: one run, many runs, and a process that is afterwards as it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

import fedcommons
from fedcommons import experiment, run, sweep
from fedcommons.errors import UserError
from fedcommons.runs import inputs

FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "data.limit": 80}


def quiet(text: str) -> None: ...


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import fedcommons, sys; print([m for m in ('torch', 'ray', 'pandas', 'numpy', 'wandb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_name_of_the_package_is_there() -> None:
    assert set(fedcommons.__all__) <= set(dir(fedcommons))
    for name in fedcommons.__all__:
        assert callable(getattr(fedcommons, name))
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        fedcommons.runn  # noqa: B018


def test_a_result_has_summary_rounds_and_the_model_that_was_evaluated(tmp_path: Path) -> None:
    wanted = experiment("smoke", values={**FIELDS, "model.batch_norm": True})
    result = run(wanted, str(tmp_path / "run"), say=quiet)
    test = inputs.load(wanted.data).test
    with torch.no_grad():
        right = (result.model(test.x).argmax(1) == test.y).float().mean().item()
    assert right == pytest.approx(result.summary["last_accuracy"], abs=1e-6)
    assert result.rounds["round"].tolist() == [0, 1, 2]
    assert result.model is not result.model


def test_a_finished_folder_is_read_and_another_experiment_refused(tmp_path: Path) -> None:
    wanted = experiment("smoke", values=FIELDS)
    first = run(wanted, tmp_path / "run", say=quiet)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    rounds: list[int] = []
    again = run(wanted, tmp_path / "run", say=quiet, on_round=lambda number, _: rounds.append(number))
    assert again.summary == first.summary
    assert rounds == []
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"another client\.lr"):
        run(experiment("smoke", values={**FIELDS, "lr": 0.5}), tmp_path / "run", say=quiet)


def test_a_model_without_its_checkpoint_is_refused(tmp_path: Path) -> None:
    result = run(experiment("smoke", values=FIELDS), tmp_path / "run", say=quiet)
    for path in (tmp_path / "run" / "checkpoints").glob("round-000002*"):
        path.unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no checkpoint of round 2"):
        result.model  # noqa: B018


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    matplotlib.use("svg")
    torch.set_num_threads(2)
    folder = os.getcwd()

    def settings() -> list[object]:
        return [
            matplotlib.get_backend(), torch.get_num_threads(), torch.get_rng_state().tolist(),
            torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd(),
            str(np.random.get_state()),  # noqa: NPY002
            *(signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)),
        ]  # fmt: skip

    try:
        before = settings()
        fields = {**FIELDS, "sharing": "shuffled_synthetic", "generator.epochs": 1, "artifacts": str(tmp_path / "art")}
        run(experiment("smoke", values=fields), tmp_path / "run", say=quiet).model.eval()
        assert settings() == before
    finally:
        torch.set_num_threads(1)
        os.chdir(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"client.lrr": 1}, "did you mean 'client.lr'"),
        ({"algorithm": "fedavgg"}, "fedavg"),
        ({"lr": "fast"}, r"client\.lr"),
        ({"alpha": -1.0}, r"partition\.alpha"),
        ({"fedprox.mu": 0.1}, r"fedprox\.mu"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(values: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(experiment("smoke", values={**FIELDS, **values}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sweep_needs_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one"):
        sweep([], tmp_path / "out")


@pytest.mark.ray
def test_a_sweep_is_its_runs_side_by_side(tmp_path: Path) -> None:
    wanted = [experiment("smoke", values={**FIELDS, "alpha": a, "seed": s}) for a in (0.1, 1.0) for s in (0, 1)]
    frame = sweep(wanted, tmp_path / "sweep")
    assert list(zip(frame["alpha"], frame["seed"], strict=True)) == [(0.1, 0), (0.1, 1), (1.0, 0), (1.0, 1)]
    alone = run(wanted[3], tmp_path / "alone", say=quiet)
    assert frame["last_accuracy"].iloc[3] == alone.summary["last_accuracy"]
    assert sweep(wanted, str(tmp_path / "sweep")).equals(frame)  # read, not run
