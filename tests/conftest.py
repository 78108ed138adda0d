"""Fixtures of all tests. Tests cannot import each other; types are imported under TYPE_CHECKING only."""

import json
import os
import secrets
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the process that hands out the tests imports this file too, and no torch
    from wandb_server import Server

    from fedcommons.config.experiment import Experiment
    from fedcommons.core.algorithm import Algorithm
    from fedcommons.testing import Federation, LeastSquares

# Ray reads these when it is first imported. Processes that a test starts inherit them; the token is nowhere else.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else this machine does comes before Ray's workers

# What a script starts in its background ignores Ctrl-C, and so would the programs that tests start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Set torch to one thread, as in a worker: more threads would change rounding."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the salts of the user who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCOMMONS_STATE", str(tmp_path_factory.mktemp("state")))
        yield


SWEEPS = Path(__file__).parent.parent / "sweeps"


@pytest.fixture(scope="session")
def least_squares() -> "Callable[..., LeastSquares]":
    from fedcommons.testing import federations

    return federations.least_squares


@pytest.fixture(scope="session")
def digits() -> "Callable[..., Federation]":
    from fedcommons.testing import federations

    return federations.digits


REPEATED = {"tries": 5, "iterations": 5, "server_epochs": 5, "server_steps": 5, "generator_steps": 2, "generated": 8,
            "width": 2, "local_epochs": 20, "local_lr": 0.02, "samples": 128, "channels": (8, 16),
            "buffer": 2}  # fmt: skip
"""Constants of methods, with values that make a round short."""


