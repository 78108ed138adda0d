"""Runs and sweeps with a storage: other machines go on, and a storage that fails costs nothing that is here."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from interrupted import PowerCut, cut_at, outputs, small
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.storage import object_store
from fedcommons.tracking import remote_run
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import Trial

Bucket = Callable[[], str]

FOLDER = pytest.mark.parametrize("place", ["folder"], indirect=True)
"""For what does not depend on the kind of storage; see test_storage.py."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run leaves without a storage, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.run(small(folder), folder / "run")
    return outputs(folder / "run")


class Machine:
    """A folder of a machine, with a run in it that the storage keeps as ``run``."""

    def __init__(self, tmp_path: Path, place: str | None, name: str) -> None:
        self.base, self.place, self.folder = tmp_path, place, tmp_path / name / "run"
        self.lines: list[str] = []

    def run(self, rounds: Any = None, last: int | None = None, **values: Any) -> None:
        """Run or resume. rounds: those that must be run now. last: the round after which the power fails."""
        seen: list[int] = []

        def watch(number: int, metrics: Mapping[str, float | None]) -> None:
            seen.append(number)
            cut_at(last)(number, metrics)

        config = small(self.base, {"storage": self.place, **values})
        with nullcontext() if last is None else pytest.raises(PowerCut):
            experiment.run(config, self.folder, resume=True, say=self.lines.append, on_round=watch)
        assert rounds is None or seen == [*rounds]


@pytest.fixture
def machine(place: str, tmp_path: Path) -> Callable[[str], Machine]:
    return lambda name: Machine(tmp_path, place, name)


Machines = Callable[[str], Machine]


