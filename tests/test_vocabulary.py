"""Short names mean the same fields in every sweep, and ``--dry-run`` writes nothing in any."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from sweep_cells import cells_of

Sweeps = Callable[[str], ModuleType]

GRIDS = ("table1", "figure3", "convergence_parameters", "advise", "tune")
SHORT = ["--rho", "0.5", "--lr", "0.03", "--wandb", "off", "--dataset", "digits", "--data-dir", "/x"]
NOISE = ["--sigma", "2", "--dp.local", "true"]
TUNED = ["--space", "seed=0", "--sharing", "shuffled_synthetic"]


@pytest.mark.parametrize("script", GRIDS)
def test_short_names_are_the_fields_in_every_sweep(sweeps: Sweeps, script: str) -> None:
    argv = ["--preset", "smoke", *SHORT, *(NOISE if script != "advise" else []), *(TUNED if script == "tune" else [])]
    argv += ["--alpha" if script != "convergence_parameters" else "--partition.alpha", "0.7"]
    for cell in cells_of(sweeps(script), argv):
        flat = cell.config.flat
        assert (flat["client.lr"], flat["tracking.wandb"], flat["data.dir"]) == (0.03, "off", "/x")
        assert flat.get("dp.noise_multiplier") == (2 if script != "advise" else 1)
        assert flat.get("generator.rho", 0.5) == 0.5
        assert flat.get("partition.alpha", 0.7) == 0.7


DRY = {
    "run": ["--sharing", "shuffled_synthetic"],
    "tune": ["--space", "lr=0.1,0.2"],
    "quadratics": [],
    "private_fedssyn": ["--algorithms", "fedavg", "--epsilons", "30", "--checkpoints", "1",
                        "--generator.batch_size", "50"],
}  # fmt: skip


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("script", DRY)
@pytest.mark.long
def test_a_dry_run_prints_what_would_run_and_writes_nothing(
    sweeps: Sweeps, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wandb = ["--wandb", "off"] if script != "quadratics" else []
    assert getattr(sweeps(script), script)(["--preset", "smoke", *DRY[script], *wandb, "--dry-run"]) == 0
    assert capsys.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == []


def test_tune_repeats_each_point_for_each_seed(sweeps: Sweeps) -> None:
    argv = ["--preset", "smoke", "--space", "lr=uniform(0.1,0.2)", "--samples", "2", "--seeds", "0,3"]
    cells = cells_of(sweeps("tune"), argv)
    points = {seed: [c.config.client.lr for c in cells if c.config.seed == seed] for seed in (0, 3)}
    assert points[0] == points[3]
    assert len(set(points[0])) == 2
