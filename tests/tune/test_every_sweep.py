"""What sweeps promise: requests that cannot be met are refused before any work, a dry run writes nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.errors import UserError

REFUSED: dict[str, dict[str, str]] = {
    "advise": {"--p 0.5,1": "--p must lie in (0, 1)", "--sharing.setting real": "must be shuffled_synthetic",
               "--sharing.p 0.5": "option --p instead", "--partition.name iid": "no alpha",
               "--participations 0": "(0, 1]", "--probe-p 1e-17": "--probe-p", "--evaluate.every 2": "evaluate.every",
               "--lrs 0.1,0.2 --tuning-seeds 0": "got 0 in both",
               "--model.batch_norm true --federation.buffers keep": "must be 0"},
    "audit_pool": {"--seeds 0,1 --seed 2": "option --seeds instead", "--setting real": "trains no generators",
                   "--canaries 3": "--canaries must lie in [4, 1e9], got 3",
                   "--generator user_parts:Parrot --attacked 4 --dry-run": "got 4",
                   "--sharing merf --sharing.target_epsilon 10 --shadows 5": "--shadows is for audits of generators"},
    "commons": {"--ways reel": "did you mean 'real'", "--algorithms fedavg": "--algorithms is not for commons",
                "--lrs 0.1,0.2 --seeds 7,8 --tuning-seeds 8": "got 8 in both", "--targets 0.9,1.2": "--targets",
                "--worst-case 1": "--worst-case", "--worst-case 12 --ways real": "--ways",
                "--alphas 0": "partition.alpha"},
    "communication_saved": {"": "--from is missing", "--from /nowhere.csv": "cannot be read"},
    "convergence_parameters": {"--generator-p 1": "must lie in (0, 1)", "--measure.every 0": "must be at least 1"},
    "disclosure": {"--sharing.c=0.1": "--shares", "--round=21": "got 21", "--settings=raw_copy": "raw_copies"},
    "feddm": {"--rates ,": "finite float", "--data.validation 0": "must be above 0", "--algorithms fedavg": "add feddm",
              "--study-alpha 0.1,0.5": "--study-alpha takes"},
    "feddpms": {"--clients 10": "pairs N:images", "--lrs 0.01,0.001 --data.validation 0": "by validation"},
    "figure3": {"--p-real 1": "--p-real must lie in [0, 1)", "--preset authors": "unknown preset 'authors'"},
    "gradient_coding": {"--shares=0.01": "less than one", "--pairs=0.5": "q:d", "--pairs=1:3": "q in [0, 1)",
                        "--pairs=0.3:0": "d in [1, 1e9]", "--pairs=0.5:10": "[1, 9] for 10 clients",
                        "--pairs=0.5:3,0.5:3": "different values"},
    "heterogeneity": {"--partitions iid,quantity:x": "got 'quantity:x'", "--lr 0.1": "option --lrs",
                      "--lrs 0.1,0.2 --tuning-seeds 0": "got 0 in both", "--federation.rounds 2": "federation.rounds",
                      "--federation.stop target": "federation.stop", "--measure.every 0": "measure.every",
                      "--measure.every 2": "measure.every"},
    "methods": {"--algorithms fedavg,one_shot": "trains on a pool",
                "--methods fedavg,fedporx": "did you mean 'fedprox'", "--sharing shuffled_synthetic": "must be real",
                "--lrs 0.1,0.2 --tuning-seeds 0": "got 0 in both",
                "--partition.name iid --alphas 0.1": "--alphas varies",
                "--lrs 0.1 --data.validation 0": "by validation"},
    "message_sizes": {"--partitions 3": "[40, 100000]"},
    "mnist_softmax": {"--lr=.inf": "--lr must lie in (0, inf)", "--data-dir=/nowhere --dataset=mnist": "is not there"},
    "quadratics": {"--p 0.5,1.1": "p must lie in [0, 1]", "--target 1e-36": "target must lie in (",
                   "--fit plan": "mean 'plain'", "--rounds 100001": "rounds must lie in [1, 100000]",
                   "--models sever": "'server'"},
    "quality": {"--sharing real": "real makes no images"},
    "replicate": {"--rows R13": "unknown row", "--rows R9": "not run here"},
    "sensitivity": {"--partition.alpha 1": "alpha is not", "--partition.name iid": "partition.alpha"},
    "table1": {"--lrs 0.1,0.2 --seeds 7,8 --tuning-seeds 8": "got 8 in both", "--targets 0.9,1.2": "--targets"},
    "table2": {"--methods fedsyn": "fedssyn", "--data.validation 0": "must be above 0",
               "--lr 0.1 --rates 0.2": "option --rates"},
    "fedcvae": {"--preset paper --dataset cifar10": "data.name 'cifar10'", "--data.validation 0": "--rates"},
    "dsprites": {"--checkpoints 2": "--checkpoints"}, "private_fedssyn": {"--epsilons 0": "epsilon"},
    "private_sizes": {"--sizes many": "--sizes", "--generator ddpm": "private_ddpm",
                      "--sizes 8": "generator.batch_size",
                      "--ways ndpdc --sizes 40,400 --epsilons 10,0.01": "target_epsilon 0.01"},
    "tune": {"--space lr=0.1 --metric zeta_hat_sq --measure.every 0": "zeta_hat_sq needs --measure.every",
             "--space lr=0.1 --metric L_p": "L_p needs --measure.smoothness",
             "--space lr=0.1 --data.validation 0": "validation_accuracy needs",
             "--space lr=0.1 --metric MB --scheduler asha --data.validation 0": "validation accuracy",
             "--scheduler asha --space alpha=uniform(0.1,1)": "list of values"},
}  # fmt: skip
ROWS = [(name, words, part) for name, rows in REFUSED.items() for words, part in rows.items()]


@pytest.mark.parametrize(("name", "words", "part"), ROWS, ids=[f"{name} {words}" for name, words, _ in ROWS])
def test_a_request_that_cannot_be_met_is_refused_before_any_work(
    name: str, words: str, part: str, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    small = ["--preset=smoke"] if name in ("advise", "audit_pool", "commons", "tune") else []
    with pytest.raises(UserError, match=re.escape(part)) as error:
        getattr(sweeps(name), name)([*small, *words.split(), f"--out={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_option_exits_with_2(name: str, command: Callable[..., Any], tmp_path: Path) -> None:
    done = command(name, "--outt=x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*'--outt'.*did you mean '--out'.*\n", done.stderr)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("untimed")
@pytest.mark.long
def test_a_dry_run_counts_central_models_and_writes_nothing(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeps("figure3").figure3(["--preset=smoke", "--dry-run", f"--out={tmp_path / 'out'}", "--alphas=0.1"]) == 0
    assert "4 cells" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