@pytest.mark.long
def test_a_finished_run_is_fetched_only(machine: Machines, place: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    Machine(tmp_path, None, "a").run()
    machine("a").run([])  # a run of before the storage is sent
    with pytest.raises(UserError, match=r"runs/run holds a run already; add --resume"):
        experiment.run(small(tmp_path, {"storage": place}), machine("b").folder)
    assert not (tmp_path / "b").exists()
    (other := machine("b")).run([])
    assert outputs(other.folder) == whole
    assert ["was downloaded" in line for line in other.lines] == [True, False]
    with pytest.raises(UserError, match="holds a run with another seed"):
        machine("c").run(seed=1)


@FOLDER
@pytest.mark.long
def test_it_goes_to_and_fro_between_machines(
    machine: Machines, place: str, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder that is behind is brought up to date, and the one that is ahead goes on."""
    machine("a").run(last=1)
    machine("b").run(last=3)
    (stale := machine("a").folder / "clients.jsonl").write_text("")
    monkeypatch.chdir(place)
    Machine(tmp_path, ".", "a").run(last=5)  # a storage is the same by any path
    assert not stale.exists()  # the storage has no such file of the run
    (machine("a").folder / remote_run.SEEN).write_text('{"storage": "elsewhere", "tag": "x"}')
    with pytest.raises(UserError, match=r"holds a run that .* does not go back to"):
        machine("a").run()
    machine("b").run()
    assert outputs(machine("b").folder) == whole


@FOLDER
@pytest.mark.long
def test_the_second_machine_is_stopped(machine: Machines, place: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """The other one begins and ends while the first is between two checkpoints."""

    def other(number: int, metrics: Mapping[str, float | None]) -> None:
        while number == 3 and (machine("a").folder / remote_run.COPY).exists():
            time.sleep(0.01)  # the upload of round 2
        if number == 3:
            machine("b").run()

    with pytest.raises(ClientError, match="another process writes this run too"):
        experiment.run(small(tmp_path, {"storage": place}), machine("a").folder, on_round=other)
    assert outputs(machine("b").folder) == whole
    assert len((machine("a").folder / "rounds.jsonl").read_text().splitlines()) == 7  # to the next checkpoint
    for name in ("c", "a"):
        machine(name).run([])
        assert outputs(machine(name).folder) == whole


def damage(place: str, name: str) -> None:
    """Alter the object of a file of the run."""
    storage = object_store.open_store(place)
    entries = json.loads(storage.read("runs/run/MANIFEST.json", 10**6) or b"")["files"]
    storage.write(f"runs/run/objects/{entries[name]['object']}", b"altered")


@FOLDER
@pytest.mark.long
def test_the_checkpoint_before_a_damaged_one_goes_on(machine: Machines, place: str, whole: dict[str, bytes]) -> None:
    machine("a").run(last=5)
    damage(place, "checkpoints/round-000004.safetensors")
    (other := machine("b")).run(last=3)
    assert ["round-000004.safetensors was truncated or altered" in x for x in other.lines if "altered" in x] == [True]
    machine("b").run([3, 4, 5, 6])
    (last := machine("c")).run([])
    assert not [line for line in last.lines if "altered" in line]
    assert outputs(machine("b").folder) == outputs(last.folder) == whole
    damage(place, "config.yaml")
    with pytest.raises(UserError, match=r"holds no run that can go on \(.*config\.yaml was truncated or altered"):
        machine("d").run()


@pytest.mark.parametrize("other", [{"seed": 1}, {"client.lr": 0.07}, None])
@FOLDER
@pytest.mark.long
def test_another_snapshot_that_took_its_name_there_removes_nothing_here(
    other: dict[str, Any] | None, machine: Machines, place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The run was removed from the storage; another one has more rounds, or it has none."""
    machine("a").run(last=3)
    if other is None:
        object_store.open_store(place).write("runs/run/MANIFEST.json", b'{"files": {}}')
        machine("a").run([3, 4, 5, 6])
    else:
        object_store.open_store(place).remove("runs/run/MANIFEST.json")
        machine("b").run(**other)
        with pytest.raises(UserError, match=r"runs/run holds another run than .*/a/run"):
            machine("a").run()
        Machine(tmp_path, None, "a").run()
    assert outputs(machine("a").folder) == whole


@FOLDER
@pytest.mark.long
def test_a_folder_of_an_older_version_goes_on_and_other_data_do_not(machine: Machines, place: str) -> None:
    """An older version wrote fewer facts into partition.json, or its CPU rounded them otherwise."""
    (here := machine("a")).run(last=3)
    facts = json.loads((file := here.folder / "partition.json").read_text())
    machine("b").run(last=5)
    file.write_text(json.dumps({**facts, "fingerprint": "0"}))
    with pytest.raises(UserError, match="holds another run than"):
        here.run()
    file.write_text(json.dumps({name: value for name, value in facts.items() if name != "heterogeneity"}))
    here.run()


class Front:
    """The emulated S3 with faults, as a WSGI application.

    busy: how often it answers 503. is_lax: it drops conditions. open: while it is not set, requests wait.
    """

    def __init__(self) -> None:
        self.busy, self.is_lax, self.open = 0.0, False, threading.Event()
        self.open.set()
        self.app = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        self.open.wait(20)
        if self.busy > 0:
            self.busy -= 1
            answer("503 Busy", [])
            return [b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"]
        for name in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH") if self.is_lax else ():
            environ.pop(name, None)
        return self.app(environ, answer)


@pytest.fixture
def front(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """A server that the environment names as S3's endpoint."""
    server = make_server("127.0.0.1", 0, app := Front(), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield app
    server.shutdown()
    thread.join()


@pytest.mark.long
def test_a_busy_storage_costs_no_file(front: Front, bucket: Bucket, tmp_path: Path, whole: dict[str, bytes]) -> None:
    place, messages = bucket(), list[str]()

    def busy(number: int, metrics: Mapping[str, float | None]) -> None:
        front.busy = float("inf") if number == 1 else front.busy

    with pytest.raises(ClientError, match=r"but the storage has not.*too busy"):
        experiment.run(small(tmp_path, {"storage": place}), tmp_path / "a" / "run", say=messages.append, on_round=busy)
    assert outputs(tmp_path / "a" / "run") == whole
    assert ["storage: s3://" in line for line in messages] == [True]
    front.busy = 0
    for name in ("a", "b"):
        Machine(tmp_path, place, name).run([])
    assert outputs(tmp_path / "b" / "run") == whole


@pytest.mark.long
def test_a_slow_storage_stops_no_round(front: Front, bucket: Bucket, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """The storage answers nothing from round 2, whose checkpoint it gets, to round 3."""
    place, waiting = bucket(), list[bool]()
    copy = tmp_path / "a" / "run" / remote_run.COPY

    def watch(number: int, metrics: Mapping[str, float | None]) -> None:
        while number == 2 and copy.exists():  # the checkpoint of round 0
            time.sleep(0.01)
        if number == 2:
            front.open.clear()
        if number == 3:
            waiting.append((copy / "checkpoints").is_dir())
            front.open.set()

    experiment.run(small(tmp_path, {"storage": place}), tmp_path / "a" / "run", on_round=watch)
    assert waiting == [True]
    assert not copy.exists()
    Machine(tmp_path, place, "b").run([])
    assert outputs(tmp_path / "b" / "run") == whole


@FOLDER
def test_a_run_that_is_killed_between_two_checkpoints_goes_on(place: str, tmp_path: Path) -> None:
    """A second upload from the folder, by a process that has not waited for its end, is no other process."""
    (folder := tmp_path / "run").mkdir()
    for name in ("config.yaml", "environment.json", "rounds.jsonl"):
        (folder / name).touch()
    remote_run.RunMirror(place, "run", folder).begin_upload()
    while (folder / remote_run.COPY).exists():
        time.sleep(0.01)
    (folder / "rounds.jsonl").write_text("{}\n")
    messages = list[str]()
    remote_run.RunMirror(place, "run", folder, messages.append).fetch()
    assert messages == []
    (folder / remote_run.COPY).write_text("a file in place of the folder")
    (mirror := remote_run.RunMirror(place, "run", folder, messages.append)).begin_upload()
    mirror.wait()
    assert ["cannot be written" in line for line in messages] == [True]
    mirror.upload()
    assert remote_run.RunMirror(place, "run", folder).snapshots.entries["rounds.jsonl"].size == 3


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    "a closed port": (lambda p: p.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), "Could not connect"),
    "a password": (lambda p: p.setenv("AWS_ENDPOINT_URL", "http://me:pass-word@127.0.0.1:9"), "encoded in URL"),
    "no bucket": (lambda p: None, "there is no such bucket"),
    "no credentials": (lambda p: p.delenv("AWS_SECRET_ACCESS_KEY"), "credentials are missing"),
    "no package": (lambda p: p.setitem(sys.modules, "s3fs", None), r"pip install 'fedcommons\[s3\]'"),
    "no conditions": (lambda p: None, "ignores the conditions"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_storage_that_cannot_be_used_is_refused_before_any_work(
    how: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    place = "s3://nobody-has-made-this" if how == "no bucket" else bucket()
    action, expected = BROKEN[how]
    if how == "no conditions":
        request.getfixturevalue("front").is_lax = True
    action(monkeypatch)
    with pytest.raises(UserError, match=f"^storage: .*{expected}") as refused:
        experiment.run(small(tmp_path, {"storage": place}), tmp_path / "run")
    assert "pass-word" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_storage_in_the_folder_that_it_keeps_in_a_file_or_behind_a_broken_link_is_refused(tmp_path: Path) -> None:
    for name in ("run", "other/../run/storage"):
        config = small(tmp_path, {"storage": str(tmp_path / name)})
        with pytest.raises(UserError, match=r"^storage must be outside of --out"):
            experiment.run(config, tmp_path / "run")
        with pytest.raises(UserError, match=r"^storage must be outside of --out"):
            SweepMirror([Trial("cell", config)], tmp_path / "run").begin(resume=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^storage: .*cannot be used"):
        experiment.run(small(tmp_path, {"storage": str(tmp_path / "file")}), tmp_path / "run")
    (tmp_path / "disk").symlink_to(tmp_path / "not" / "mounted")
    with pytest.raises(UserError, match=r"^storage: .*disk is a link to .*mounted, which does not exist"):
        experiment.run(small(tmp_path, {"storage": str(tmp_path / "disk")}), tmp_path / "run")
    assert not (tmp_path / "not").exists()
