"""Somebody's own part that breaks: whatever part, method and way, it ends in one sentence that names them.

The table is made of the Protocols: who adds a method, or a kind of part, finds here that it is not in it.
"""

import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons import Experiment, experiment
from fedcommons.config import cli
from fedcommons.config.parts import KINDS
from fedcommons.core.algorithm import Algorithm, ChoosesClients, Reply, Shares, TellsWork
from fedcommons.core.returned import require_reply
from fedcommons.generators.generator import Generator
from fedcommons.runs import build
from fedcommons.runs import experiment as runs
from fedcommons.runs.own_measure import Measure
from fedcommons.sharing.stage import Generating, Stage, TakesLong
from fedcommons.sweeping import planned
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.sweep import Trial
from fedcommons.tracking.tracker import Tracker

RAISES = {
    "ValueError": "raise ValueError('boom ' * 100)",
    "an exception that cannot be told": "raise Unsayable",
    "sys.exit(0)": "sys.exit(0)",
    "GeneratorExit": "raise GeneratorExit",
    "CancelledError": "raise asyncio.CancelledError",
    "StopIteration": "raise StopIteration",
}
GIVES = {
    "None": "return None",
    "5": "return 5",
    "{}": "return {}",
    "'x'": "return 'x'",
    "a list": "return [object(), 1]",
    "nan": "return torch.full((3,), float('nan'))",
    "an object": "return object()",
}
WAYS = {**RAISES, **GIVES}

WRONG = """
import asyncio
import sys

import torch
from right import *


class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


{part}
"""


@dataclass(frozen=True)
class Seam:
    """A method of somebody's, and how it comes to be called.

    base: the right part that has it; before: whether it is called before the run folder is made; right: the ways that
    are right; options: what else the experiment needs; dry: only --dry-run calls it.
    """

    kind: str
    method: str
    base: str
    before: bool = False
    right: Sequence[str] = ()
    options: tuple[tuple[str, object], ...] = ()
    dry: bool = False


NEEDS = (("sharing.setting", "right.py:Needing"),)
ANY = tuple(GIVES)  # what it gives does not matter
CHECK = (True, ANY)
SEAMS = [
    Seam("algorithm", "start", "Method", True),
    Seam("algorithm", "down", "Method"),
    Seam("algorithm", "client", "Method"),
    Seam("algorithm", "merge", "Method"),
    Seam("algorithm", "participants", "Chooses", right=("{}",)),
    Seam("algorithm", "share", "Shares"),
    Seam("algorithm", "pieces", "Tells", right=("{}",), dry=True),
    Seam("algorithm", "smaller", "Tells", dry=True),
    Seam("algorithm", "check", "Method", *CHECK),
    Seam("sharing", "make", "Plain"),
    Seam("sharing", "release", "Plain"),
    Seam("sharing", "assign", "Plain"),
    Seam("sharing", "needs", "Needing", True, right=("{}",)),
    Seam("sharing", "shorter", "Long", dry=True),
    Seam("sharing", "check", "Plain", *CHECK),
    Seam("sharing", "check_dealt", "Plain", *CHECK),
    Seam("generator", "epochs", "Maker", True, ("5",), options=NEEDS),
    Seam("generator", "sampling", "Maker", True, options=NEEDS),
    Seam("generator", "fit", "Maker", options=NEEDS),
    Seam("generator", "sample", "Maker", options=NEEDS),
    *(Seam("generator", f"check{what}", "Maker", *CHECK, options=NEEDS) for what in ("", "_type", "_shape", "_sizes")),
    Seam("straggler", "__call__", "Late", right=("{}",)),
    Seam("straggler", "arrival", "Late", True, right=("None",)),
    Seam("straggler", "check", "Late", *CHECK),
    Seam("straggler", "check_clients", "Late", *CHECK),
    Seam("tracker", "log", "Watch", right=tuple(WAYS)),
    Seam("tracker", "finish", "Watch", right=tuple(WAYS)),
    Seam("measure", "__call__", "Look", right=("{}",), options=(("measure.every", 1),)),
    Seam("data", "Wrong", "", True),
    Seam("data", "__getitem__", "Flowers", True),
    Seam("data", "__len__", "Flowers", True),
    Seam("partition", "Wrong", "", True),
    Seam("schedule", "Wrong", "", True, ("5",)),
    Seam("model", "Wrong", "", True),
    Seam("model", "forward", "Net", True),
    Seam("model", "training_step", "Net", True),
    Seam("model", "configure_optimizers", "Net", True),
    Seam("model", "validation_step", "Net", True, right=tuple(way for way in GIVES if way != "nan")),
]
PROTOCOLS = {
    "algorithm": (Algorithm, ChoosesClients, Shares, TellsWork),
    "sharing": (Stage, Generating, TakesLong),
    "generator": (Generator,),
    "straggler": (),
    "tracker": (Tracker,),
    "measure": (Measure,),
    "data": (),
    "partition": (),
    "schedule": (),
    "model": (),
}


