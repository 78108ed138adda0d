"""A web server for a live report: the page is updated when runs change. The server listens on 127.0.0.1 only.

Every program of this machine can reach a port of 127.0.0.1, and so can every web page in the same browser. Therefore
the report's address contains a random token, and requests for another host name (DNS rebinding) are refused. Headers
prevent other web pages from embedding or reading an answer. The server serves only the report and its state.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from fedcommons.errors import UserError
from fedcommons.reports.frames import runs_below
from fedcommons.reports.page import page
from fedcommons.tracking.run_folder import STOPPED

HOST = "127.0.0.1"

_FILES = ("rounds.jsonl", "summary.json", "error.txt", STOPPED)
"""Files of a run folder whose changes update the report."""

_WAITING = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
    "<title>fedcommons</title><p>{}</p><p>This page is loaded again every three seconds.</p>"
)


class Watched:
    """The report on ``folders``, which is created again if files of runs have changed."""

    def __init__(self, folders: Sequence[Path], title: str | None = None) -> None:
        self.folders, self.title = folders, title
        self._state = self._html = ""
        self._lock = Lock()

    def state(self) -> str:
        """Return a hash of the paths, sizes and modification times of the runs' files."""
        digest = hashlib.sha256()
        for folder in self.folders:
            for file in (run / name for run in runs_below(folder) for name in _FILES):
                with suppress(OSError):
                    status = os.lstat(file)
                    digest.update(f"{file} {status.st_mtime_ns} {status.st_size}\n".encode(errors="replace"))
        return digest.hexdigest()[:16]

    def html(self) -> str:
        """Return the HTML of the report, or of a page with the error message if no report can be created."""
        with self._lock:
            if (now := self.state()) != self._state or not self._html:
                try:
                    self._html = page(self.folders, self.title, lambda text: None, now)
                except (UserError, OSError) as error:  # no run yet, a run without a round, or a deleted folder
                    self._html = _WAITING.format(escape(str(error)))
                self._state = now
            return self._html


class Server(ThreadingHTTPServer):
    """A web server of one live report; an OSError is raised if the port cannot be opened. port 0: any free port."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        self.watched, self.token = watched, secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # seconds within which a request must arrive

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get_all("Host") not in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            return self._answer(HTTPStatus.FORBIDDEN)
        token, _, name = self.path.removeprefix("/").partition("/")
        is_known = secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode())
        if not is_known or name not in ("", "state"):
            return self._answer(HTTPStatus.NOT_FOUND)
        watched = self.server.watched
        return self._answer(HTTPStatus.OK, watched.state() if name else watched.html(), "plain" if name else "html")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer invalid requests and requests other than GET with the status code and no content."""
        self._answer(HTTPStatus(code))

    def _answer(self, status: HTTPStatus, text: str = "", kind: str = "plain") -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": f"text/{kind}; charset=utf-8", "Content-Length": str(len(content)),
            "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin", "Connection": "close",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the browser may have closed the connection
            self.wfile.write(content)

    def version_string(self) -> str:
        return "fedcommons"

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests, because their paths contain the token."""
