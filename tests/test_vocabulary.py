"""One vocabulary: what a field is called for short, and what --dry-run does, is the same in every sweep."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli
from fedcommons.config.flat import SHORT_NAMES
from fedcommons.errors import UserError
from fedcommons.sweeping import sweep as tuning

Sweeps = Callable[[str], ModuleType]

GRIDS = ("table1", "figure3", "convergence_parameters", "advise")
SHORT = {"--rho": "0.5", "--sigma": "2", "--lr": "0.03", "--wandb": "off", "--dataset": "digits", "--data-dir": "/x"}


def _cells(script: str, module: ModuleType, argv: list[str]) -> list[tuning.Trial]:
    options = module.arguments(["--preset", "smoke", *argv])
    if script == "convergence_parameters":
        return [c for several in module.figure_a7(options).values() for c in several]
    if script == "advise":
        return [tuning.cell(c, {}) for c in module.configs(options)]
    return module.cells(options)[0] if script == "tune" else module.grid(options)


@pytest.mark.parametrize("script", [*GRIDS, "tune"])
def test_short_names_are_the_fields_in_every_sweep(sweeps: Sweeps, script: str) -> None:
    argv = [word for pair in SHORT.items() for word in pair]
    argv += ["--dp.local", "true"] if script != "advise" else []
    if script == "advise":  # Corollary I knows no DP-SGD
        argv = argv[:2] + argv[4:]
    argv += ["--space", "seed=0", "--sharing", "shuffled_synthetic"] if script == "tune" else []
    argv += ["--alpha", "0.7"] if script != "convergence_parameters" else ["--partition.alpha", "0.7"]
    for cell in _cells(script, sweeps(script), argv):
        flat = cell.config.flat
        assert flat["client.lr"] == 0.03
        assert flat["tracking.wandb"] == "off"
        assert flat["data.dir"] == "/x"
        assert flat.get("dp.noise_multiplier") == (2 if script != "advise" else 1)
        assert flat.get("generator.rho", 0.5) == 0.5
        assert flat.get("partition.alpha", 0.7) == 0.7


def test_p_is_the_share_wherever_something_is_shared(sweeps: Sweeps) -> None:
    for script, argv in (
        ("table1", []),
        ("figure3", ["--settings", "local_synthetic"]),
        ("tune", ["--space", "seed=0", "--sharing", "shuffled_synthetic"]),
    ):
        shares = {c.config.flat.get("sharing.p", 0.2) for c in _cells(script, sweeps(script), [*argv, "--p", "0.2"])}
        assert shares == {0.2}
    with pytest.raises(UserError, match=r"sharing\.p needs --sharing\.setting .* and sharing\.setting is real"):
        sweeps("table1").arguments(["--settings", "real", "--p", "0.2"])


def test_every_short_name_is_one_field() -> None:
    argv = ["--sharing", "shuffled_synthetic"]
    assert set(SHORT_NAMES.values()) <= cli.parser("a test", argv, {}).fields.keys()


@pytest.mark.parametrize("field", ["--feddyn.alpha", "--moon.mu"])
@pytest.mark.parametrize("script", [*GRIDS, "tune"])
def test_a_field_of_a_method_that_no_cell_has_is_refused(sweeps: Sweeps, script: str, field: str) -> None:
    with pytest.raises(UserError, match=f"{field[2:]} needs --algorithm .*, and algorithm is "):
        sweeps(script).arguments(
            ["--preset", "smoke", *(["--algorithms", "fedavg"] if script == "table1" else []), field, "1"]
        )


FEW = ["--algorithms", "fedavg", "--alphas", "0.1", "--wandb", "off"]
DRY = {
    "run": ["--preset", "smoke", "--sharing", "shuffled_synthetic"],
    "tune": ["--preset", "smoke", "--space", "lr=0.1,0.2", "--wandb", "off"],
    "table1": ["--preset", "smoke", *FEW],
    "figure3": ["--preset", "smoke", "--wandb", "off"],
    "convergence_parameters": ["--preset", "smoke", "--p", "0", "--generator-epochs", "1", "--wandb", "off"],
    "advise": ["--preset", "smoke", "--check", "--alphas", "0.1", "--wandb", "off"],
    "quadratics": ["--preset", "smoke"],
    "mnist_softmax": ["--preset", "smoke"],
    "feddpms": ["--preset", "smoke", "--algorithms", "fedvae", "--wandb", "off"],
    "private_fedssyn": [
        "--preset", "smoke", "--algorithms", "fedavg", "--epsilons", "30", "--checkpoints", "1", "--wandb", "off",
        "--generator.batch_size", "50",
    ],
}  # fmt: skip


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("script", DRY)
@pytest.mark.long
def test_a_dry_run_says_what_would_run_and_writes_nothing(
    sweeps: Sweeps, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert getattr(sweeps(script), script)([*DRY[script], "--dry-run"]) == 0
    assert capsys.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == []


def test_tune_takes_seeds_as_the_tables_do(sweeps: Sweeps) -> None:
    cells = _cells("tune", sweeps("tune"), ["--space", "lr=uniform(0.1,0.2)", "--samples", "2", "--seeds", "0,3"])
    points = {seed: [c.config.client.lr for c in cells if c.config.seed == seed] for seed in (0, 3)}
    assert points[0] == points[3]  # each point for each seed
    assert len(set(points[0])) == 2
    for more, said in ((["--seed", "1"], "use --seeds"), (["--space", "seed=1,2"], "both name the seeds")):
        with pytest.raises(UserError, match=said):
            _cells("tune", sweeps("tune"), ["--space", "lr=0.1,0.2", "--seeds", "0", *more])
