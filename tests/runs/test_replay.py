"""A client that fails says where and why, and any client of a run can be run again alone, to the same bits."""

import pdb
import pickle
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import pytest
import report_runs
import torch
from torch import Tensor

from fedcommons import ClientData, Experiment, Facts, Message, Reply, Work, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import override
from fedcommons.core.block_sum import add_blocks
from fedcommons.core.local_training import Batch
from fedcommons.core.worker import Worker
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation import rounds
from fedcommons.federation.client_block import BlockResult, ClientTask, RoundTask, train_block
from fedcommons.federation.stragglers import Independent
from fedcommons.flat_tensors import Payload, data, flat
from fedcommons.runs import build, experiment
from fedcommons.runs.replay import replay
from fedcommons.storage.error_file import read_error

SHORT = {"federation.rounds": 4, "federation.checkpoint_every": 3, "measure.every": 0, "client.epochs": 2,
         "data.limit": 100, "tracking.wandb": "off"}  # fmt: skip
QUICK = {"sharing.setting": "shuffled_synthetic", "generator.epochs": 1, "generator.channels": (8, 8),
         "generator.sampling_steps": 2}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    return presets.experiment("smoke", "digits", {**SHORT, "artifacts": str(tmp_path / "artifacts")})


script = report_runs.script("run")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], BlockResult]:
    """Record the result of each client of the engine's blocks, by round and client."""
    results = {}

    def spy(worker: Worker, task: RoundTask, block: Sequence[ClientTask]) -> BlockResult:
        for client_task in block:
            results.setdefault((task.round, client_task.client), train_block(worker, task, [client_task]))
        return train_block(worker, task, block)

    monkeypatch.setattr(rounds, "train_block", spy)
    return results


