"""The report that follows its folders: who may ask for it, what it shows while they grow, how it ends."""

import http.client
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from fedcommons import experiment, run
from fedcommons.reports.watching import Server, Watched

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run(
        experiment("smoke", values={"wandb": "off", "federation.rounds": 1, "data.limit": 80}),
        path,
        say=lambda text: None,
    )
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that watches an empty folder."""
    made = Server(Watched([tmp_path]))
    thread = Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def ask(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    """Status, content and headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.headers)
    connection.close()
    return found


def test_only_who_has_the_token_sees_anything(server: Server, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    token = server.token
    assert len(token) >= 32
    assert server.address == f"http://127.0.0.1:{server.server_port}/{token}/"
    status, html, headers = ask(server, f"/{token}/")
    assert (status, headers["Cache-Control"], headers["Referrer-Policy"]) == (200, "no-store", "no-referrer")
    assert "fedavg" in html
    for path in (
        "/",
        f"/{token}",
        f"/{token[:-1]}/",
        f"/{token}x/",
        "//",
        f"/x/{token}/",
        "/state",
        "/%00/",
        f"/{token}/../",
    ):
        if path != f"/{token}":  # the page itself, without the last slash
            assert ask(server, path)[:2] == (404, ""), path
    for path in (f"/{token}/run/summary.json", f"/{token}/state/", f"/{token}/../../etc/passwd"):
        assert ask(server, path)[:2] == (404, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:{port}.evil.example"]
)
def test_a_page_of_the_web_that_names_this_machine_is_refused(server: Server, host: str) -> None:
    found = ask(server, f"/{server.token}/", host=host.format(port=server.server_port))
    assert found[:2] == (403, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "x"])
def test_nothing_can_be_done_but_asking(server: Server, method: str) -> None:
    assert ask(server, f"/{server.token}/", method)[:2] == (501, "")


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_what_is_no_request_ends_nothing(server: Server) -> None:
    for sent in (b"\x00\xff\n\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n", b"G" * 70_000):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
            connection.sendall(sent + b"\r\n\r\n")
    assert ask(server, f"/{server.token}/")[0] == 200


def test_a_page_follows_its_folder(server: Server, finished: Path, tmp_path: Path) -> None:
    status, html, _ = ask(server, f"/{server.token}/")
    assert (status, "holds no run" in html) == (200, True)
    before = ask(server, f"/{server.token}/state")[1]
    shutil.copytree(finished, tmp_path / "a", ignore=shutil.ignore_patterns("summary.json"))
    now = ask(server, f"/{server.token}/state")[1]
    assert now != before
    html = ask(server, f"/{server.token}/")[1]
    assert f'data-state="{now}"' in html
    assert "<td>unfinished</td>" in html
    assert ask(server, f"/{server.token}/state")[1] == now
    shutil.copy(finished / "summary.json", tmp_path / "a")
    html = ask(server, f"/{server.token}/")[1]
    assert "<td>unfinished</td>" not in html
    assert "connect-src 'self'" in html


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_says_its_address_and_ends_when_told(number: int, code: int, finished: Path) -> None:
    command = [sys.executable, str(ROOT / "sweeps" / "watch.py"), str(finished)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/\n", address)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in said
