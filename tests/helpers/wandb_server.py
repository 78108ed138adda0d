"""A stub of W&B's server on 127.0.0.1 that records all requests. The client is the real wandb with its core.

All answers are stubs. The server knows one user, ``me``, stores nothing, checks nothing, and answers that no run exists
yet, so that nothing is resumed. Tests with the stub cannot detect what the real server would refuse or display.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, cast

KEY = "0a1b2c3d" * 5
"""An API key in the form of W&B's keys; the stub accepts every key."""


class Server(ThreadingHTTPServer):
    """The server and the requests so far: GraphQL (operation, variables), file streams, uploads and all bodies.

    refuses: if True, POST requests are answered with status 403.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.streams: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.received: list[bytes] = []
        self.refuses = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client that ends resets its connections."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def variables(self, operation: str) -> list[dict[str, Any]]:
        return [variables for name, variables in self.asked if name == operation]

    @property
    def bucket(self) -> dict[str, Any]:
        return {k: v for variables in self.variables("upsertBucket") for k, v in variables.items() if v is not None}

    @property
    def config(self) -> dict[str, Any]:
        return {k: v["value"] for k, v in json.loads(self.bucket["config"]).items() if k != "_wandb"}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the rows of the run's history in order, without the columns that W&B adds (``_...``)."""
        return [{k: v for k, v in row.items() if k[0] != "_"} for row in self._file("wandb-history.jsonl")]

    @property
    def summary(self) -> dict[str, Any]:
        return self._file("wandb-summary.json")[-1]

    def _file(self, name: str) -> list[dict[str, Any]]:
        lines: dict[int, str] = {}
        for part in (stream["files"][name] for stream in self.streams if name in stream.get("files", {})):
            lines |= dict(enumerate(part["content"], part["offset"]))
        return [json.loads(lines[i]) for i in sorted(lines)]


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server during the with block."""
    server = Server()
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ENTITY = {"id": "RW50aXR5", "name": "me"}
VIEWER = {"id": "VXNlcg==", "username": "me", "entity": "me", "email": "", "flags": "{}", "teams": {"edges": []}}


def answer(operation: str, variables: dict[str, Any], url: str) -> dict[str, Any]:
    name = variables.get("name")
    if operation == "upsertBucket":
        project = {"id": "UHJvamVjdA==", "name": variables["project"], "entity": ENTITY}
        bucket = {"id": "UnVu", "name": name, "displayName": name, "config": "{}", "project": project}
        return {operation: {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
    if operation == "createRunFiles":
        files = [{"name": name, "uploadUrl": f"{url}/upload/{name}"} for name in variables["files"]]
        return {operation: {"runID": "UnVu", "uploadHeaders": [], "files": files}}
    if operation == "upsertView":
        return {operation: {"view": {"id": "Vmlldw==", "name": name}, "inserted": True}}
    return {"viewer": VIEWER} if operation == "viewer" else {"model": None}


OPERATIONS = ("upsertBucket", "createRunFiles", "upsertView", "viewer")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self._body()
        if self.server.refuses:
            return self._say({"errors": [{"message": "permission denied"}]}, 403)
        if self.path.endswith("/file_stream"):
            self.server.streams.append(json.loads(body))
        if self.path != "/graphql":
            return self._say({})
        asked = cast("dict[str, Any]", json.loads(body))
        query, variables = asked["query"], asked.get("variables") or {}
        operation = next((name for name in OPERATIONS if f"{name}(" in query or f"{name} {{" in query), "")
        self.server.asked.append((operation, variables))
        self._say({"data": answer(operation, variables, self.server.url)})

    def do_PUT(self) -> None:
        self.server.uploads[self.path.removeprefix("/upload/")] = self._body()
        self._say({})

    def do_GET(self) -> None:
        self._say({})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            body += self.rfile.read(size)
            self.rfile.readline()
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.received.append(body)
        return body

    def _say(self, content: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
