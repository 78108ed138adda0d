"""Secret noise in the hands of a careless user: what would release twice, share noise or lose a salt is refused."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.artifacts import Store
from fedcommons.config import presets
from fedcommons.core import salts
from fedcommons.core.worker import Worker
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import build, secret
from fedcommons.sharing import needs, synthetic_pool
from fedcommons.sharing.needs import Need, salts_told
from fedcommons.testing import Federation

NO_NAMES = ('"\\ud800"', '"../x"', '"a\\u0000b"', "null", "7")

SECRET: dict[str, Any] = {
    "sharing.setting": "shuffled_synthetic", "generator.name": "private_ddpm", "generator.noise_multiplier": 1.0,
    "generator.batch_size": 5, "generator.channels": (8, 16), "generator.label_noise": 1.0, "dp.noise": "secret",
    "partition.name": "iid", "partition.n_clients": 2, "data.limit": 60,
}  # fmt: skip


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the salts of the test stand."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("FEDCOMMONS_STATE", str(folder))
    return folder / "salts"


def _needed(fields: Mapping[str, object]) -> Sequence[Need]:
    """Return what must be made for the pool of an experiment with these fields."""
    return build.prepare(presets.experiment("smoke", "digits", fields)).needs


@pytest.mark.parametrize("noise", [salts.SECRET, salts.SEEDED])
def test_a_generator_that_takes_no_noise_earns_nothing_in_a_secret_run(tmp_path: Path, noise: str) -> None:
    """Its noise can only follow from its seed; ``PrivateDDPM.fit``, called without noise, is such a one."""
    plain = {name: value for name, value in SECRET.items() if not name.startswith("generator.")}
    need, store = _needed({**plain, "generator.name": "user_parts:WithReceipt", "dp.noise": noise})[0], Store(tmp_path)
    (job,) = synthetic_pool.missing(store, [need])
    synthetic_pool.keep(store, job, synthetic_pool.make(job))
    assert (synthetic_pool.read(store, need).receipt is None) == (noise == salts.SECRET)
    assert not need.salt


@pytest.mark.parametrize("noise", [salts.SECRET, salts.SEEDED])
def test_generators_with_secret_noise_that_draw_otherwise_have_other_salts(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise would hide two trainings. Seeded ones draw as ever, and their artifacts stay."""
    before, again = (_needed({**SECRET, "dp.noise": noise}) for _ in range(2))
    assert [need.images_facts for need in before] == [need.images_facts for need in again]
    monkeypatch.setattr(needs, "DRAWS", needs.DRAWS + 1)
    for one, other in zip(before, _needed({**SECRET, "dp.noise": noise}), strict=True):
        is_same = noise == salts.SEEDED
        assert (one.salt == other.salt) == (one.images_facts == other.images_facts) == is_same


@pytest.mark.parametrize("dashes", [1, 2], ids=["generator", "class counts"])
def test_a_run_whose_generators_or_class_counts_have_lost_a_salt_does_not_go_on(
    dashes: int, tmp_path: Path, state: Path
) -> None:
    salt = secret.begun(tmp_path, salts_told(_needed(SECRET)))
    assert secret.begun(tmp_path, salts_told(_needed(SECRET))) == salt
    kept = [path for path in state.glob("artifact-*") if path.name.count("-") == dashes]
    assert len(kept) == 2
    kept[0].unlink()
    with pytest.raises(UserError, match="salts are lost"):
        secret.begun(tmp_path, salts_told(_needed(SECRET)))


@pytest.mark.parametrize("left", ["partition.json", "checkpoints", "rounds.jsonl", "summary.json", "model.safetensors"])
def test_a_run_that_has_left_anything_and_no_name_of_a_salt_does_not_go_on(
    tmp_path: Path, state: Path, left: str
) -> None:
    """A new salt would release twice at one epsilon."""
    (run := tmp_path / "run").mkdir()
    (run / left).touch()
    with pytest.raises(UserError, match="lost or damaged"):
        secret.begun(run, [])
    assert not [*state.rglob("run-*")]


def test_the_salt_of_another_run_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """Its rounds since the last checkpoint would leave with other noise, a second time."""
    secret.begun(tmp_path, [])
    names = json.loads((tmp_path / secret.FILE).read_text())
    (tmp_path / "partition.json").write_text(json.dumps({"noise": names["salt"]}))
    secret.begun(tmp_path, [])
    (tmp_path / secret.FILE).write_text(json.dumps({**names, "salt": salts.name_of(salts.new())}))
    with pytest.raises(UserError, match="salt of another run"):
        secret.begun(tmp_path, [])


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[" * 100_000, *(f'{{"salt": {name}, "generators": []}}' for name in NO_NAMES)],
    ids=["empty", "no names", "deep", *NO_NAMES],
)
def test_a_damaged_name_of_a_salt_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / secret.FILE).write_text(content)
    with pytest.raises(UserError, match="lost or damaged") as refused:
        secret.begun(tmp_path, [])
    str(refused.value).encode()


@pytest.mark.parametrize(
    ("name", "value"), [("FEDCOMMONS_STATE", "here"), ("FEDCOMMONS_STATE", "~nobody-x/s"), ("HOME", ".")]
)
def test_a_state_folder_that_depends_on_the_working_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """A trial of a sweep works in a folder of Ray Tune's, which is removed: the salt would stand in it and be lost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCOMMONS_STATE")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="must be an absolute path"):
        salts.require_writable(tmp_path / "artifacts")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("inside", [".", "deeper/folder"])
def test_salts_in_the_store_or_the_run_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "link" / inside))
    for refuse in (lambda: salts.require_writable(place), lambda: secret.begun(place, [])):
        with pytest.raises(UserError, match="which must not be in"):
            refuse()
    assert list(place.iterdir()) == []


def test_no_federation_runs_with_seeded_noise_where_it_is_to_be_secret() -> None:
    """Nothing that it sends could be told from what secret noise hides."""
    config = presets.experiment("smoke", "digits", {"dp.noise": "secret", "dp.local": True, "dp.noise_multiplier": 1.0})
    ready = build.assemble(build.prepare(config))
    with pytest.raises(ValueError, match="needs the run's salt"):
        ready.executor()
    ready.executor(salts.new()).close()


def _noise_of_the_server(worker: Worker, shared: Tensor, job: int) -> list[float]:
    return worker.work.noise.call("server").stream().random(2).tolist()


def test_what_the_server_runs_on_a_worker_draws_no_noise(digits: "Callable[..., Federation]") -> None:
    """It would be that of the client before: another one for each number of workers, or the same in two rounds."""
    with pytest.raises(ClientError, match="noise is drawn in a client's round alone"):
        digits().serial(FedAvg()).map(_noise_of_the_server, torch.zeros(1), [0])
