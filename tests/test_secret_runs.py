"""Runs with secret noise: their salts stand in no other file, and a run goes on with its own salt or not at all."""

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.core import salts
from fedcommons.core.executor import Executor
from fedcommons.errors import ClientError, UserError
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.runs import build
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from fedcommons.tensors import data

Command = Callable[..., "subprocess.CompletedProcess[str]"]

FIELDS = {
    "dp.local": True, "dp.noise": "secret", "data.limit": 60, "client.epochs": 1, "measure.every": 0,
    "federation.rounds": 3, "federation.checkpoint_every": 1, "tracking.wandb": "off",
}  # fmt: skip
POOL = {
    "sharing.setting": "shuffled_synthetic", "generator.name": "private_ddpm", "generator.epochs": 1,
    "generator.batch_size": 5, "generator.channels": (8, 16), "generator.timesteps": 20, "generator.sampling_steps": 2,
    "generator.noise_multiplier": 2.0, "generator.label_noise": 2.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's salts, which does not exist yet."""
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "salts"


def config(tmp_path: Path, **values: Any) -> Experiment:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return presets.experiment("smoke", "digits", {**FIELDS, "artifacts": str(tmp_path / "artifacts"), **named})


def quiet(text: str) -> None:
    pass


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ: the metrics, the summary, the final weights."""
    last = max(folder.glob("checkpoints/*.safetensors"))
    return {path.name: path.read_bytes() for path in (folder / "rounds.jsonl", folder / "summary.json", last)}


def rewound(whole: Path, to: Path) -> Path:
    """A copy of the run's folder as it was when its last round but one had been played."""
    shutil.copytree(whole, to)
    (to / "summary.json").unlink()
    for path in to.glob("checkpoints/round-000003*"):
        path.unlink()
    return to


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    run(config(tmp_path), tmp_path / "whole", say=quiet)
    return tmp_path / "whole"


@pytest.mark.long
def test_two_secret_runs_of_one_seed_differ_and_two_seeded_ones_do_not(tmp_path: Path, state: Path) -> None:
    for noise, alike in (("seeded", True), ("secret", False)):
        one, other = (tmp_path / f"{noise} {k}" for k in (1, 2))
        for folder in (one, other):
            run(config(tmp_path, dp__noise=noise, federation__rounds=1), folder, say=quiet)
        a, b = outputs(one), outputs(other)
        assert (a == b) == (a["round-000001.safetensors"] == b["round-000001.safetensors"]) == alike
        assert state.exists() == (one / "noise.json").exists() == (not alike)
    names = {json.loads((folder / "noise.json").read_text())["salt"] for folder in (one, other)}
    assert {path.name for path in state.iterdir()} == {f"run-{name}" for name in names}
    assert len(names) == 2


@pytest.mark.long
def test_a_salt_stands_in_no_other_file_and_is_never_printed(
    tmp_path: Path, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a run with generators, and of one whose client fails: its traceback is kept too."""
    run(config(tmp_path, **POOL), tmp_path / "run")
    with pytest.raises(ClientError, match="largest was client"):
        run(config(tmp_path, client__lr=1e38), tmp_path / "failed")
    kept = [path.read_bytes() for path in state.iterdir()]
    assert len(kept) == 2 + 4 + 4  # two runs, and of each of four clients the generator and the class counts
    folders = [tmp_path / name for name in ("run", "failed", "artifacts")]
    files = [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [text.encode() for text in capfd.readouterr()]
    assert len(files) > 20
    for salt in kept:
        for written in (salt, salt.hex().encode(), base64.b64encode(salt), repr(salt)[2:-1].encode()):
            assert not any(written in content for content in files)
    told = json.loads((tmp_path / "run" / "noise.json").read_text())
    assert len({told["salt"], *told["generators"]} & {salts.name_of(salt) for salt in kept}) == 5


def test_a_secret_run_that_goes_on_ends_as_if_nothing_had_happened(tmp_path: Path, whole: Path, state: Path) -> None:
    cut = rewound(whole, tmp_path / "cut")
    seen: list[int] = []
    run(config(tmp_path), cut, resume=True, say=quiet, on_round=lambda number, _: seen.append(number))
    assert seen == [3]
    assert outputs(cut) == outputs(whole)
    assert len(list(state.iterdir())) == 1


@pytest.mark.parametrize("damage", ["removed", "replaced"])
def test_without_its_salt_a_run_does_not_go_on(
    damage: str, tmp_path: Path, whole: Path, state: Path, command: Command
) -> None:
    """With new noise the same rounds would be released twice. A finished run is read all the same."""
    cut = rewound(whole, tmp_path / "cut")
    lines = (cut / "rounds.jsonl").read_bytes()
    (salt,) = state.iterdir()
    salt.write_bytes(bytes(32)) if damage == "replaced" else salt.unlink()
    done = command("run", "--config", str(cut / "config.yaml"), "--out", str(cut), "--resume", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert str(salt) in line
    with pytest.raises(UserError, match=str(salt)):
        replay(cut, 3, 0, quiet)
    assert (cut / "rounds.jsonl").read_bytes() == lines
    assert run(config(tmp_path), whole, resume=True, say=quiet) == json.loads((whole / "summary.json").read_text())


def test_no_salt_stands_where_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "storage" / "state"))
    there = config(tmp_path, storage=str(tmp_path / "storage"))
    with pytest.raises(UserError, match=r"must not be in .*storage"):
        run(there, tmp_path / "run", say=quiet)
    assert not [*tmp_path.rglob("run-*")]


@pytest.mark.long
def test_a_client_of_a_secret_run_is_replayed_with_its_noise(tmp_path: Path) -> None:
    """Of one client alone: what it sends is what moves the model from checkpoint to checkpoint."""
    run(config(tmp_path, partition__name="iid", partition__n_clients=1), tmp_path / "run", say=quiet)
    cut = rewound(tmp_path / "run", tmp_path / "cut")
    standings = [checkpoint.load_latest(folder / "checkpoints") for folder in (cut, tmp_path / "run")]
    two, three = (standing.model.buffer for standing in standings if standing)
    sent = data(replay(tmp_path / "run", 3, 0, quiet).sums["delta"])
    assert float(torch.cosine_similarity(sent.double(), (three - two).double(), dim=0)) > 1 - 1e-6


class Split:
    """Several executors as one, which get the jobs in turns."""

    def __init__(self, several: Sequence[Executor]) -> None:
        self.several = several

    def map(self, function: Callable[..., Any], shared: Any, jobs: Sequence[Any]) -> list[Any]:
        return [self.several[k % len(self.several)].map(function, shared, [job])[0] for k, job in enumerate(jobs)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("salt", [b"", bytes(range(32))], ids=["seeded", "secret"])
@pytest.mark.long
def test_any_number_of_workers_draws_the_same_noise(salt: bytes, tmp_path: Path) -> None:
    noise = "secret" if salt else "seeded"
    c = config(tmp_path, federation__blocks=3, algorithm="scaffold", dp__noise=noise)
    ready = build.assemble(build.prepare(c))

    def end(workers: int) -> Standing:
        executor = Split([ready.executor(salt) for _ in range(workers)])
        return [*rounds.run(ready.algorithm, executor, ready.plan, ready.start(ClientMemory()))][-1][0]

    one, several = end(1).model.buffer, end(3).model.buffer
    assert one.equal(several)
    other = ready.executor(bytes(32))
    far = [*rounds.run(ready.algorithm, other, ready.plan, ready.start(ClientMemory()))][-1][0].model.buffer
    assert not one.equal(far)


@pytest.mark.ray
def test_actors_get_the_salt_and_draw_the_noise_of_one_process(tmp_path: Path, whole: Path, ray_session: None) -> None:
    cut = rewound(whole, tmp_path / "cut")
    actors = override(config(tmp_path), {"federation.executor": "ray_actors", "federation.actors": 2})
    run(actors, cut, resume=True, say=quiet)
    assert outputs(cut) == outputs(whole)


def test_configurations_of_a_sweep_share_what_does_not_depend_on_their_difference(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generators and noisy class counts are released once, whatever the learning rate, p or the number of rounds."""

    def needs(**values: Any) -> list[tuple[bytes, dict[str, Any], list[int]]]:
        made = build.prepare(override(config(tmp_path, **POOL), values)).needs
        return [(need.salt, need.generator_facts, need.labels.tolist()) for need in made]

    first = needs()
    assert len({salt for salt, *_ in first}) == len(first)
    kept = {path.name for path in state.iterdir()}
    for same in ({"client.lr": 0.5}, {"sharing.p": 0.3}, {"federation.rounds": 9}, {"algorithm": "fedprox"}):
        assert needs(**same) == first
    assert {path.name for path in state.iterdir()} == kept
    for other in ({"seed": 1}, {"generator.noise_multiplier": 3.0}, {"generator.rho": 0.5}):
        assert not {salt for salt, *_ in needs(**other)} & {salt for salt, *_ in first}
    assert needs(**{"generator.label_noise": 3.0})[0][:2] == first[0][:2]  # the generator is the same one
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "another user"))
    for (salt, _, labels), (others_salt, _, others) in zip(first, needs(), strict=True):
        assert salt != others_salt
        assert labels != others
    seeded = needs(**{"dp.noise": "seeded"})
    assert {salt for salt, *_ in seeded} == {b""}
    assert [facts for _, facts, _ in seeded] != [facts for _, facts, _ in first]
