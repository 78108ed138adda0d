"""Runs with a storage: other machines go on, and what the storage cannot do costs nothing that is here."""

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError
from fedcommons.files import remote
from fedcommons.runs import experiment
from fedcommons.sweeping.sweep import Trial
from fedcommons.sweeping.sweep_mirror import SweepMirror
from fedcommons.tracking import run_mirror

ROOT = Path(__file__).parent.parent
SMALL = {
    "federation.rounds": 6, "federation.checkpoint_every": 2, "measure.every": 3, "client.epochs": 1, "data.limit": 80,
    "tracking.wandb": "off", "algorithm": "scaffold", "federation.memory_mb": 0.001, "model.channels": (2, 7),
}  # fmt: skip
"""Clients' memories stand in files."""

Bucket = Callable[[], str]


def small(folder: Path, storage: str | None, **values: Any) -> Experiment:
    fields = {**SMALL, "artifacts": str(folder / "artifacts"), "storage": storage, **values}
    return presets.experiment("smoke", "digits", fields)


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ."""
    return {p.name: p.read_bytes() for p in (folder / "rounds.jsonl", folder / "summary.json", *folder.glob("*/[!.]*"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run leaves without a storage, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.run(small(folder, None), folder / "run")
    return outputs(folder / "run")


class PowerCut(Exception):
    pass


def nothing(number: int, metrics: Mapping[str, float | None]) -> None:
    pytest.fail(f"round {number} is played again")


def cut_at(last: int) -> Callable[[int, Mapping[str, float | None]], None]:
    def cut(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == last:
            raise PowerCut

    return cut


@pytest.mark.parametrize(("last", "first"), [(0, 0), (1, 1), (3, 3), (6, 5)])  # from the last checkpoint that was sent
@pytest.mark.long
def test_a_run_cut_on_one_machine_goes_on_on_another(
    last: int, first: int, place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    with pytest.raises(PowerCut):
        experiment.run(small(tmp_path / "a", place), tmp_path / "a" / "run", on_round=cut_at(last))
    seen: list[int] = []
    folder = tmp_path / "b" / "run"
    experiment.run(small(tmp_path / "b", place), folder, resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == [*range(first, 7)]
    assert outputs(folder) == whole


@pytest.mark.long
def test_a_finished_run_is_brought_and_not_run_again(place: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run")
    with pytest.raises(UserError, match=r"runs/run holds a run already; add --resume to continue it"):
        experiment.run(small(tmp_path, place), tmp_path / "b" / "run")
    assert not (tmp_path / "b").exists()
    said: list[str] = []
    config = small(tmp_path, place)
    experiment.run(config, tmp_path / "b" / "run", resume=True, say=said.append, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == whole
    assert [line.partition(" ")[2][:12] for line in said] == ["was brought ", "holds this r"]
    with pytest.raises(UserError, match="holds a run with another seed"):
        experiment.run(small(tmp_path, place, seed=1), tmp_path / "c" / "run", resume=True)


@pytest.mark.long
def test_it_goes_to_and_fro_between_machines(place: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """The folder that is behind is brought up to date, and the one that is ahead goes on."""
    for machine, last in (("a", 1), ("b", 3), ("a", 5)):
        with pytest.raises(PowerCut):
            experiment.run(small(tmp_path, place), tmp_path / machine / "run", resume=True, on_round=cut_at(last))
    (tmp_path / "a" / "run" / run_mirror.SEEN).write_text('{"storage": "elsewhere", "tag": "x"}')
    with pytest.raises(UserError, match=r"holds a run that .* does not go back to"):
        experiment.run(small(tmp_path, place), tmp_path / "a" / "run", resume=True)
    experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True)
    assert outputs(tmp_path / "b" / "run") == whole


@pytest.mark.long
def test_a_run_from_before_there_was_a_storage_is_sent(place: str, tmp_path: Path, whole: dict[str, bytes]) -> None:
    experiment.run(small(tmp_path, None), tmp_path / "a" / "run")
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run", resume=True)
    experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == whole


@pytest.mark.long
def test_of_two_machines_that_play_one_run_the_second_is_told(
    place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The other one begins and ends while the first is between two checkpoints."""

    def other(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == 3:
            experiment.run(small(tmp_path / "b", place), tmp_path / "b" / "run", resume=True)

    with pytest.raises(ClientError) as told:
        experiment.run(small(tmp_path / "a", place), tmp_path / "a" / "run", on_round=other)
    assert "another process plays this run too" in told.value.sentence
    assert outputs(tmp_path / "b" / "run") == whole
    assert len((tmp_path / "a" / "run" / "rounds.jsonl").read_text().splitlines()) == 5  # its rounds are here
    experiment.run(small(tmp_path / "c", place), tmp_path / "c" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "c" / "run") == whole
    experiment.run(small(tmp_path / "a", place), tmp_path / "a" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "a" / "run") == whole


def damaged(place: str, name: str) -> None:
    """Alter the object of a file of the run."""
    storage = remote.opened(place)
    found = json.loads(storage.read("runs/run/MANIFEST.json", 10**6) or b"")["files"]
    storage.write(f"runs/run/objects/{found[name]['object']}", b"altered")


@pytest.mark.long
def test_a_damaged_checkpoint_is_told_and_the_one_before_goes_on(
    place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    with pytest.raises(PowerCut):
        experiment.run(small(tmp_path, place), tmp_path / "a" / "run", on_round=cut_at(5))
    damaged(place, "checkpoints/round-000004.safetensors")
    said, config = list[str](), small(tmp_path, place)
    with pytest.raises(PowerCut):
        experiment.run(config, tmp_path / "b" / "run", resume=True, say=said.append, on_round=cut_at(3))
    seen: list[int] = []
    experiment.run(config, tmp_path / "b" / "run", resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == [3, 4, 5, 6]
    experiment.run(config, tmp_path / "c" / "run", resume=True, say=said.append, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == outputs(tmp_path / "c" / "run") == whole
    (told,) = [line for line in said if "altered" in line]
    assert "round-000004.safetensors was truncated or altered" in told


@pytest.mark.long
def test_a_run_whose_config_is_damaged_is_refused_and_stays(place: str, tmp_path: Path) -> None:
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run")
    damaged(place, "config.yaml")
    with pytest.raises(UserError, match=r"holds no run that can go on \(.*config\.yaml was truncated or altered"):
        experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True)


@pytest.mark.long
def test_a_snapshot_with_fewer_rounds_takes_nothing_away_here(
    place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Somebody else with a key to the storage has emptied it."""
    with pytest.raises(PowerCut):
        experiment.run(small(tmp_path, place), tmp_path / "a" / "run", on_round=cut_at(5))
    remote.opened(place).write("runs/run/MANIFEST.json", b'{"files": {}}')
    seen: list[int] = []
    folder = tmp_path / "a" / "run"
    experiment.run(small(tmp_path, place), folder, resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == [5, 6]
    assert outputs(folder) == whole


@pytest.mark.parametrize("other", [{"seed": 1}, {"client.lr": 0.07}])
@pytest.mark.long
def test_another_run_that_took_its_name_there_takes_nothing_away_here(
    other: dict[str, Any], place: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Somebody removed the run from the storage; the other one has more rounds."""
    folder = tmp_path / "a" / "run"
    with pytest.raises(PowerCut):
        experiment.run(small(tmp_path, place), folder, on_round=cut_at(3))
    remote.opened(place).remove("runs/run/MANIFEST.json")
    experiment.run(small(tmp_path, place, **other), tmp_path / "b" / "run")
    with pytest.raises(UserError, match=r"runs/run holds another run than .*/a/run; choose another --out or"):
        experiment.run(small(tmp_path, place), folder, resume=True)
    experiment.run(small(tmp_path, None), folder, resume=True)
    assert outputs(folder) == whole


def test_a_storage_is_the_same_by_any_path(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep's driver has the path as it was given, its trials have an absolute one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PowerCut):
        experiment.run(small(tmp_path, str(tmp_path / "storage")), tmp_path / "run", on_round=cut_at(3))
    experiment.run(small(tmp_path, "./storage"), tmp_path / "run", resume=True)
    assert outputs(tmp_path / "run") == whole


@pytest.mark.long
def test_a_full_disk_leaves_no_half_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)); "
        "from fedcommons.config import cli; import run; sys.argv[1:] = sys.argv[1:]; cli.main(run.run)"
    )
    fields = [f"--{name}={list(value) if isinstance(value, tuple) else value}" for name, value in SMALL.items()]
    words = ["--preset=smoke", *fields, f"--storage={place}", f"--out={tmp_path / 'b' / 'run'}", "--resume"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "sweeps"), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: OSError: [Errno 27] File too large")
    there = {p.relative_to(tmp_path / "b"): p.read_bytes() for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert there
    for path, content in there.items():
        if path.name not in (".lock", run_mirror.SEEN):
            assert content == (tmp_path / "a" / path).read_bytes()
    experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == outputs(tmp_path / "a" / "run")


# --- what a network does


class Front:
    """A proxy before the S3 server. busy: answers 503 so many times. lost: so many lists are written unanswered."""

    def __init__(self, behind: str) -> None:
        self.busy, self.lost, self.asked = 0.0, 0, 0
        front, target = self, urlparse(behind).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                front.asked += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if front.busy > 0:
                    front.busy -= 1
                    self._answer(503, [], b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>")
                    return
                server = http.client.HTTPConnection(target)
                server.request(self.command, self.path, body, dict(self.headers.items()))
                answer = server.getresponse()
                content = answer.read()
                if front.lost and self.command == "PUT" and self.path.endswith("MANIFEST.json"):
                    front.lost -= 1
                    self.close_connection = True
                    return
                self._answer(answer.status, answer.getheaders(), content)

            def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
                self.send_response(status)
                told = {name.lower(): value for name, value in headers}
                if self.command != "HEAD" or "content-length" not in told:
                    told["content-length"] = str(len(content))
                for name in told.keys() - {"connection", "transfer-encoding", "server", "date"}:
                    self.send_header(name, told[name])
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def front(s3_server: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """What the environment names as S3's endpoint."""
    made = Front(s3_server)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*made.server.server_address[:2]))
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.mark.long
def test_a_busy_storage_is_waited_for(
    front: Front, bucket: Bucket, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bucket()
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")  # as anybody has it
    front.busy = 3
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run", say=pytest.fail)
    assert front.busy == 0
    assert outputs(tmp_path / "a" / "run") == whole


@pytest.mark.long
def test_an_answer_that_is_lost_is_no_second_writer(
    front: Front, bucket: Bucket, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    place = bucket()
    front.lost = 1
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run", say=pytest.fail)
    assert front.lost == 0
    experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == whole


@pytest.mark.long
def test_a_storage_that_stays_busy_costs_nothing_that_is_here(
    front: Front, bucket: Bucket, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    place, said = bucket(), list[str]()

    def busy(number: int, metrics: Mapping[str, float | None]) -> None:
        front.busy = float("inf") if number == 1 else front.busy

    with pytest.raises(ClientError) as told:
        experiment.run(small(tmp_path, place), tmp_path / "a" / "run", say=said.append, on_round=busy)
    assert outputs(tmp_path / "a" / "run") == whole
    assert "has it all, but the storage has not" in told.value.sentence
    assert "too busy" in told.value.sentence
    (line,) = said
    assert line.startswith("storage: s3://")
    front.busy = 0
    experiment.run(small(tmp_path, place), tmp_path / "a" / "run", resume=True, on_round=nothing)
    experiment.run(small(tmp_path, place), tmp_path / "b" / "run", resume=True, on_round=nothing)
    assert outputs(tmp_path / "b" / "run") == whole


def no_keys(patch: pytest.MonkeyPatch) -> None:
    patch.delenv("AWS_ACCESS_KEY_ID")
    patch.delenv("AWS_SECRET_ACCESS_KEY")


PACKAGE = r"s3:// needs a package: pip install 'fedcommons\[s3\]'"
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    "a closed port": (lambda p: p.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), "Could not connect"),
    "a password": (lambda p: p.setenv("AWS_ENDPOINT_URL", "http://me:pass-word@127.0.0.1:9"), "encoded in URL"),
    "no bucket": (lambda p: None, "there is no such bucket"),
    "no credentials": (no_keys, "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "no package": (lambda p: p.setattr(remote, "find_spec", lambda name: None), PACKAGE),
    "no conditions": (lambda p: p.setattr(remote.Bucket, "write", lambda *_: "tag"), "ignores the conditions"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.long
def test_a_storage_that_cannot_be_used_is_refused_before_any_work(
    how: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "s3://nobody-has-made-this" if how == "no bucket" else bucket()
    action, expected = BROKEN[how]
    action(monkeypatch)
    with pytest.raises(UserError, match=f"^storage: .*{expected}") as refused:
        experiment.run(small(tmp_path, place), tmp_path / "run")
    assert "pass-word" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_no_message_repeats_a_password() -> None:
    said = remote._why(OSError("no answer from http://me:pass-word@host:9/x?key=1"))
    assert said == "no answer from http://host:9/x?key=1 (OSError)"


@pytest.mark.parametrize("name", ["run", "run/storage", "other/../run"])
def test_a_storage_in_the_folder_that_it_keeps_is_refused(name: str, tmp_path: Path) -> None:
    place = small(tmp_path, str(tmp_path / name))
    with pytest.raises(UserError, match=r"^storage must be outside of --out, .*/run, got"):
        experiment.run(place, tmp_path / "run")
    with pytest.raises(UserError, match=r"^storage must be outside of --out, .*/run, got"):
        SweepMirror([Trial("cell", place)], tmp_path / "run").begin(resume=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^storage: .*cannot be used"):
        experiment.run(small(tmp_path, str(tmp_path / "file")), tmp_path / "run")
