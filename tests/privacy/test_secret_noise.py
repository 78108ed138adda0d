"""Secret noise: what would release twice or lose a salt is refused, and runs resume with their own salt alone."""

import base64
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import quiet

from fedcommons import ClientError, Experiment, UserError, experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.dotted import override
from fedcommons.generators import image_cache
from fedcommons.generators.requests import GenerationRequest, salt_facts
from fedcommons.privacy import salts
from fedcommons.runs import assemble, build, run_salts
from fedcommons.runs.experiment import run
from fedcommons.runs.replay import replay
from fedcommons.storage.artifact_store import Store
from fedcommons.testing import Federation

SECRET: dict[str, Any] = {
    "sharing.setting": "shuffled_synthetic", "generator.name": "private_ddpm", "generator.noise_multiplier": 1.0,
    "generator.batch_size": 5, "generator.channels": (8, 16), "generator.label_noise": 1.0, "dp.noise": "secret",
    "partition.name": "iid", "partition.n_clients": 2, "data.limit": 60,
}  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's salts, which does not exist yet."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("FEDCOMMONS_STATE", str(folder))
    return folder / "salts"


def _needed(fields: Mapping[str, object]) -> Sequence[GenerationRequest]:
    return build.build(experiment("smoke", "digits", fields)).requests


@pytest.mark.parametrize("noise", [salts.SECRET, salts.SEEDED])
def test_a_generator_that_takes_no_noise_gets_no_receipt_in_a_secret_run(tmp_path: Path, noise: str) -> None:
    """Its noise can only follow from its seed; ``PrivateDDPM.fit``, called without noise, is such a one."""
    plain = {name: value for name, value in SECRET.items() if not name.startswith("generator.")}
    need, store = _needed({**plain, "generator.name": "user_parts:WithReceipt", "dp.noise": noise})[0], Store(tmp_path)
    (job,) = image_cache.missing(store, [need])
    image_cache.keep(store, job, image_cache.make(job))
    assert (image_cache.read(store, need).receipt is None) == (noise == salts.SECRET)
    assert not need.salt


def test_a_run_whose_class_counts_have_lost_a_salt_does_not_go_on(tmp_path: Path, state: Path) -> None:
    salt = run_salts.begin_salt(tmp_path, salt_facts(_needed(SECRET)))
    assert run_salts.begin_salt(tmp_path, salt_facts(_needed(SECRET))) == salt
    next(path for path in state.glob("artifact-*") if path.name.count("-") == 2).unlink()
    with pytest.raises(UserError, match=r"salts .* lost"):
        run_salts.begin_salt(tmp_path, salt_facts(_needed(SECRET)))


@pytest.mark.parametrize(
    ("file", "content"),
    [(run_salts.FILE, ""), (run_salts.FILE, '{"salt": "../x", "generators": []}'), (run_salts.FILE, '{"salt": 7}'),
     ("partition.json", ""), ("checkpoints", ""), ("summary.json", "")],
)  # fmt: skip
def test_a_run_that_lost_its_salts_name_does_not_go_on(tmp_path: Path, state: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match="lost or damaged"):
        run_salts.begin_salt(tmp_path, [])
    assert not [*state.rglob("run-*")]


def test_the_salt_of_another_run_is_not_taken_for_its_own(tmp_path: Path) -> None:
    run_salts.begin_salt(tmp_path, [])
    names = json.loads((tmp_path / run_salts.FILE).read_text())
    (tmp_path / "partition.json").write_text(json.dumps({"noise": names["salt"]}))
    run_salts.begin_salt(tmp_path, [])
    (tmp_path / run_salts.FILE).write_text(json.dumps({**names, "salt": salts.name_of(salts.new())}))
    with pytest.raises(UserError, match="salt of another run"):
        run_salts.begin_salt(tmp_path, [])


