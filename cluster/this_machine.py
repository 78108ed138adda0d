"""Ray's node provider for this machine alone, where `ray up ray_cluster.yaml` starts the head without SSH."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil
from ray.autoscaler._private.local.node_provider import LocalNodeProvider
from ray.autoscaler.command_runner import CommandRunnerInterface

ROOT = Path(__file__).resolve().parents[1]
PORT = 6379
"""The port of Ray's GCS in ray_cluster.yaml."""

STARTED = """
Ray runs on this machine alone. Workers: make cluster HOSTS="a b" USER=me KEY=~/.ssh/id (docs/howto/machines.md)
"""


class Commands(CommandRunnerInterface):
    """Runs the commands of a cluster file on this machine, where ~/fedcommons stands for this checkout."""

    def run(
        self,
        cmd: str | None = None,
        *_: Any,
        with_output: bool = False,
        environment_variables: Mapping[str, object] | None = None,
        **__: Any,
    ) -> Any:
        """Run ``cmd`` in a shell with this process's Python (None: open a shell); `ray stop` ends Ray at ``PORT``."""
        if cmd == "uptime":  # Ray's test of SSH
            return b""
        if cmd and cmd.endswith("ray stop"):
            return stop()
        where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
        where |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # so that Ray listens on the loopback interface only
        where |= {name: str(value) for name, value in (environment_variables or {}).items()}
        line = ["bash", "-c", cmd.replace("~/fedcommons", shlex.quote(str(ROOT)))] if cmd else ["bash"]
        done = subprocess.run(line, env={**os.environ, **where}, stdout=subprocess.PIPE if with_output else None)
        if done.returncode:
            raise click.ClickException(f"the command ended with exit code {done.returncode}: {cmd}")
        if cmd and "ray start" in cmd:
            print(STARTED)
        return done.stdout or b""

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copy nothing, as all files are on this machine."""

    run_rsync_down = run_rsync_up

    def remote_shell_command_str(self) -> str:
        """Return the command of a shell."""
        return "bash"


def processes() -> list[psutil.Process]:
    """Return the processes of this user's Ray at ``PORT`` on this machine, and their descendants."""
    marks = {f"--gcs_server_port={PORT}", f"--gcs-address=127.0.0.1:{PORT}", f"--address=127.0.0.1:{PORT}"}
    user, result = os.getuid(), list[psutil.Process]()
    for process in psutil.process_iter(["cmdline", "uids"]):
        with suppress(psutil.NoSuchProcess):  # the process may have ended
            if process.info["uids"].real == user and not marks.isdisjoint(process.info["cmdline"] or ()):
                result += [process, *process.children(recursive=True)]
    return result


def stop() -> bytes:
    """End the processes of this user's Ray at ``PORT`` on this machine, and check that the port is free.

    Raises:
        ClickException: another program uses the port.
    """
    for _ in range(3):  # a raylet that ends may start another worker
        ended = processes()
        for signal in ("terminate", "kill"):
            for process in ended:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, signal)()
            ended = psutil.wait_procs(ended, timeout=5)[1]
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", PORT))
        except OSError:
            raise click.ClickException(
                f"host {socket.gethostname()}: another program uses port {PORT}; end it."
            ) from None
    return b""


class ThisMachine(LocalNodeProvider):
    """A provider whose only node is this machine; the first start creates token and certificate."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Return the config without file mounts. Ray would read all their files, and fail at a link to no file."""
        return LocalNodeProvider.bootstrap_config(cluster_config) | {"file_mounts": {}}

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Register this machine as started, as Ray's own provider for machines at an address does."""
        super().create_node(node_config, tags, count)
        if not (Path.home() / ".fedcommons" / "node.crt").exists():
            subprocess.run(["sh", str(ROOT / "cluster" / "secrets.sh"), "127.0.0.1"], check=True)

    def get_command_runner(self, *_: Any, **__: Any) -> CommandRunnerInterface:
        """Return the runner without SSH."""
        return Commands()