@pytest.mark.parametrize(
    "fields",
    [{"algorithm": "scaffold", "federation.blocks": 1, "federation.memory_mb": 0.001},
     {"model.batch_norm": True, "federation.participation": 0.8, "straggler.q": 0.4},
     {**QUICK, "algorithm": "fedmix"},
     {"dp.local": True, "algorithm": "fedprox", "straggler.rule": "deadline", "straggler.deadline": 0.5}],
    ids=["memory in files", "stragglers", "pool and means", "noise and partial work"],
)  # fmt: skip
@pytest.mark.long
def test_a_client_that_is_run_again_does_what_it_did(
    fields: Mapping[str, Any], config: Experiment, tmp_path: Path, trained: dict[tuple[int, int], BlockResult]
) -> None:
    """From a checkpoint (rounds 3 and 4 of 4) and from the start (round 2); and it leaves the run as it is."""
    folder = tmp_path / "run"
    experiment.run(override(config, fields), folder, say=lambda _: None)
    of_run, before = dict(trained), {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for number, played in {4: None, 3: "2 round(s)", 2: "1 round(s)"}.items():
        client, reported = max(i for r, i in of_run if r == number), list[str]()
        again, there = replay(folder, number, client, reported.append), of_run[number, client]
        sums = add_blocks(list(there.sums.values()))
        assert again.sums.keys() == sums.keys() != set()
        assert all(torch.equal(data(again.sums[name]), data(sums[name])) for name in sums)
        assert again.metrics == there.replies[client][1].metrics != {}
        assert again.up_bytes == there.up_bytes
        assert again.rejected is None
        assert len(reported) == 1 + bool(played)
        assert played is None or played in reported[0]
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_it_says_what_a_client_had_and_answered(config: Experiment, tmp_path: Path) -> None:
    experiment.run(override(config, {"federation.rounds": 1}), tmp_path / "run")
    again = replay(tmp_path / "run", 1, 2)
    counts = np.asarray(build.build(config).partition.class_counts)[2]
    assert again.class_counts == counts[: len(again.class_counts)].tolist()
    assert again.down_bytes == again.up_bytes == 4 * len(data(again.sums["delta"]))
    norm = float(data(again.sums["delta"]).square().sum().sqrt())
    lines = str(again).splitlines()
    assert lines[0].startswith(f"examples: {counts.sum()} (of class ")
    assert {f"norm of delta: {norm:.9g}", f"loss: {again.metrics['loss']:.9g}"} <= {*lines}
    assert lines[-1] == "reply: accepted"
    with pytest.raises(ClientError, match="every reply was rejected"):  # as every client diverges
        experiment.run(override(config, {"client.lr": 1e30}), tmp_path / "diverging")
    again = replay(tmp_path / "diverging", 1, 0)
    assert again.sums == again.metrics == {}
    assert str(again).endswith("reply: rejected, delta has values that are not finite")


def fail(batch: Batch, step: int) -> Tensor:
    raise ZeroDivisionError("of\nno avail")


class Failing(FedAvg):
    """FedAvg whose client 2 fails in round 3."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if seed == seed_for(0, "client", 3, 2):
            work.local(flat(message.common, "model"), data, seed, loss=fail)
        return super().client(work, message, memory, data, round, seed)


FAILING = f"{__file__}:Failing"
SENTENCE = (
    "client 2, round 3, Failing: ZeroDivisionError: of no avail "
    rf"\(test_replay.py, line {fail.__code__.co_firstlineno + 1} in fail; training data \(\d+, 1, 8, 8\); "
    r"step 0, batch \(10, 1, 8, 8\)\)"
)


def test_a_client_that_fails_is_named_and_the_command_that_is_printed_runs_it_again(
    config: Experiment, tmp_path: Path, script: ModuleType, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The regular checkpoints are far apart, and the folder has a blank in its name."""
    folder = tmp_path / "a run"

    def main(argv: object) -> int:
        experiment.run(override(config, {"algorithm": FAILING, "federation.checkpoint_every": 100}), folder)
        return 0

    with pytest.raises(SystemExit) as end:
        parse.main(main)
    assert end.value.code == 1
    hint, message = capsys.readouterr().err.splitlines()[-2:]  # the traceback is in error.txt
    assert re.fullmatch(f"error: {SENTENCE}", message)
    python, path, *argv = shlex.split(hint.partition(": ")[2])
    assert (python, path) == ("python", "sweeps/run.py")
    opened: list[TracebackType] = []
    monkeypatch.setattr(pdb, "post_mortem", opened.append)
    with pytest.raises(ClientError, match=SENTENCE) as caught:
        script.run([*argv, "--pdb"])
    error = caught.value
    assert len(opened) == 1
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.sentence == sentence(error) == str(error)
    text = (folder / "error.txt").read_text()
    assert text.splitlines()[0] == error.sentence
    assert f"python sweeps/run.py --replay '{folder}' --round 3 --client 2" in text
    assert (read_error(folder) or "").startswith(error.sentence)


def test_an_error_keeps_its_facts_on_its_way_from_another_process() -> None:
    from ray.exceptions import RayTaskError

    error = ClientError("it failed", client=2, round=3, trace="where\nit was")
    sent: ClientError = pickle.loads(pickle.dumps(error))
    around = RayTaskError("map", "a long traceback", sent, "a process", 1, "an address").as_instanceof_cause()
    for arrived in (sent, around):
        assert isinstance(arrived, ClientError)
        assert (arrived.client, arrived.round, arrived.trace) == (2, 3, "where\nit was")
        assert sentence(arrived) == "it failed"
    other = RayTaskError("map", "a long traceback", ValueError("no\nway"), "a process", 1, "an address")
    assert sentence(other.as_instanceof_cause()) == "ValueError: no way"


def test_a_client_that_does_not_train_and_a_bad_request_are_refused(tmp_path: Path, script: ModuleType) -> None:
    """Of 30 clients 15 are drawn, some of which do not answer."""
    fields = {"partition.n_clients": 30, "federation.participation": 0.5, "straggler.q": 0.2}
    single_round = {"federation.rounds": 1, "partition.name": "iid"}
    experiment.run(presets.experiment("smoke", "digits", {**SHORT, **fields, **single_round}), tmp_path / "run")
    joined = rounds.participants(30, 0.5, 0, 1)
    late = Independent(0.2)(joined, Facts(30, [1] * 30, 1), 1, 0)
    present = [i for i in joined if i not in late]
    those = f"these do: {', '.join(map(str, present[:10]))} and {len(present) - 10} more"
    away = min(set(range(30)) - set(joined))
    for argv, part in (
        (
            f"--replay {{}} --round 1 --client {away}",
            f"^client {away} does not train in round 1: .*not sampled.*{those}",
        ),
        (f"--replay {{}} --round 1 --client {min(late)}", f"does not arrive.*{those}"),
        ("--replay {}/.. --round 1 --client 0", "no config.yaml"),
        ("--replay {} --round 2 --client 0", r"--round must lie in \[1, 1\] .* got 2"),
        ("--replay {} --round 0 --client 0", r"--round must lie in \[1, 1\] .* got 0"),
        ("--replay {} --round 1 --client 30", r"--client must lie in \[0, 29\] .* got 30"),
        ("--replay {} --round 1", "--replay needs --round R and --client I"),
        ("--replay {} --round 1 --client 0 --client.lr=0.1", "got --client.lr"),
        ("--round 1 --preset smoke", "--round goes with --replay"),
    ):
        with pytest.raises(UserError, match=part):
            script.run(argv.format(tmp_path / "run").split())


@pytest.mark.long
def test_images_that_are_gone_are_not_made_again(config: Experiment, tmp_path: Path) -> None:
    experiment.run(override(config, {**QUICK, "federation.rounds": 1}), tmp_path / "run", say=lambda _: None)
    shutil.rmtree(tmp_path / "artifacts" / "images")
    with pytest.raises(UserError, match="the synthetic images of client 0 have not been generated"):
        replay(tmp_path / "run", 1, 0)
    assert not (tmp_path / "artifacts" / "images").exists()