def test_salts_in_a_run_or_relative_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of a sweep works in a folder of Ray Tune's, which is removed: the salt would stand in it and be lost."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("FEDCOMMONS_STATE", "here")
    with pytest.raises(UserError, match="must be an absolute path"):
        salts.require_writable(tmp_path / "artifacts")
    (tmp_path / "link").symlink_to(place)
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "link" / "deeper"))
    for refuse in (lambda: salts.require_writable(place), lambda: run_salts.begin_salt(place, [])):
        with pytest.raises(UserError, match="which must not be in"):
            refuse()
    assert list(place.iterdir()) == []


def test_no_federation_runs_with_seeded_noise_where_it_is_to_be_secret() -> None:
    config = experiment("smoke", "digits", {"dp.noise": "secret", "dp.local": True, "dp.noise_multiplier": 1.0})
    ready = assemble.assemble(build.build(config))
    with pytest.raises(ValueError, match="needs the run's salt"):
        ready.executor()
    ready.executor(salt := salts.new()).close()
    ready = assemble.assemble(build.build(override(config, {"dp.central": True})))
    with pytest.raises(ValueError, match="and the plan"):
        ready.executor(salt)  # the server would draw seeded noise
    ready.keyed(salt).executor(salt).close()


def test_what_the_server_runs_on_a_worker_draws_no_noise(digits: "Callable[..., Federation]") -> None:
    """It would be that of the client before: another one for each number of workers, or the same in two rounds."""
    with pytest.raises(ClientError, match="noise is drawn only in a client's round"):
        digits().serial(FedAvg()).map(lambda worker, *_: worker.work.noise.call("server"), torch.zeros(1), [0])


# Whole runs


FIELDS = {
    "dp.local": True, "dp.noise": "secret", "data.limit": 60, "client.epochs": 1, "measure.every": 0,
    "federation.rounds": 3, "federation.checkpoint_every": 1, "tracking.wandb": "off",
}  # fmt: skip
POOL = {
    "sharing.setting": "shuffled_synthetic", "generator.name": "private_ddpm", "generator.epochs": 1,
    "generator.batch_size": 5, "generator.channels": (8, 16), "generator.timesteps": 20, "generator.sampling_steps": 2,
    "generator.noise_multiplier": 2.0, "generator.label_noise": 2.0,
}  # fmt: skip


def config(tmp_path: Path, **values: Any) -> Experiment:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return experiment("smoke", "digits", {**FIELDS, "artifacts": str(tmp_path / "artifacts"), **named})


def outputs(folder: Path) -> dict[str, bytes]:
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
    run(config(tmp_path), tmp_path / "whole", say=quiet)
    return tmp_path / "whole"


@pytest.mark.long
def test_two_secret_runs_of_one_seed_differ_and_two_seeded_ones_do_not(tmp_path: Path, state: Path) -> None:
    for noise, alike in (("seeded", True), ("secret", False)):
        first, other = (tmp_path / f"{noise} {k}" for k in (1, 2))
        for folder in (first, other):
            run(config(tmp_path, dp__noise=noise, federation__rounds=1), folder, say=quiet)
        a, b = outputs(first), outputs(other)
        assert (a == b) == (a["round-000001.safetensors"] == b["round-000001.safetensors"]) == alike
        assert state.exists() == (first / "noise.json").exists() == (not alike)
    names = {json.loads((folder / "noise.json").read_text())["salt"] for folder in (first, other)}
    assert {path.name for path in state.iterdir()} == {f"run-{name}" for name in names}
    assert len(names) == 2


