"""Words that people bring from papers and other programs: each leads to the right option, and none to a wrong one."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli, hints, parts, presets
from fedcommons.config.flat import fields_for, own_fields
from fedcommons.config.parts import KINDS
from fedcommons.errors import UserError, nearest

HEAVY = ("torch", "ray", "pandas", "diffusers", "sklearn")
SWEEPS = Path(__file__).parent.parent / "sweeps"


def refused(argv: list[str]) -> str:
    """What is said of this command line of one run."""
    with pytest.raises(UserError) as error:
        cli.parse(cli.parser("a test", argv, presets.preset("small", "digits")), argv)
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--mu=0.1", "use --fedprox.mu with --algorithm fedprox or --moon.mu with --algorithm moon."),
        ("--C=0.1", "use --federation.participation."),
        ("--E=5", "use --client.epochs."),
        ("--num-clients=10", "use --partition.n_clients."),
        ("--num_clients=10", "use --partition.n_clients."),
        ("--local-epochs=2", "use --client.epochs."),
        ("--rounds=3", "use --federation.rounds."),
        ("--batch-size=8", "use --client.batch_size."),
        ("--learning-rate=0.1", "use --client.lr."),
        ("--strategy=fedavg", "use --algorithm."),
        (
            "--temperature=1",
            "use --moon.temperature with --algorithm moon or --dense.temperature with --algorithm dense or",
        ),
        ("--gpus=1", "a GPU is used where torch finds one"),
        ("--beta=0.5", "the concentration of a Dirichlet partition is --alpha, and a method's constant has"),
        ("--device=cuda", "a GPU is used where torch finds one"),
        ("--num-workers=2", "--federation.executor ray_actors --federation.actors N."),
        ("--seeds=0,1", "a run has one --seed, and the other commands take --seeds."),
        ("--p=0.5", "sharing.p needs --sharing.setting shuffled_synthetic or "),
        ("--momentum=0.9", "did you mean '--client.momentum'?"),
        ("--zzz=1", "unknown option '--zzz'. See --help."),
    ],
)
def test_a_word_from_elsewhere_names_the_right_option(word: str, said: str) -> None:
    assert said in refused([word])


def test_epsilon_leads_to_what_sets_it() -> None:
    said = refused(["--epsilon=10"])
    assert "dp.target_epsilon" in said or "--dp.local true --dp.noise_multiplier" in said


def test_a_key_of_a_config_file_is_named_without_dashes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_clients: 10\n")
    assert refused(["--config", str(path)]) == "unknown config key 'num_clients': use partition.n_clients."


def test_a_sweep_names_its_own_option_where_it_has_one(sweeps: Callable[[str], ModuleType]) -> None:
    for word, option in (("--method=fedprox", "--algorithms"), ("--dirichlet=1", "--alphas")):
        with pytest.raises(UserError, match=f"use {option}\\.$"):
            sweeps("table1").arguments([word])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, names in hints.ELSEWHERE.items()
        for name in names.split()
        if name not in KINDS[kind].known
    ],
)
def test_a_name_that_is_known_elsewhere_gets_no_wrong_guess(kind: str, name: str) -> None:
    with pytest.raises(UserError) as error:
        parts.find(kind, name)
    assert "did you mean" not in str(error.value)
    assert f"is not in the package: give an import path of your own, such as my_{kind}.py:Name" in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("CIFAR10", "cifar10"), ("FedAvg", "fedavg"), ("fashion-mnist", "fmnist"),
        ("dirichlet", "dirichlet_classes' or 'dirichlet_clients' or 'dirichlet_clients_all' or 'dirichlet_niid' or "
                      "'dirichlet_plain"),
    ],
)  # fmt: skip
def test_capitals_do_not_count_and_of_some_that_begin_so_all_are_told(name: str, near: str) -> None:
    assert nearest(name, [one for kind in KINDS.values() for one in kind.known]) == f"; did you mean '{near}'?"


def test_no_hint_names_an_option_that_is_not_there() -> None:
    every = fields_for({kind: list(k.known) for kind, k in KINDS.items() if k.known}).keys() | own_fields().keys()
    there = {*every, *cli.SHORT_NAMES, "out", "seeds", "log-file", "log-level", "num-actors"}
    for said in hints.SENTENCES.values():
        assert {one for one in re.findall(r"--([\w.-]+\w)", said)} <= there
    for field, words in hints.FIELDS.items():
        # a word whose field is not there has a sentence
        assert field in there or all(hints.sentence_for(word) for word in words.split()), field


@pytest.mark.parametrize(
    "line",
    [
        "run --client.lr -1", "run --fedprox.mu=-1 --algorithm fedprox", "table1 --alphas -1", "tune --space lr=-1",
        "feddm --federation.rounds 0",
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_before_torch_and_data_are_loaded(line: str) -> None:
    """Each in a process of its own, as another test has loaded torch in this one."""
    name, *words = line.split()
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(SWEEPS)!r}); sys.argv = {[name, *words]}\n"
        f"try: runpy.run_path({str(SWEEPS / name)!r} + '.py', run_name='__main__')\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