def members(protocol: type) -> set[str]:
    """The functions and attributes that a Protocol names."""
    named = {*vars(protocol), *vars(protocol).get("__annotations__", {})}
    return {name for name in named if not name.startswith("_") or name == "__call__"}


def test_every_method_of_every_kind_of_part_is_in_the_table() -> None:
    assert PROTOCOLS.keys() == KINDS.keys()
    for kind, protocols in PROTOCOLS.items():
        tabled = {seam.method for seam in SEAMS if seam.kind == kind}
        assert set().union(*map(members, protocols)) <= tabled
        assert set(KINDS[kind].has) <= tabled
        assert set(KINDS[kind].has) == (members(protocols[0]) if protocols else set(KINDS[kind].has))
    optional = set(re.findall(r'refuse\(\s*[^,]+, "(\w+)"', getsource(build)))
    assert optional == {seam.method for seam in SEAMS if seam.method.startswith("check")}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands are given, with the right parts."""
    shutil.copy(Path(__file__).with_name("right_parts.py"), tmp_path / "right.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCOMMONS_PARTS", str(tmp_path))
    return tmp_path


def settled(seam: Seam, part: str) -> Experiment:
    """A run of a round with this part."""
    few = {"data.limit": 40, "client.epochs": 1, "federation.rounds": 1, "federation.blocks": 1, "measure.every": 0,
           "partition.name": "iid", "partition.n_clients": 2, "model": "linear", "tracking.wandb": "off"}  # fmt: skip
    return experiment("smoke", values={**few, **dict(seam.options), KINDS[seam.kind].field: part})


def wrong(seam: Seam, way: str) -> str:
    """A part that is right but for this method."""
    if not seam.base:
        return f"def Wrong({'round' if seam.kind == 'schedule' else 'n_classes'}):\n    {way}"
    decorated = "    @property\n" if seam.method in ("epochs", "sampling") else ""
    return f"class Wrong({seam.base}):\n{decorated}    def {seam.method}(self, *given, **named):\n        {way}"


def ended(script: Callable[[Sequence[str]], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a script; 70 of one that ended with a traceback."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    try:
        cli.main(script)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:  # pytest would show its frames, and what is in them is somebody's
        traceback.print_exc()
    return 70


def require_one_sentence(err: str, *names: str) -> None:
    """The screen has no traceback, and its last line is a sentence that fits in it and names these."""
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) <= 200
    assert last.isprintable()
    assert [name for name in names if name not in last] == []


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.kind}-{seam.method}")
@pytest.mark.long
def test_a_part_that_breaks_is_told_in_one_sentence(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seam: Seam, way: str
) -> None:
    (lab / "wrong.py").write_text(WRONG.format(part=wrong(seam, WAYS[way])))
    out = lab / "run"

    def script(argv: Sequence[str]) -> int:
        config = settled(seam, "wrong.py:Wrong")
        if seam.dry:
            with Display() as display:
                planned.dry_run([Trial(out.name, config)], lab, display, in_ray=False)
        else:
            runs.run(config, out)
        return 0

    code, said = ended(script, monkeypatch), capsys.readouterr()
    if way in seam.right:
        assert (code, said.err) == (0, "")
        assert seam.dry or (out / "summary.json").is_file()
        return
    assert code in (1, 2)
    called_once = seam.method == "__call__" or (way in GIVES and seam.kind in ("data", "partition", "model"))
    require_one_sentence(said.err, "wrong.py", "Wrong" if called_once else seam.method)
    if seam.before or seam.dry:
        assert not out.exists()
    else:
        first, *rest = (out / "error.txt").read_text().splitlines()
        assert f"error: {first}" == said.err.splitlines()[-1]
        assert "Traceback (most recent call last):" in rest


FEW = ("--preset=smoke", "--federation.rounds=1", "--measure.every=0", "--tracking.wandb=off", "--alphas=0.1")


@pytest.mark.ray
@pytest.mark.parametrize("more", [(), ("--federation.executor=ray_actors", "--federation.actors=1")])
def test_in_a_sweep_the_cell_fails_and_others_go_on(lab: Path, more: Sequence[str]) -> None:
    """sys.exit in a trial or an actor would end its process, and Ray try it again."""
    (lab / "wrong.py").write_text(WRONG.format(part=wrong(Seam("algorithm", "client", "Method"), "sys.exit(0)")))
    both = ("--algorithms=right.py:Method,wrong.py:Wrong", "--settings=real")
    done = given(lab, "table1.py", *FEW, *both, *more, "--out=sweep")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert re.search(r": client \d, round 1, Wrong: SystemExit: 0 \(wrong.py, line \d+ in client; training data", told)
    (summary,) = (lab / "sweep").glob("*/summary.json")
    assert summary.parent.name.startswith("method")
    (error,) = (lab / "sweep").glob("*/error.txt")
    assert "Traceback" in error.read_text()


@pytest.mark.ray
def test_in_a_sweep_a_generator_that_breaks_takes_its_own_cells_only(lab: Path) -> None:
    part = wrong(Seam("generator", "fit", "Maker"), "raise GeneratorExit")
    (lab / "wrong.py").write_text(WRONG.format(part=part))
    settings = ("--settings=real,shuffled_synthetic", "--algorithms=fedavg")
    done = given(lab, "table1.py", *FEW, *settings, "--generator=wrong.py:Wrong", "--out=sweep")
    assert done.returncode == 1
    assert re.search(r"wrong.py:Wrong.fit, client \d: GeneratorExit \(wrong.py, line \d+ in fit\)", done.stdout)
    assert len([*(lab / "sweep").glob("*/summary.json")]) == 1


def given(lab: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What a script says, in a process of its own."""
    where = {name: value for name, value in os.environ.items() if name != "FEDCOMMONS_PARTS"}
    path = Path(__file__).parent.parent / "sweeps" / script
    return subprocess.run([sys.executable, str(path), *words], cwd=lab, env=where, capture_output=True, text=True)


@pytest.mark.parametrize("one", [2, np.float32(2), np.array(2.0), torch.tensor(2.0), torch.tensor([2])])
def test_a_number_of_a_reply_may_be_a_tensor_or_an_array_of_one(one: Any) -> None:
    require_reply(Reply({}, weight=one, metrics={"a": one}))


@pytest.mark.parametrize("none", [None, "2", (2,), {"a": 2}, np.zeros(2), torch.zeros(2), 2j])
def test_what_is_no_number_is_refused_in_a_reply(none: Any) -> None:
    for reply in (Reply({}, weight=none), Reply({}, metrics={"a": none})):
        with pytest.raises(ValueError, match=r"Reply\.(weight|metrics)"):
            require_reply(reply)
