"""What every sweep promises: requests that cannot be met are refused before any work, a dry run writes nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.errors import UserError

REFUSED: dict[str, dict[str, str]] = {
    "advise": {
        "--p 0.5,1": "--p must lie in [0, 1)", "--check-p 1": "--check-p must lie in [0, 1)",
        "--speed-up 1": "--speed-up must lie in (1, inf)", "--settings local_synthetic": "mean 'shuffled_synthetic'",
        "--algorithms scaffold": "must be fedavg", "--sharing.p 0.5": "use --p instead",
        "--dp.local true": "dp.local must be False", "--client.momentum 0.9": "client.momentum must be 0",
        "--client.optimizer adam": "client.optimizer must be sgd", "--partition.name iid": "no alpha",
        "--probe-rounds 0": "--probe-rounds must lie in [1, 1e9]",
        "--model.batch_norm true --federation.buffers keep --measure.every 0": "must be 0",
    },
    "commons": {
        "--ways reel": "did you mean 'real'", "--lr 0.1": "--lrs", "--data.validation 0": "must be above 0",
        "--algorithms fedavg": "--algorithms is not for commons", "--lrs 0.04,0": "--lrs must lie in (0, 1e38]",
    },
    "communication_saved": {"": "--from is missing", "--from /nowhere.csv": "cannot be read"},
    "convergence_parameters": {
        "--p 1": "--p must lie in [0, 1)", "--p=-0.1": "--p must lie in [0, 1)",
        "--generator-p 0": "must lie in (0, 1)", "--generator-p 1": "--generator-p must lie in (0, 1)",
        "--measure.every 0": "must be at least 1", "--measure.smoothness true": "use --hessians instead",
        "--generator.steps 3": "use --generator-epochs instead",
    },
    "feddm": {
        "--preset authors": "--preset must be one of", "--seed 1 --seeds 1": "seeds", "--rates ,": "finite float",
        "--radii 3,0": "feddm.radius must lie in (0, 1e38]", "--rates 0.1,0": "client.lr must lie in (0, 1e38]",
        "--image-rates=-0.3": "feddm.image_lr must lie in (0, 1e38]", "--data.validation 0": "must be above 0",
        "--image-rates=1 --feddm.image_lr=1": "use --image-rates instead", "--algorithms fedavg": "add feddm",
        "--study-alpha 0.1,0.5": "--study-alpha takes one number",
    },
    "feddpms": {
        "--clients 10": "pairs N:images", "--preliminary 1": "--preliminary must lie in [0, 1)",
        "--lrs 0.01,0.001 --data.validation 0": "by validation", "--lrs 0.01 --client.lr 0.1": "use --lrs instead",
    },
    "figure3": {
        "--p-real 1": "--p-real must lie in [0, 1)", "--central-epochs 0": "--central-epochs must lie in [1, 1e9]",
        "--sharing.setting shuffled_real": "use --settings instead", "--preset authors": "--preset authors",
    },
    "gradient_coding": {
        "--shares=0,1.5": "--shares must lie in [0, 1]", "--shares=0.01": "less than one", "--pairs=0.5": "q:d",
        "--pairs=1:3": "q in [0, 1)", "--pairs=0.5:0": "d in [1, 1e9]", "--pairs=nan:3": "q:d",
        "--pairs=0.5:10": "[1, 9] for 10 clients", "--pairs=0.5:3,0.5:3": "different values",
        "--sharing=exakt": "did you mean 'exact'", "--dataset=cifar10": "unknown data set",
        "--repetitions=1": "--repetitions must lie in [2, 1e6]", "--workers=0": "--workers must lie in [1, 1e6]",
    },
    "mnist_softmax": {
        "--p=0,1.2": "--p must lie in [0, 1]", "--p=-0.1": "--p must lie in [0, 1]",
        "--epochs=0": "--epochs must lie in [1, 1e9]", "--rounds=0": "--rounds must lie in [1, 1e6]",
        "--rounds=1000001": "--rounds must lie in [1, 1e6]", "--noise=-1": "--noise must lie in [0, inf)",
        "--lr=0": "--lr must lie in (0, inf)", "--lr=.inf": "--lr must lie in (0, inf)",
        "--target=0": "--target must lie in (0, inf)", "--dataset=minst": "did you mean 'mnist'",
        "--data-dir=/nowhere --dataset=mnist": "is not there",
    },
    "quadratics": {
        "--p 0.5,1.1": "p must lie in [0, 1]", "--p=-0.1": "p must lie in [0, 1]",
        "--target 1e-36": "target must lie in (", "--target .nan": "target must lie in (",
        "--target .inf": "target must lie in (", "--rounds 0": "rounds must lie in [1, 100000]",
        "--rounds 100001": "rounds must lie in [1, 100000]", "--zeta-sq=-1": "zeta_sq must lie in [0, inf)",
        "--sigma-sq .inf": "sigma_sq must lie in [0, inf)", "--fit plan": "mean 'plain'", "--models sever": "'server'",
    },
    "replicate": {"--rows R13": "unknown row", "--rows R9": "not run here", "--seeds=-1": "seeds"},
    "sensitivity": {
        "--preset authors": "authors", "--rhos 0": "--rhos must lie in (0, 1]", "--rhos 2": "--rhos must lie in (0, 1]",
        "--checkpoints 1.1": "--checkpoints must lie in (0, 1]", "--clients 1": "--clients must lie in [2, 1e6]",
        "--sharing.p 0.5": "use --numbers", "--generators dppm": "dppm", "--partition.alpha 1": "alpha is not",
        "--partition.name iid": "partition.alpha",
    },
    "table2": {
        "--methods fedsyn": "fedssyn", "--algorithm fedgen": "use --methods instead", "--alphas=-1": "alpha",
        "--data.validation 0": "must be above 0", "--fedgen.batch_size 1": "fedgen.batch_size",
        "--lr 0.1 --rates 0.2": "use --rates instead",
    },
    "fedcvae": {
        "--preset authors": "authors", "--preset paper --dataset cifar10": "data.name 'cifar10'",
        "--methods fedcvae-en": "fedcvae-ens", "--algorithm fedavg": "use --methods", "--rates 0": "client.lr",
        "--fedcvae.local_epochs 3": "use --client.epochs", "--data.validation 0": "--rates",
        "--sharing shuffled_synthetic": "sharing.setting", "--partition.name iid": "--alphas",
    },
    "dsprites": {
        "--preset authors": "authors", "--generator.rho 0.5": "use --rhos", "--sharing.p 0.5": "use --numbers",
        "--rhos 0": "--rhos", "--checkpoints 2": "--checkpoints",
    },
    "private_fedssyn": {
        "--preset authors": "--preset", "--generator.target_epsilon 3": "use --epsilons", "--epsilons 0": "epsilon",
        "--generator.noise_multiplier 3": "use --sigmas", "--checkpoints 0.5,2": "--checkpoints",
    },
    "private_sizes": {
        "--preset authors": "--preset", "--generator.target_epsilon 3": "use --epsilons", "--sizes many": "--sizes",
        "--data.limit 3": "use --sizes", "--generator ddpm": "private_ddpm", "--sizes 8": "generator.batch_size",
        "--ways merf,nope": "nope", "--ways merf --epsilons 1e-9 --dry-run": "target_epsilon",
        "--ways ndpdc --sizes 40,400 --epsilons 10,0.01": "target_epsilon 0.01",
        "--ways ndpdc --epsilons 0.01 --dry-run": "target_epsilon 0.01",
    },
}  # fmt: skip
ROWS = [(name, words, part) for name, rows in REFUSED.items() for words, part in rows.items()]


@pytest.mark.parametrize(("name", "words", "part"), ROWS, ids=[f"{name} {words}" for name, words, _ in ROWS])
def test_a_request_that_cannot_be_met_is_refused_before_any_work(
    name: str, words: str, part: str, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    small = ["--preset=smoke"] if name in ("advise", "commons") else []
    with pytest.raises(UserError, match=re.escape(part)) as error:
        getattr(sweeps(name), name)([*small, *words.split(), f"--out={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "grid", "words"),
    [
        ("mnist_softmax", "", "--dry-run --p=0,1 --epochs=1 --rounds=1 --noise=0"),
        ("mnist_softmax", "", "--dry-run --rounds=1000000"),
        ("quadratics", "", "--dry-run --p=0,1 --rounds=1 --zeta-sq=0 --sigma-sq=0"),
        ("quadratics", "", "--dry-run --rounds=100000 --p=0 --seeds=0"),
        ("gradient_coding", "", "--dry-run --shares=0,1 --pairs=0:1,0.9:9 --repetitions=2 --workers=1"),
        ("sensitivity", "entries", "--rhos=1 --clients=2 --checkpoints=1 --numbers=1000000"),
        ("figure3", "grid", "--p-real=0 --central-epochs=1"),
        ("feddpms", "grid", "--preliminary=0"),
        ("convergence_parameters", "figure_a8", "--p=0 --generator-p=0.999 --measure.every=1"),
        ("advise", "configs", "--p=0 --check-p=0 --probe-rounds=1 --speed-up=1.001"),
    ],
)
def test_the_smallest_and_largest_allowed_values_are_taken(
    name: str, grid: str, words: str, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module, argv = sweeps(name), ["--preset=smoke", *words.split(), f"--out={tmp_path / 'out'}"]
    if grid:
        assert getattr(module, grid)(module.arguments(argv))
    else:
        assert getattr(module, name)(argv) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_option_exits_with_2(name: str, command: Callable[..., Any], tmp_path: Path) -> None:
    done = command(name, "--outt=x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*'--outt'.*did you mean '--out'.*\n", done.stderr)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "words", "part"),
    [
        ("gradient_coding", "--shares=0.2 --pairs=0.5:3,0.7:4", "14 curves of 4 repetitions"),
        ("mnist_softmax", "--p=0,1 --epochs=1", "8 curves of 3 rounds"),
        ("quadratics", "--p=0.5 --seeds=0,1,2", "31 step sizes x 2 p x 3 seeds"),
        ("sensitivity", "--rhos=1 --numbers=1 --clients=4 --generators=ddpm", "cells"),
        ("figure3", "--alphas=0.1", "4 cells"),
    ],
)
@pytest.mark.usefixtures("untimed")
@pytest.mark.long
def test_a_dry_run_says_its_size_and_writes_nothing(
    name: str, words: str, part: str, sweeps: Callable[[str], ModuleType], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert getattr(sweeps(name), name)(["--preset=smoke", "--dry-run", "--out=out", *words.split()]) == 0
    assert part in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
