"""The report that follows its folders: who may read it, what it shows while they grow, how its command ends."""

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
from report_runs import small_run

from fedcommons.reports.watching import Server, Watched


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    small_run(path, {"federation.rounds": 1, "measure.every": 0})
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that watches an empty folder."""
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
    content = answer.status, answer.read().decode(), dict(answer.headers)
    connection.close()
    return content


HOSTS = ("evil.example:{port}", "127.0.0.1:1", "127.0.0.1:{port}.evil.example")
PATHS = ("/", "/{short}/", "/{token}x/", "/state", "/{token}/run/summary.json", "/{token}/../../etc/passwd")


def test_only_a_get_with_the_token_and_this_host_is_answered(server: Server) -> None:
    token, port = server.token, server.server_port
    for path in PATHS:
        assert ask(server, path.format(token=token, short=token[:-1]))[:2] == (404, ""), path
    for host in HOSTS:
        assert ask(server, f"/{token}/", host=host.format(port=port))[:2] == (403, ""), host
    assert ask(server, f"/{token}/", "POST")[:2] == (501, "")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"\x00\xff\n\n\r\n\r\n")  # bytes that are no request end nothing
    assert ask(server, f"/{token}/")[0] == 200


@pytest.mark.long
def test_a_page_follows_its_folder(server: Server, finished: Path, tmp_path: Path) -> None:
    assert len(server.token) >= 32
    assert server.address == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert server.socket.getsockname()[0] == "127.0.0.1"
    page, state = f"/{server.token}/", f"/{server.token}/state"
    status, html, headers = ask(server, page)
    assert (status, headers["Cache-Control"], headers["Referrer-Policy"]) == (200, "no-store", "no-referrer")
    assert "holds no run" in html
    before = ask(server, state)[1]
    shutil.copytree(finished, tmp_path / "a", ignore=shutil.ignore_patterns("summary.json"))
    now = ask(server, state)[1]
    assert now != before
    html = ask(server, page)[1]
    assert f'data-state="{now}"' in html
    assert "<td>unfinished</td>" in html
    assert "connect-src 'self'" in html
    shutil.copy(finished / "summary.json", tmp_path / "a")
    assert "<td>unfinished</td>" not in ask(server, page)[1]


@pytest.mark.long
def test_the_command_prints_its_address_and_ends_on_a_signal(finished: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "sweeps" / "watch.py"), str(finished)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/\n", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
