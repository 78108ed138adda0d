"""A report that follows its folders, served on this machine's loopback to who knows the token in its address.

Any program of this machine can reach a port of loopback, and so can a page of the web that the same browser shows: so
the address has a random token, a request for another host (DNS rebinding) is refused, and no answer may be framed or
read by other pages. Nothing but the page and its state is served.
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
"""What changes in a run folder while it runs."""

_WAITING = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
    "<title>fedcommons</title><p>{}</p><p>This page looks again every three seconds.</p>"
)


class Watched:
    """The page of these folders, made anew when it is asked for and they have changed."""

    def __init__(self, folders: Sequence[Path], title: str | None = None) -> None:
        self.folders, self.title = folders, title
        self._state = self._html = ""
        self._lock = Lock()

    def state(self) -> str:
        """A digest of which runs there are and how far they are."""
        told = hashlib.sha256()
        for folder in self.folders:
            for run in runs_below(folder):
                for name in _FILES:
                    with suppress(OSError):
                        status = os.lstat(run / name)
                        told.update(f"{run}/{name} {status.st_mtime_ns} {status.st_size}\n".encode(errors="replace"))
        return told.hexdigest()[:16]

    def html(self) -> str:
        """The page, or a sentence where there is none yet."""
        with self._lock:
            if (now := self.state()) != self._state or not self._html:
                try:
                    self._html = page(self.folders, self.title, lambda text: None, now)
                except (UserError, OSError) as error:  # no run yet, one has just begun, or a folder has just gone
                    self._html = _WAITING.format(escape(str(error)))
                self._state = now
            return self._html


class Server(ThreadingHTTPServer):
    """Serves a ``Watched`` at ``address`` alone.

    Raises:
        OSError: the port is taken, or not ours to take.
    """

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        self.watched, self.token = watched, secrets.token_urlsafe(24)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # seconds for a request to be told

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
        """Other methods and what is no HTTP: an answer that says nothing."""
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
        with suppress(OSError):  # who asked has gone
            self.wfile.write(content)

    def version_string(self) -> str:
        return "fedcommons"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told: their paths have the token."""
