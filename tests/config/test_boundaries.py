"""A user-defined component that breaks: whatever kind, method and value, one sentence names it and its file."""

import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcommons import Experiment, Reply, experiment
from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.registry import KINDS
from fedcommons.core.returned import require_reply
from fedcommons.runs import experiment as runs
from fedcommons.tune import dry_run
from fedcommons.tune.sweep import Trial

RAISES = {
    "ValueError": "raise ValueError('boom ' * 100)", "an exception without text": "raise Unsayable",
    "sys.exit(0)": "sys.exit(0)", "GeneratorExit": "raise GeneratorExit",
    "CancelledError": "raise asyncio.CancelledError", "StopIteration": "raise StopIteration",
}  # fmt: skip
RETURNS = {
    "None": "return None", "5": "return 5", "{}": "return {}", "'x'": "return 'x'", "a list": "return [object(), 1]",
    "nan": "return torch.full((3,), float('nan'))", "an object": "return object()",
}  # fmt: skip
FAULTS = {**RAISES, **RETURNS}
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
class Method:
    """A method of a component.

    base: class of right_parts.py that has it; before: called before the run folder is made; right: values that are no
    fault; options: fields of the experiment; dry: only --dry-run calls it.
    """

    kind: str
    name: str
    base: str
    before: bool = False
    right: Sequence[str] = ()
    options: tuple[tuple[str, object], ...] = ()
    dry: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


NEEDS = (("sharing.setting", "right.py:Needing"),)
CHECK = (True, tuple(RETURNS))
METHODS = [
    Method("algorithm", "start", "Method", True), Method("algorithm", "down", "Method"),
    Method("algorithm", "client", "Method"), Method("algorithm", "merge", "Method"),
    Method("algorithm", "participants", "Chooses", right=("{}",)), Method("algorithm", "share", "Shares"),
    Method("algorithm", "check", "Method", *CHECK), Method("sharing", "make", "Plain"),
    Method("sharing", "release", "Plain"), Method("sharing", "assign", "Plain"),
    Method("sharing", "requests", "Needing", True, right=("{}",)), Method("sharing", "shorter", "Long", dry=True),
    Method("sharing", "check", "Plain", *CHECK), Method("sharing", "check_data", "Plain", *CHECK),
    Method("generator", "epochs", "Maker", True, ("5",), options=NEEDS),
    Method("generator", "sampling", "Maker", True, options=NEEDS), Method("generator", "fit", "Maker", options=NEEDS),
    Method("generator", "sample", "Maker", options=NEEDS),
    *(Method("generator", f"check{end}", "Maker", *CHECK, options=NEEDS) for end in ("", "_type", "_shape", "_sizes")),
    Method("straggler", "__call__", "Late", right=("{}",)),
    Method("straggler", "arrival", "Late", True, right=("None",)), Method("straggler", "check", "Late", *CHECK),
    Method("straggler", "check_clients", "Late", *CHECK), Method("tracker", "log", "Watch", right=tuple(FAULTS)),
    Method("tracker", "finish", "Watch", right=tuple(FAULTS)),
    Method("measure", "__call__", "Look", right=("{}",), options=(("measure.every", 1),)),
    Method("data", "Wrong", "", True), Method("data", "__getitem__", "Flowers", True),
    Method("data", "__len__", "Flowers", True), Method("partition", "Wrong", "", True),
    Method("schedule", "Wrong", "", True, ("5",)), Method("model", "Wrong", "", True),
    Method("model", "forward", "Net", True), Method("model", "training_step", "Net", True),
    Method("model", "configure_optimizers", "Net", True),
    Method("model", "validation_step", "Net", True, right=tuple(fault for fault in RETURNS if fault != "nan")),
]  # fmt: skip


def cases() -> Iterator[tuple[Method, str]]:
    """Return each method with its faults: two that raise and, of values of a wrong type, one; they take turns."""
    raising, wrong_types = list(RAISES), ["5", "'x'", "an object"]
    for number, method in enumerate(METHODS):
        returned = [fault for fault in RETURNS if fault not in wrong_types or fault in method.right]
        returned += [wrong_types[number % 3]] * (wrong_types[number % 3] not in returned)
        if set(RETURNS) <= set(method.right):  # no value is a fault
            returned = returned[number % 7 :][:1]
        for fault in (*(raising[(number + k) % 6] for k in (0, 3)), *returned):
            yield method, fault


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with right components of every kind."""
    shutil.copy(Path(__file__).parents[1] / "helpers" / "right_parts.py", tmp_path / "right.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCOMMONS_PARTS", str(tmp_path))
    return tmp_path


def one_round(method: Method, part: str) -> Experiment:
    few = {"data.limit": 40, "client.epochs": 1, "federation.rounds": 1, "federation.blocks": 1, "measure.every": 0,
           "partition.name": "iid", "partition.n_clients": 2, "model": "linear", "tracking.wandb": "off"}  # fmt: skip
    return experiment("smoke", values={**few, **dict(method.options), KINDS[method.kind].field: part})


def wrong(method: Method, fault: str) -> str:
    """Return the code of a component that is right but for this method."""
    if not method.base:
        return f"def Wrong({'round' if method.kind == 'schedule' else 'n_classes'}):\n    {fault}"
    decorated = "    @property\n" if method.name in ("epochs", "sampling") else ""
    return f"class Wrong({method.base}):\n{decorated}    def {method.name}(self, *given, **named):\n        {fault}"


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(("method", "fault"), list(cases()), ids=str)
@pytest.mark.long
def test_a_component_that_breaks_is_named_in_one_sentence(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: Method, fault: str
) -> None:
    (lab / "wrong.py").write_text(WRONG.format(part=wrong(method, FAULTS[fault])))
    monkeypatch.setattr(sys, "argv", ["script.py"])
    out, code = lab / "run", None

    def script(argv: Sequence[str]) -> int:
        config = one_round(method, "wrong.py:Wrong")
        if method.dry:
            with Display() as display:
                dry_run.print_costs([Trial(out.name, config)], lab, display, in_ray=False)
        else:
            runs.run(config, out)
        return 0

    try:
        parse.main(script)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # pytest would show its frames, whose values may raise again
        traceback.print_exc()
    err = capsys.readouterr().err
    if fault in method.right:
        assert (code, err) == (0, "")
        assert method.dry or (out / "summary.json").is_file()
        return
    assert code in (1, 2)
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) <= 300
    assert last.isprintable()
    is_named_alone = method.name == "__call__" or (fault in RETURNS and method.kind in ("data", "partition", "model"))
    assert "wrong.py" in last
    assert ("Wrong" if is_named_alone else method.name) in last
    if method.before or method.dry:
        assert not out.exists()
    else:
        first, *rest = (out / "error.txt").read_text().splitlines()
        assert f"error: {first}" == last
        assert "Traceback (most recent call last):" in rest


SCALARS = [2, np.float32(2), np.array(2.0), torch.tensor(2.0), torch.tensor([2])]
NO_NUMBERS = [None, "2", (2,), {"a": 2}, np.zeros(2), torch.zeros(2), 2j]


def test_a_number_of_a_reply_may_be_a_tensor_or_an_array_of_one() -> None:
    for scalar in SCALARS:
        require_reply(Reply({}, weight=scalar, metrics={"a": scalar}))  # type: ignore
    for none in NO_NUMBERS:
        for reply in (Reply({}, weight=none), Reply({}, metrics={"a": none})):  # type: ignore
            with pytest.raises(ValueError, match=r"Reply\.(weight|metrics)"):
                require_reply(reply)
