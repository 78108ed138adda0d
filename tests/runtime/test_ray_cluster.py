"""Connecting to Ray: the one that is started here is shut to others, and an address where none answers is refused.

This file is also a program: run as a script it connects, prints where its Ray is, and waits until its input is closed.
"""

import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest

from fedcommons.errors import UserError
from fedcommons.runtime import ray_cluster

CALLS = (
    "NodeInfoGcsService/GetClusterId", "InternalKVGcsService/InternalKVKeys", "NodeManagerService/GetSystemConfig",
    "ObjectManagerService/Pull", "CoreWorkerService/GetCoreWorkerStats",
)  # fmt: skip
"""One of each service of Ray's; every port has one of them."""

UNIMPLEMENTED, UNAUTHENTICATED = 12, 16
"""gRPC's codes."""


class Actor:
    def facts(self) -> dict[str, str | None]:
        return {"token": os.environ.get("RAY_AUTH_TOKEN"), "temporary": tempfile.gettempdir()}


def main() -> None:
    """Connect, with Ray imported before as by a user's script, and print where that Ray is."""
    import ray

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if seconds := os.environ.get("JOIN_S"):
        ray_cluster.JOIN_S = int(seconds)
    try:
        ray_cluster.connect(num_cpus=1)
    except UserError as error:
        sys.exit(f"refused: {error}")
    context = ray.get_runtime_context()
    actor: Any = ray.remote(num_cpus=0)(Actor).remote()
    facts: dict[str, Any] = ray.get(actor.facts.remote())
    print(json.dumps({"address": context.gcs_address, "session": context.get_session_name(), **facts}), flush=True)
    sys.stdin.read()
    ray.shutdown()


def process_of(home: Path, **more: str) -> subprocess.Popen[str]:
    """Start ``main`` in an environment without a token or an address, but with ``more``."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**ours, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(home), **more},
    )  # fmt: skip


def listening(process: subprocess.Popen) -> set[tuple[str, int]]:
    """Return the addresses where a process and its descendants wait for callers."""
    opened: list[Any] = []
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray ends workers whose client has gone when it likes
            opened += [c.laddr for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return {(at.ip, at.port) for at in opened}


def grpc_status(host: str, port: int, call: str, token: str = "") -> int | None:
    """How a gRPC server answers an empty call; None: it is none. Written out, as no client of gRPC comes with Ray."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    headers = {":method": "POST", ":scheme": "http", ":path": f"/ray.rpc.{call}", ":authority": "ray",
               "content-type": "application/grpc", "te": "trailers", "authorization": f"Bearer {token}"}  # fmt: skip
    literal = b"".join(b"\0" + b"".join(bytes([len(t)]) + t.encode() for t in pair) for pair in headers.items())
    request = frame(4, 0, 0, b"") + frame(1, 4, 1, literal) + frame(0, 1, 1, bytes(5))
    answer = b""
    with socket.create_connection((host, port), timeout=120) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + request)
        while not (status := re.search(rb"grpc-status[\x01\x02](\d+)", answer)) and (part := connection.recv(65536)):
            answer += part
    return int(status[1]) if status else None


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], Path]]:
    """A Ray that ``connect`` has started in ``main``, what that prints, and its home.

    Its folder lies in /tmp, as names of sockets below this TMPDIR would be too long.
    """
    home = tmp_path_factory.mktemp("home")
    long = home / ("long" * 20)
    long.mkdir()
    with process_of(home, RAY_ADDRESS="local", RAY_AUTH_MODE="", TMPDIR=str(long)) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline()), home
        process.kill()


@pytest.mark.ray
def test_no_port_that_ray_opens_answers_without_the_token(ours: Any) -> None:
    process, facts, _ = ours
    ports = listening(process)
    assert len(ports) >= 5  # GCS, the raylet's two, the driver, a worker
    spoken = 0
    for host, port in ports:
        try:
            without = {grpc_status(host, port, call) for call in CALLS}
        except ConnectionError:  # a worker of a client that has gone has ended, too
            assert (host, port) not in listening(process)
            continue
        if without == {None}:  # the agent of runtime environments speaks HTTP
            with pytest.raises(HTTPError, match="401"):
                urlopen(f"http://{host}:{port}/get_runtime_envs_info", data=b"", timeout=120)
            continue
        assert without == {UNIMPLEMENTED, UNAUTHENTICATED}
        assert 0 in {grpc_status(host, port, call, facts["token"]) for call in CALLS}
        spoken += 1
    assert spoken >= 5


