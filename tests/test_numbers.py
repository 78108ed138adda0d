"""One rule of numbers in options, config files, lists and search spaces; and the limits of every sweep's options."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sweep_cells import cells_of

from fedcommons.config import cli, search_space
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


def readers(kind: type, text: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what reads a number: an option, a key of a file, a member of a list, an option that lists, a space."""
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
    values = {name: read() for name, read in readers(kind, text, tmp_path).items()}
    assert values == dict.fromkeys(values, value)
    assert {type(one) for one in values.values()} == {kind}


@pytest.mark.parametrize(
    ("kind", "text"), [*((float, t) for t in NO_FLOATS), *((int, t) for t in NO_INTS)], ids=lambda v: str(v)[:9]
)
def test_a_text_that_is_no_number_is_refused_everywhere(kind: type, text: str, tmp_path: Path) -> None:
    for name, read in readers(kind, text, tmp_path).items():
        with pytest.raises(UserError):
            pytest.fail(f"{name} read {text[:9]} as {read()}")


LIMITS = """
run --client.lr | 1e-9 1e38 | 0 1.1e38 ; run --seed | 0 4611686018427387904 | -1 4611686018427387905
run --target | 1 | 0 1.01 ; run --federation.participation | 0.1 1 | 0 1.01
run --dp.local --dp.clip | 1e-30 1e30 | 0 1.1e30 .inf ; run --model.channels | [1,1000000] | [0,8] [8,1000001]
run --straggler.q | 0 0.99 | -0.1 1
table1 --alphas | 1e-300 1e30 | -1 0 ; table1 --seeds | 0 | -1 4611686018427387905
table1 --federations | 1:1 10:0.1 | 0:1 10:0 10:1.1 ; table1 --lrs | 1e38 | 0
table1 --dry-run --on-cores | 1 1000000 | 0 1000001
tune --space=lr | 1e38 | 0 ; tune --space=lr=0.1 --seeds | 0 | -1 ; tune --space=lr=0.1 --samples | 1 10000 | 0 10001
audit_pool --shadows | 2 10000 | 1 10001 ; audit_pool --canaries | 4 | 3 ; audit_pool --attacked | 0 | -1
private_sizes --sizes | 1 | 0 ; private_sizes --clients | 1 1000 | 0 1001 ; private_sizes --epsilons | 1000 | 0 1001
private_sizes --seeds | 0 | -1
private_fedssyn --checkpoints | 1 | 0 1.01 ; private_fedssyn --epsilons | 1000 | 0 1001
private_fedssyn --sigmas | 1 | 0
advise --p | 0 0.99 | -0.1 1 ; advise --speed-up | 1.01 | 1 ; advise --probe-rounds | 1 | 0
advise --check-p | 0 | -1 1
convergence_parameters --p | 0 0.99 | 1 ; convergence_parameters --generator-p | 0.99 | 0 1
convergence_parameters --generator-epochs | 1 | 0
disclosure --shares | 0 1 | -0.1 1.01 ; disclosure --rhos | 1 | 0 1.01 ; disclosure --round | 0 20 | -1 21
feddm --study-alpha,--rates,--radii,--ipcs | 1 | 0 ; feddm --sigmas | 0 | -1
feddpms --sigmas | 0 | -1 ; feddpms --clients | 1:5 | 0:5 1:0 ; feddpms --preliminary | 0 0.99 | 1
feddpms --lrs,--helpers,--quotas | 1 | 0
figure3 --p-real | 0 0.99 | 1 ; figure3 --central-epochs | 1 | 0
gradient_coding --shares | 0 1 | -0.1 1.1 ; gradient_coding --pairs | 0:1 0.9:1000000000 | 1:2 0.5:0
gradient_coding --repetitions | 2 1000000 | 1 1000001 ; gradient_coding --seed | 0 | -1
gradient_coding --workers | 1 1000000 | 0 1000001
mnist_softmax --lr | 1e-9 | 0 ; mnist_softmax --p | 0 1 | -0.1 1.1 ; mnist_softmax --epochs | 1 | 0
mnist_softmax --rounds | 1 1000000 | 0 1000001 ; mnist_softmax --seeds | 0 | -1
quadratics --p | 0 1 | -0.1 1.1 ; quadratics --seeds | 0 | -1 ; quadratics --rounds | 1 | 0
quality --neighbours | 1 1000 | 0 1001 ; quality --images | 10 1000000 | 9 1000001
quality --epochs | 1 1000000 | 0 1000001 ; quality --rhos | 1 | 0 1.01
fedcvae --rates | 1 | 0 ; fedcvae --alphas | 1 | -1
dsprites --rhos | 1 | 0 1.01
sensitivity --rhos | 1 | 0 1.01 ; sensitivity --clients | 2 | 1
replicate --seeds | 0 | -1
"""
"""Options | smallest and largest allowed | smallest and largest refused; rows of one script may share a line."""
CELLS = [[cell.split() for cell in line.split("|")] for line in LIMITS.replace(" ; ", "\n").strip().splitlines()]
ROWS = [
    ([*words, option], allowed, refused) for (*words, last), allowed, refused in CELLS for option in last.split(",")
]


@pytest.mark.parametrize(("words", "allowed"), [row[:2] for row in ROWS], ids=lambda v: " ".join(v))
def test_a_limit_itself_is_allowed(sweeps: Callable[[str], ModuleType], words: list[str], allowed: list[str]) -> None:
    name, *argv, option = words
    read = cells_of if name not in ("run", "mnist_softmax", "gradient_coding", "quadratics") else arguments
    for value in allowed:
        read(sweeps(name), [*argv, f"{option}={value}"])


def arguments(module: ModuleType, argv: list[str]) -> object:
    return module.arguments(argv)


@pytest.mark.long
def test_values_out_of_range_are_refused_before_torch_is_imported_and_data_are_loaded(tmp_path: Path) -> None:
    sweeps = Path(__file__).parents[1] / "sweeps"
    lines = [(name, *argv, f"{option}={value}") for (name, *argv, option), _, refused in ROWS for value in refused]
    code = f"""
import runpy, sys
from fedcommons.config import cli
scripts, main = {{}}, cli.main
sys.modules |= {{"torch": None, "ray": None}}  # an import of these fails
cli.main = lambda function, **_: scripts.update({{function.__name__: function}})
sys.path.insert(0, {str(sweeps)!r})
for script, *argv in {lines!r}:
    if script not in scripts:
        runpy.run_path(f"{sweeps}/{{script}}.py", run_name="__main__")
    sys.argv = [script, *argv]
    try:
        main(scripts[script])
    except SystemExit as ended:
        if ended.code != 2:
            sys.exit(f"{{script}} {{argv}}: not refused, or late")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[-500:]
    printed = ended.stderr.splitlines()
    assert len(printed) == len(lines)
    for (_, *_, last), sentence in zip(lines, printed, strict=True):
        assert sentence.startswith("error: ")
        assert " lie" in sentence or last.partition("=")[0] in sentence, (last, sentence)
    assert not list(tmp_path.iterdir())
