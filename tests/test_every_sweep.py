"""What every sweep promises: requests that cannot be met are refused before any work, a dry run writes nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.errors import UserError

SWEEPS = (
    "advise", "commons", "communication_saved", "compare", "convergence_parameters", "dashboard", "feddm", "feddpms",
    "figure3", "gradient_coding", "mnist_softmax", "quadratics", "replicate", "sensitivity", "table2",
)  # fmt: skip

REFUSED = [
    ("advise", "--preset smoke --p 0.5,1", "--p must lie in [0, 1)"),
    ("advise", "--preset smoke --check-p 1", "--check-p must lie in [0, 1)"),
    ("advise", "--preset smoke --speed-up 1", "--speed-up must lie in (1, inf)"),
    ("advise", "--preset smoke --settings local_synthetic", "did you mean 'shuffled_synthetic'"),
    ("advise", "--preset smoke --algorithms scaffold", "must be fedavg"),
    ("advise", "--preset smoke --sharing.p 0.5", "use --p instead"),
    ("advise", "--preset smoke --dp.local true", "dp.local must be False"),
    ("advise", "--preset smoke --client.momentum 0.9", "client.momentum must be 0"),
    ("advise", "--preset smoke --client.optimizer adam", "client.optimizer must be sgd"),
    ("advise", "--preset smoke --partition.name iid", "no alpha"),
    ("advise", "--preset smoke --probe-rounds 0", "--probe-rounds must lie in [1, 1e9]"),
    ("advise", "--preset smoke --model.batch_norm true --federation.buffers keep --measure.every 0", "must be 0"),
    ("commons", "--preset smoke --ways reel", "did you mean 'real'"),
    ("commons", "--preset smoke --lr 0.1", "--lrs"),
    ("commons", "--preset smoke --data.validation 0", "data.validation must be above 0"),
    ("commons", "--preset smoke --algorithms fedavg", "--algorithms is not for commons"),
    ("commons", "--preset authors", "--preset authors"),
    ("commons", "--preset smoke --lrs 0.04,0", "--lrs must lie in (0, 1e38]"),
    ("communication_saved", "", "--from is missing"),
    ("communication_saved", "--from /nowhere.csv", "cannot be read"),
    ("convergence_parameters", "--p 1", "--p must lie in [0, 1)"),
    ("convergence_parameters", "--p=-0.1", "--p must lie in [0, 1)"),
    ("convergence_parameters", "--generator-p 0", "--generator-p must lie in (0, 1)"),
    ("convergence_parameters", "--generator-p 1", "--generator-p must lie in (0, 1)"),
    ("convergence_parameters", "--preset authors", "--preset authors"),
    ("convergence_parameters", "--measure.every 0", "measure.every must be at least 1"),
    ("convergence_parameters", "--sharing.p 0.3", "use --p instead"),
    ("convergence_parameters", "--measure.smoothness true", "use --hessians instead"),
    ("convergence_parameters", "--seed 3", "use --seeds instead"),
    ("convergence_parameters", "--generator.steps 3", "use --generator-epochs instead"),
    ("feddm", "--preset authors", "--preset must be one of"),
    ("feddm", "--seed 1 --seeds 1", "seeds"),
    ("feddm", "--radii 3,0", "feddm.radius must lie in (0, 1e38]"),
    ("feddm", "--rates 0.1,0", "client.lr must lie in (0, 1e38]"),
    ("feddm", "--image-rates=-0.3", "feddm.image_lr must lie in (0, 1e38]"),
    ("feddm", "--rates ,", "finite float"),
    ("feddm", "--rates 1,2 --client.lr 1", "use --rates instead"),
    ("feddm", "--image-rates=1 --feddm.image_lr=1", "use --image-rates instead"),
    ("feddm", "--data.validation 0", "data.validation must be above 0"),
    ("feddm", "--algorithms fedavg", "add feddm"),
    ("feddm", "--study-alpha 0.1,0.5", "--study-alpha takes one number"),
    ("feddpms", "--clients 10", "pairs N:images"),
    ("feddpms", "--preliminary 1", "--preliminary must lie in [0, 1)"),
    ("feddpms", "--lrs 0.01,0.001 --data.validation 0", "--lrs chooses by validation"),
    ("feddpms", "--lrs 0.01 --client.lr 0.1", "use --lrs instead"),
    ("figure3", "--p-real 1", "--p-real must lie in [0, 1)"),
    ("figure3", "--central-epochs 0", "--central-epochs must lie in [1, 1e9]"),
    ("figure3", "--sharing.setting shuffled_real", "use --settings instead"),
    ("figure3", "--preset authors", "--preset authors"),
    ("gradient_coding", "--shares=0,1.5", "--shares must lie in [0, 1]"),
    ("gradient_coding", "--shares=0.01", "less than one"),
    ("gradient_coding", "--pairs=1:3", "q in [0, 1)"),
    ("gradient_coding", "--pairs=0.5:0", "d in [1, 1e9]"),
    ("gradient_coding", "--pairs=0.5:10", "[1, 9] for 10 clients"),
    ("gradient_coding", "--pairs=0.5", "q:d"),
    ("gradient_coding", "--pairs=nan:3", "q:d"),
    ("gradient_coding", "--pairs=0.5:3,0.5:3", "different values"),
    ("gradient_coding", "--sharing=exakt", "did you mean 'exact'"),
    ("gradient_coding", "--dataset=cifar10", "unknown data set"),
    ("gradient_coding", "--repetitions=1", "--repetitions must lie in [2, 1e6]"),
    ("gradient_coding", "--workers=0", "--workers must lie in [1, 1e6]"),
    ("mnist_softmax", "--p=0,1.2", "--p must lie in [0, 1]"),
    ("mnist_softmax", "--p=-0.1", "--p must lie in [0, 1]"),
    ("mnist_softmax", "--epochs=0", "--epochs must lie in [1, 1e9]"),
    ("mnist_softmax", "--rounds=0", "--rounds must lie in [1, 1e6]"),
    ("mnist_softmax", "--rounds=1000001", "--rounds must lie in [1, 1e6]"),
    ("mnist_softmax", "--noise=-1", "--noise must lie in [0, inf)"),
    ("mnist_softmax", "--lr=0", "--lr must lie in (0, inf)"),
    ("mnist_softmax", "--lr=.inf", "--lr must lie in (0, inf)"),
    ("mnist_softmax", "--target=0", "--target must lie in (0, inf)"),
    ("mnist_softmax", "--dataset=minst", "did you mean 'mnist'"),
    ("mnist_softmax", "--data-dir=/nowhere --dataset=mnist", "is not there"),
    ("quadratics", "--p 0.5,1.1", "p must lie in [0, 1]"),
    ("quadratics", "--p=-0.1", "p must lie in [0, 1]"),
    ("quadratics", "--target 0", "target must lie in ("),
    ("quadratics", "--target 1e-36", "target must lie in ("),
    ("quadratics", "--target .nan", "target must lie in ("),
    ("quadratics", "--target .inf", "target must lie in ("),
    ("quadratics", "--rounds 0", "rounds must lie in [1, 100000]"),
    ("quadratics", "--rounds 100001", "rounds must lie in [1, 100000]"),
    ("quadratics", "--zeta-sq=-1", "zeta_sq must lie in [0, inf)"),
    ("quadratics", "--sigma-sq .inf", "sigma_sq must lie in [0, inf)"),
    ("quadratics", "--fit plan", "did you mean 'plain'"),
    ("quadratics", "--models sever", "did you mean 'server'"),
    ("replicate", "--rows R13", "unknown row"),
    ("replicate", "--rows R9", "not run here"),
    ("replicate", "--seeds=-1", "seeds"),
    ("sensitivity", "--preset authors", "authors"),
    ("sensitivity", "--rhos 0", "--rhos must lie in (0, 1]"),
    ("sensitivity", "--rhos 2", "--rhos must lie in (0, 1]"),
    ("sensitivity", "--checkpoints 1.1", "--checkpoints must lie in (0, 1]"),
    ("sensitivity", "--clients 1", "--clients must lie in [2, 1e6]"),
    ("sensitivity", "--sharing.p 0.5", "use --numbers"),
    ("sensitivity", "--generators dppm", "dppm"),
    ("sensitivity", "--partition.alpha 1", "partition.alpha is not"),
    ("sensitivity", "--partition.name iid", "partition.alpha"),
    ("table2", "--methods fedsyn", "fedssyn"),
    ("table2", "--algorithm fedgen", "use --methods instead"),
    ("table2", "--preset authors", "--preset must be one of"),
    ("table2", "--alphas=-1", "alpha"),
    ("table2", "--data.validation 0", "data.validation must be above 0"),
    ("table2", "--fedgen.batch_size 1", "fedgen.batch_size"),
    ("table2", "--lr 0.1 --rates 0.2", "use --rates instead"),
]


@pytest.mark.parametrize(("name", "words", "part"), REFUSED, ids=[f"{name} {words}" for name, words, _ in REFUSED])
def test_a_request_that_cannot_be_met_is_refused_before_any_work(
    name: str, words: str, part: str, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(part)) as error:
        getattr(sweeps(name), name)([*words.split(), f"--out={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("mnist_softmax", "mnist_softmax", "--dry-run --p=0,1 --epochs=1 --rounds=1 --noise=0"),
        ("mnist_softmax", "mnist_softmax", "--dry-run --rounds=1000000"),
        ("quadratics", "quadratics", "--dry-run --p=0,1 --rounds=1 --zeta-sq=0 --sigma-sq=0"),
        ("quadratics", "quadratics", "--dry-run --rounds=100000 --p=0 --seeds=0"),
        ("gradient_coding", "gradient_coding", "--dry-run --shares=0,1 --pairs=0:1,0.9:9 --repetitions=2 --workers=1"),
        ("sensitivity", "arguments", "--rhos=1 --clients=2 --checkpoints=1 --numbers=1000000"),
        ("figure3", "arguments", "--p-real=0 --central-epochs=1"),
        ("feddpms", "arguments", "--preliminary=0"),
        ("convergence_parameters", "arguments", "--p=0 --generator-p=0.999 --measure.every=1"),
        ("advise", "arguments", "--p=0 --check-p=0 --probe-rounds=1 --speed-up=1.001"),
    ],
)
def test_the_smallest_and_largest_allowed_values_are_taken(
    name: str, check: str, words: str, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module, argv = sweeps(name), ["--preset=smoke", *words.split(), f"--out={tmp_path / 'out'}"]
    if check == "arguments":
        options = module.arguments(argv)
        grid = {"sensitivity": "entries", "advise": "configs", "convergence_parameters": "figure_a8"}.get(name, "grid")
        assert getattr(module, grid)(options)
    else:
        assert getattr(module, check)(argv) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SWEEPS)
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
        (
            "convergence_parameters",
            "--p=0.5 --generator.channels=[8,8] --data.limit=80",
            "3 cells, 4 generators",
        ),  # IID, p = 0.5, and 1 epoch
        ("sensitivity", "--rhos=1 --numbers=1 --clients=4 --generators=ddpm", "cells"),
        ("figure3", "--alphas=0.1", "4 cells"),
        ("advise", "--alphas=0.1 --check --check-p=0.5", "cells"),
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