@pytest.mark.ray
def test_a_process_with_another_token_is_refused(ours: Any, tmp_path: Path) -> None:
    address = ours[1]["address"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    process = process_of(tmp_path, RAY_ADDRESS=address, **token)  # the last variable: it keeps the loopback address
    _, refused = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.match(f"refused: RAY_ADDRESS='{address}': that Ray requires another token", refused), refused


@pytest.mark.ray
def test_no_port_of_ray_can_be_reached_from_another_machine(ours: Any) -> None:
    """All processes listen on the loopback interface only."""
    opened = listening(ours[0])
    assert len(opened) >= 5
    assert {host for host, _ in opened} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.ray
def test_the_token_is_new_and_reaches_the_workers_but_no_file_and_no_command_line(ours: Any) -> None:
    process, facts, home = ours
    assert re.fullmatch("[0-9a-f]{64}", facts["token"])
    assert facts["token"] != os.environ.get("RAY_AUTH_TOKEN")
    written = [path for folder in (home, Path(facts["temporary"])) for path in folder.rglob("*") if path.is_file()]
    assert any(facts["session"] in path.parts for path in written)
    assert not [path for path in written if facts["token"].encode() in path.read_bytes()]
    for member in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            assert facts["token"] not in " ".join(member.cmdline())


@pytest.mark.ray
def test_sigterm_ends_ray_and_its_folder_which_only_we_can_enter(ours: Any) -> None:
    """The last test of this Ray."""
    process, facts, _ = ours
    folder = Path(facts["temporary"])
    assert [*Path("/tmp").glob(f"fc-*/r/{facts['session']}")] == [folder / "r" / facts["session"]]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(timeout=120) == 143
    _, alive = psutil.wait_procs(family, timeout=120)
    assert [member.name() for member in alive] == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda **_: None, r"without authentication; .* Ray 2\.60"),  # as Ray before 2.60, which leaves the mode alone
        (lambda **_: 1 / 0, r"does not start on this machine \(.*division"),
    ],
    ids=["open", "not at all"],
)
def test_a_bad_ray_is_shut_down(start: Callable[..., None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    shut_down: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: shut_down.append(True))
    for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.setenv(variable, "")
    with pytest.raises(UserError, match=message):
        ray_cluster.connect(num_cpus=1)
    assert shut_down == [True]


def test_a_variable_that_ray_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it was started"))
    for name, value, message in (
        ("RAY_AUTH_MODE", "tokne", "must be token or disabled"),  # Ray would take it for disabled
        ("RAY_TMPDIR", "/tmp/" + "long" * 20, "must have at most 3[0-9] characters"),
        ("RAY_TMPDIR", "/dev/null/x", r"cannot be written \(Not a dir"),
        (ray_cluster.DASHBOARD, "80", "must be a port"),
        (ray_cluster.DASHBOARD, "8265", "needs RAY_AUTH_MODE=token and .* RAY_AUTH_TOKEN"),
    ):
        usual = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ""}
        for variable, setting in {**usual, name: value}.items():
            monkeypatch.setenv(variable, setting)
        with pytest.raises(UserError, match=f"{name}.*{message}"):
            ray_cluster.connect(num_cpus=1)


@pytest.mark.ray
def test_ray_list_and_ray_job_work_at_the_dashboards_port_with_the_token_only(tmp_path: Path) -> None:
    """The port of the dashboard, which an SSH tunnel forwards, is open on the loopback interface only."""
    pytest.importorskip("aiohttp_cors")  # of ray[default]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    at = f"http://127.0.0.1:{port}"
    with process_of(tmp_path, **token, **{ray_cluster.DASHBOARD: str(port)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        assert {host for host, _ in listening(process)} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        for path in ("api/jobs/", "api/v0/actors", "nodes?view=summary"):
            with pytest.raises(HTTPError, match="401"):
                urlopen(f"{at}/{path}", timeout=120)
        for words in (("list", "actors"), ("summary", "actors"), ("job", "list")):
            done = subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", *words, "--address", at], capture_output=True, text=True,
                env={**os.environ, **token, "HOME": str(tmp_path)}, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert words[0] == "job" or "Actor" in done.stdout
        process.kill()


@pytest.mark.ray
def test_an_address_where_no_ray_answers_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as silent:  # takes calls and says nothing
        port = silent.getsockname()[1]
        process = process_of(tmp_path, RAY_ADDRESS=f"localhost:{port}", JOIN_S="1")
        _, refused = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.match(f"refused: RAY_ADDRESS='localhost:{port}': no Ray answers .* 1 s", refused)


if __name__ == "__main__":
    main()