@pytest.fixture(scope="session")
def quick() -> "Callable[[str], Algorithm]":
    """A method of the package by its name, with the constants of ``REPEATED``."""
    from fedcommons.config import registry

    def make(name: str) -> "Algorithm":
        has = registry.constants("algorithm", name)
        fewer = {constant: n for constant, n in REPEATED.items() if constant in has}
        if "generator_steps" in has:  # in each epoch, of which there is one then
            fewer.pop("server_epochs", None)
        return registry.make("algorithm", name, fewer)

    return make


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a dry run time each piece of work once and start no process, for tests that ignore the times."""
    from fedcommons.tune import cost

    monkeypatch.setattr(cost, "ENOUGH", 0.0)
    monkeypatch.setattr(cost, "start_up", lambda: 1.0)


@pytest.fixture(scope="session")
def sweeps() -> Callable[[str], ModuleType]:
    """A script of sweeps/ as a module, by its name."""

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(name, SWEEPS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def command(sweeps: Callable[[str], ModuleType]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command by its name from ``cwd``, in a fork of this process, which has imported torch already."""

    def give(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        from forked import forked

        from fedcommons.cli import main, parse

        script = main.function_of(name) if name in main.COMMANDS else getattr(sweeps(name), name)

        def action() -> None:
            os.environ.pop("FEDCOMMONS_PARTS", None)
            sys.argv = [f"{name}.py", *words]
            parse.main(script)

        ended = forked(action, cwd)
        return subprocess.CompletedProcess([name, *words], ended.code, ended.out, ended.err)

    return give


@pytest.fixture(scope="session")
def recorded() -> Callable[..., None]:
    """Write the folder of a finished run with invented numbers, without running anything.

    reached: its first round with the target accuracy. metrics: of each round. summary: in place of the usual values.
    """
    import yaml

    from fedcommons.config.dotted import to_dict
    from fedcommons.storage.atomic_files import write_json, write_text

    def write(
        folder: Path,
        config: "Experiment",
        reached: int | None,
        metrics: Mapping[str, Any] | None = None,
        /,
        **summary: Any,
    ) -> None:
        flat, last = dict(config.flat), config.federation.rounds
        accuracies = [0.9 if reached and r >= reached else 0.0 for r in range(last + 1)]
        content = {
            "dataset": config.data.name, "algorithm": config.algorithm, "setting": config.sharing.setting,
            "alpha": flat.get("partition.alpha"), "n_clients": config.partition.n_clients, "seed": config.seed,
            "participation": config.federation.participation, "learning_rate": config.client.lr, "rounds": last,
            "target": config.target, "p": flat.get("sharing.p") or 0.0, "bytes_down": 1, "bytes_up": 1, "bytes_once": 0,
            "rejected": [], "partition": "x", "config": flat, **summary,
        }  # fmt: skip
        more = {"comm/total_bytes": 2, **(metrics or {})}
        lines = [{"round": r, "test/accuracy": accuracy, **more} for r, accuracy in enumerate(accuracies)]
        folder.mkdir(parents=True)
        write_text(folder / "config.yaml", yaml.safe_dump(to_dict(config)))
        write_json(folder / "environment.json", {})
        write_text(folder / "rounds.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_json(folder / "summary.json", content)

    return write


@dataclass(frozen=True)
class WandbFile:
    """What W&B kept of a run offline."""

    records: list[Any]

    @property
    def run(self) -> Any:
        (run,) = [record.run for record in self.records if record.HasField("run")]
        return run

    @property
    def has_ended(self) -> bool:
        return any(record.HasField("exit") for record in self.records)

    @property
    def config(self) -> dict[str, Any]:
        """The run's fields, without W&B's own entry."""
        return {item.key: json.loads(item.value_json) for item in self.run.config.update if item.key != "_wandb"}

    @property
    def summary(self) -> dict[str, Any]:
        return {k: v for r in self.records if r.HasField("summary") for k, v in _items(r.summary.update).items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [_items(r.history.item) for r in self.records if r.HasField("history")]


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, at, pending = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        checksum, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind == 0 or at + 7 + length > len(content):  # the rest is not written yet
            return
        payload = content[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + payload) == checksum
        at, pending = at + 7 + length, pending + payload
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  (made at import)
            record.ParseFromString(pending)
            pending = b""
            yield record


@pytest.fixture(scope="session")
def wandb_file() -> Callable[[Path], WandbFile]:
    """Reads the newest of W&B's files in the folder of a run that has ended."""

    def read(folder: Path) -> WandbFile:
        newest = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        deadline = time.monotonic() + 120
        while not (file := WandbFile(list(_wandb_records(newest)))).has_ended and time.monotonic() < deadline:
            time.sleep(0.05)  # W&B's own process writes it
        return file

    return read


@pytest.fixture(scope="session")
def as_nobody() -> Callable[[Callable[[], None]], None]:
    """Call a function in another process, without the rights of root."""

    def do(action: Callable[[], None]) -> None:
        from forked import forked

        def without() -> None:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()

        ended = forked(without, Path.cwd())
        assert ended.code == 0, ended.err

    return do


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an emulated S3 on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


AWS = {
    "ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": "pass-word", "DEFAULT_REGION": "us-east-1", "MAX_ATTEMPTS": "2",
    "EC2_METADATA_DISABLED": "true", "CONFIG_FILE": os.devnull, "SHARED_CREDENTIALS_FILE": os.devnull,
}  # fmt: skip


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Make a bucket in that S3 and return a URL in it; the environment has its endpoint and invalid credentials."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**AWS, "ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(f"AWS_{name}", value)

    def make() -> str:
        boto3.client("s3").create_bucket(Bucket=(name := f"lab-{secrets.token_hex(8)}"))
        return f"s3://{name}/some/lab"

    return make


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new storage of each kind, for ``--storage``."""
    return str(tmp_path / "storage") if request.param == "folder" else request.getfixturevalue("bucket")()


@pytest.fixture(scope="session")
def ray_session(s3_server: str) -> Iterator[None]:
    """A real Ray, one for all tests of this process; its workers can import sweeps/ and reach the emulated S3."""
    from fedcommons.runtime import ray_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SWEEPS), prepend=os.pathsep)
        for name, value in {**AWS, "ENDPOINT_URL": s3_server}.items():
            patch.setenv(f"AWS_{name}", value)
        ray_cluster.connect(num_cpus=2)
    yield
    import ray

    ray.shutdown()


@pytest.fixture(scope="module")
def one_core(ray_session: None) -> Iterator[None]:
    """Leave sweeps one of Ray's two cores: their trials then share one process, whose imports take five seconds."""
    from fedcommons.runtime import ray_cluster

    group = ray_cluster.reserve([{"CPU": 1.0}], {}, "the tests")
    yield
    ray_cluster.free(group)


@pytest.fixture(scope="module")
def shared_ray(one_core: None) -> dict[str, str]:
    """The environment in which a command, as a process of its own, joins that Ray instead of starting another."""
    import ray

    # Without the second variable a client on Linux would look for 127.0.0.1 at the machine's own address.
    at = ray.get_runtime_context().gcs_address
    return {**os.environ, "RAY_ADDRESS": at, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture
def wandb_online(monkeypatch: pytest.MonkeyPatch) -> Iterator["Server"]:
    """A stub of W&B's server, and this process logged in there; see ``wandb_server``."""
    import wandb
    from wandb_server import KEY, serving

    wandb.teardown()  # it reads these once in a process
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server
        wandb.teardown()