@pytest.mark.long
def test_a_salt_is_in_no_other_file_or_output(tmp_path: Path, state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One run has generators; in the other a client fails, and the run stores its traceback."""
    run(config(tmp_path, **POOL), tmp_path / "run")
    with pytest.raises(ClientError, match="largest was client"):
        run(config(tmp_path, client__lr=1e38), tmp_path / "failed")
    salt_bytes = [path.read_bytes() for path in state.iterdir()]
    assert len(salt_bytes) == 2 + 4 + 4  # two runs, and of each of four clients the generator and the class counts
    folders = [tmp_path / name for name in ("run", "failed", "artifacts")]
    files = [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [text.encode() for text in capfd.readouterr()]
    assert len(files) > 20
    for salt in salt_bytes:
        for written in (salt, salt.hex().encode(), base64.b64encode(salt), repr(salt)[2:-1].encode()):
            assert not any(written in content for content in files)
    record = json.loads((tmp_path / "run" / "noise.json").read_text())
    assert len({record["salt"], *record["generators"]} & {salts.name_of(salt) for salt in salt_bytes}) == 5


def test_a_secret_run_that_goes_on_ends_as_if_nothing_had_happened(tmp_path: Path, whole: Path, state: Path) -> None:
    cut = rewound(whole, tmp_path / "cut")
    seen: list[int] = []
    run(config(tmp_path), cut, resume=True, say=quiet, on_round=lambda number, _: seen.append(number))
    assert seen == [3]
    assert outputs(cut) == outputs(whole)
    assert len(list(state.iterdir())) == 1


@pytest.mark.parametrize("damage", ["removed", "replaced"])
def test_without_its_salt_a_run_does_not_go_on(damage: str, tmp_path: Path, whole: Path, state: Path) -> None:
    cut = rewound(whole, tmp_path / "cut")
    lines = (cut / "rounds.jsonl").read_bytes()
    (salt,) = state.iterdir()
    salt.write_bytes(bytes(32)) if damage == "replaced" else salt.unlink()
    for go_on in (lambda: run(config(tmp_path), cut, resume=True, say=quiet), lambda: replay(cut, 3, 0, quiet)):
        with pytest.raises(UserError, match=str(salt)):
            go_on()
    assert (cut / "rounds.jsonl").read_bytes() == lines
    assert run(config(tmp_path), whole, resume=True, say=quiet) == json.loads((whole / "summary.json").read_text())


def test_no_salt_stands_where_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "storage" / "state"))
    there = config(tmp_path, storage=str(tmp_path / "storage"))
    with pytest.raises(UserError, match=r"must not be in .*storage"):
        run(there, tmp_path / "run", say=quiet)
    assert not [*tmp_path.rglob("run-*")]


@pytest.mark.ray
def test_actors_get_the_salt_and_draw_the_noise_of_one_process(tmp_path: Path, whole: Path, ray_session: None) -> None:
    cut = rewound(whole, tmp_path / "cut")
    actors = override(config(tmp_path), {"federation.executor": "ray_actors", "federation.actors": 1})
    run(actors, cut, resume=True, say=quiet)
    assert outputs(cut) == outputs(whole)


def test_configurations_of_a_sweep_share_what_does_not_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators and noisy class counts are released once, whatever the learning rate, p or the number of rounds."""

    def needs(**values: Any) -> list[tuple[bytes, dict[str, Any], list[int]]]:
        requests = build.build(override(config(tmp_path, **POOL), values)).requests
        return [(need.salt, need.generator_facts, need.labels.tolist()) for need in requests]

    first = needs()
    assert len({salt for salt, *_ in first}) == len(first)
    for same in ({"client.lr": 0.5}, {"sharing.p": 0.3}, {"federation.rounds": 9}, {"algorithm": "fedprox"}):
        assert needs(**same) == first
    for other in ({"seed": 1}, {"generator.noise_multiplier": 3.0}, {"generator.rho": 0.5}):
        assert not {salt for salt, *_ in needs(**other)} & {salt for salt, *_ in first}
    assert needs(**{"generator.label_noise": 3.0})[0][:2] == first[0][:2]  # the generator is the same one
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "another user"))
    for (salt, _, labels), (others_salt, _, others) in zip(first, needs(), strict=True):
        assert (salt != others_salt, labels != others) == (True, True)
    assert {salt for salt, *_ in needs(**{"dp.noise": "seeded"})} == {b""}
