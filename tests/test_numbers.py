"""One rule of numbers: what a text means is the same in a field, a config file, a list and a search space."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons.config import cli, presets, search_space
from fedcommons.config.fields import Field
from fedcommons.config.given import Given
from fedcommons.config.reading import value_of
from fedcommons.errors import UserError

FLOATS = {
    "12": 12.0, "１２": 12.0, "٠.٥": 0.5, "1_0.5": 10.5, " 5 ": 5.0, "+5": 5.0, "1e3": 1000.0, "-0": 0.0, ".5": 0.5,
    "5.": 5.0, "1E-3": 0.001, "1e-400": 0.0, "007": 7.0,
}  # fmt: skip
INTS = {"12": 12, "１２": 12, "١٢": 12, "1_0": 10, " 5 ": 5, "+5": 5, "-0": 0, "007": 7, "9" * 400: int("9" * 400)}
NO_FLOATS = ("0x10", "inf", "nan", "-inf", "Infinity", "1__0", "_1", "1:30", "½", "²", "", "1e", "1e400", "-1e400",
             "9" * 400, "[1]", "true", "null", "1,5e", "--1")  # fmt: skip
NO_INTS = ("1e3", "1.0", "0x10", "0b1", "0o7", "inf", "nan", "1__0", "1_", "½", "²", "", "1:30", "true", "[1]")
TAKEN = [*((float, *one) for one in FLOATS.items()), *((int, *one) for one in INTS.items())]


def ways(kind: type, text: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """What reads a number of this kind: an option, a key of a file, a member of a list, of each option that lists."""
    (folder / "c.yaml").write_text(f"x: '{text}'\n")
    parser = cli.Parser("a test")
    parser.add_argument("--x", type=kind, default=None)
    known = {"client.lr": Field(kind, None)}

    def swept() -> Any:
        return search_space.parse([f"client.lr={text}"], known, {})["client.lr"][0]

    return {
        "option": lambda: cli.parse(parser, [f"--x={text}"]).x,
        "file": lambda: cli.parse(parser, ["--config", str(folder / "c.yaml")]).x,
        "member": lambda: value_of(Given("x", [text]), tuple[kind, ...])[0],
        "list": lambda: cli.split("--x", text, kind)[0],
        "space": swept,
    }


@pytest.mark.parametrize(("kind", "text", "value"), TAKEN, ids=lambda v: str(v)[:9])
def test_a_number_means_the_same_everywhere(kind: type, text: str, value: Any, tmp_path: Path) -> None:
    found = {name: read() for name, read in ways(kind, text, tmp_path).items()}
    assert found == dict.fromkeys(found, value)
    assert {type(one) for one in found.values()} == {kind}


@pytest.mark.parametrize(
    ("kind", "text"), [*((float, t) for t in NO_FLOATS), *((int, t) for t in NO_INTS)], ids=lambda v: str(v)[:9]
)
def test_what_is_no_number_is_refused_everywhere(kind: type, text: str, tmp_path: Path) -> None:
    for name, read in ways(kind, text, tmp_path).items():
        with pytest.raises(UserError):
            pytest.fail(f"{name} read {text[:9]} as {read()}")


def test_pairs_of_numbers_follow_the_rule(sweeps: Callable[[str], ModuleType]) -> None:
    assert sweeps("gradient_coding").pair("٠.٥:1_0") == (0.5, 10)
    assert sweeps("feddpms")._federations("１０:1_000") == [(10, 1000)]
    for text in ("0.5:1e3", "nan:2", "1e400:2", "0.5:0x2", "1:2", "0.5:0", "0.5"):
        with pytest.raises(UserError, match="pairs takes q:d"):
            sweeps("gradient_coding").pair(text)


OUT_OF_RANGE = (
    "run --client.lr 0", "run --seed -1", "run --target 2", "run --federation.participation 0", "run --dp.clip .inf",
    "run --model.channels [0,8]", "run --straggler.q 1", "run --algorithm fedprox --fedprox.mu -1",
    "run --algorithm feddm --feddm.radius 0", "table1 --alphas -1", "table1 --seeds -1", "table1 --federations 0:1",
    "table1 --lrs 0", "table1 --dry-run --on-cores 0", "tune --space lr=0", "tune --space lr=0.1 --seeds -1",
    "tune --space lr=0.1 --samples 0", "audit_pool --shadows 100000000000000000000", "audit_pool --shadows 1000000000",
    "audit_pool --canaries 3", "audit_pool --attacked -1", "private_sizes --sizes -5", "private_sizes --epsilons 0",
    "private_sizes --seeds -1", "private_fedssyn --checkpoints 2", "private_fedssyn --epsilons -1", "advise --p 1",
    "private_fedssyn --sigmas 0", "advise --speed-up 1", "advise --probe-rounds 0", "advise --check-p -1",
    "convergence_parameters --p 1", "convergence_parameters --generator-p 1", "disclosure --shares 2",
    "convergence_parameters --generator-epochs 0", "disclosure --rhos 0", "disclosure --round -1",
    "feddm --study-alpha a", "feddm --study-alpha 0", "feddm --rates 0", "feddm --radii 0", "feddm --ipcs 0",
    "feddm --sigmas -1", "feddpms --sigmas -1", "feddpms --clients 0:5", "feddpms --preliminary 1", "feddpms --lrs 0",
    "feddpms --helpers 0", "feddpms --quotas 0", "figure3 --p-real 1", "figure3 --central-epochs 0",
    "gradient_coding --shares 2", "gradient_coding --pairs 1:2", "gradient_coding --repetitions 1",
    "gradient_coding --seed -1", "gradient_coding --workers 0", "mnist_softmax --lr 0", "mnist_softmax --p 2",
    "mnist_softmax --seeds -1", "quadratics --p 2", "quadratics --seeds -1", "quadratics --rounds 0",
    "fedcvae --rates 0", "fedcvae --alphas -1",
)  # fmt: skip


@pytest.mark.long
def test_what_is_out_of_range_is_refused_before_torch_is_imported_and_data_are_loaded(tmp_path: Path) -> None:
    sweeps = Path(__file__).parents[1] / "sweeps"
    code = f"""
import runpy, sys
from fedcommons.config import cli
found, ends = {{}}, []
cli.main = lambda function, **_: found.update({{function.__name__: function}})
sys.path.insert(0, {str(sweeps)!r})
for line in {OUT_OF_RANGE!r}:
    script, *argv = line.split()
    if script not in found:
        runpy.run_path(f"{sweeps}/{{script}}.py", run_name="__main__")
    if cli._run(lambda _: found[script](argv)) != 2 or "torch" in sys.modules:
        sys.exit(f"{{line}}: not refused, or late")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert len(ended.stderr.splitlines()) == len(OUT_OF_RANGE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"), [("client.lr", -1.0), ("seed", 10**30), ("alpha", 0.0), ("model.hidden", 0)]
)
def test_an_experiment_from_python_has_the_same_ranges(name: str, value: float) -> None:
    with pytest.raises(UserError, match="must lie in"):
        presets.experiment("smoke", values={name: value})
