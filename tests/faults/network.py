"""What answers from outside while a sweep runs: every listening port of its processes, asked from another network."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from faults import cases
from faults.cases import Case
from faults.places import GENERATES, TINY
from faults.processes import Ended
from faults.runs import Script
from faults.verdicts import Fault

NAME, HERE, THERE = "fc-faults", "10.213.77.1", "10.213.77.2"
"""Of the other network, and the two ends of the wire to it."""

ASK = """
import json, socket, sys
found = []
for port in json.loads(sys.argv[1]):
    for address in json.loads(sys.argv[2]):
        try:
            socket.create_connection((address, port), 0.5).close()
            found.append([address, port])
        except OSError:
            pass
print(json.dumps(found))
"""

SWEEPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "actors": ("run", ("--federation.executor", "ray_actors", "--federation.actors", "2", "--federation.rounds", "40")),
    "table": ("table1", ("--algorithms", "fedavg", "--alphas", "0.1", "--settings", "real",
                         "--federation.rounds", "40")),
    "generators": ("table1", ("--algorithms", "fedavg", "--alphas", "0.1", "--settings", "shuffled_synthetic",
                              "--federation.rounds", "40", *(t for n, v in GENERATES.items() for t in (f"--{n}", v)))),
    "tune": ("tune", ("--space", "alpha=0.1,1", "--federation.rounds", "40", "--sharing.setting", "real")),
}  # fmt: skip
"""What starts a Ray of its own: a script, and its options."""


@contextmanager
def wire() -> Iterator[str]:
    """Another network with a wire to this one; why there can be none, or nothing."""
    ip = shutil.which("ip")
    if os.geteuid() or not ip:
        yield "not root" if ip else "no program ip"
        return
    commands = (
        f"netns add {NAME}", f"link add {NAME} type veth peer name eth0 netns {NAME}", f"addr add {HERE}/30 dev {NAME}",
        f"link set {NAME} up", f"-n {NAME} addr add {THERE}/30 dev eth0", f"-n {NAME} link set eth0 up",
        f"-n {NAME} link set lo up",
    )  # fmt: skip
    _take_down(ip)
    try:
        for command in commands:
            done = subprocess.run([ip, *command.split()], capture_output=True, text=True)
            if done.returncode:
                yield f"ip {command}: {done.stderr.strip()[:80]}"
                return
        yield ""
    finally:
        _take_down(ip)


def _take_down(ip: str) -> None:
    subprocess.run([ip, "netns", "del", NAME], capture_output=True)
    subprocess.run([ip, "link", "del", NAME], capture_output=True)


def _session(leader: int) -> list[int]:
    """The processes of the leader's session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if (
                leader == int(path.parent.name)
                or leader in (int(fields[2]), int(fields[3]))
                or _descends(int(fields[1]), leader)
            ):
                found.append(int(path.parent.name))
        except OSError:
            pass  # it ended
    return found


def _descends(pid: int, leader: int) -> bool:
    while pid > 1:
        if pid == leader:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def listening(leader: int) -> dict[int, str]:
    """The TCP ports on which processes of the leader listen, and the addresses."""
    found: dict[int, str] = {}
    for pid in _session(leader):
        try:
            inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
            tables = [
                Path(f"/proc/{pid}/net/{name}").read_text(encoding="utf-8").splitlines()[1:] for name in ("tcp", "tcp6")
            ]
        except OSError:
            continue
        for row in (line.split() for table in tables for line in table):
            if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                address, _, port = row[1].partition(":")
                found[int(port, 16)] = _address(address)
    return found


def _address(text: str) -> str:
    words = struct.pack(f"={len(text) // 8}I", *(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)


def _swept(script: Script, argv: list[str]) -> Callable[[], object]:
    """The sweep in a process of its own, and in ours what of it answers from the other network."""

    def act() -> None:
        with wire() as why:
            if why:
                Path("ports.json").write_text(json.dumps({"why": why}), encoding="utf-8")
                print(f"left out: {why}")
                return
            sweep = os.fork()
            if not sweep:
                cases.call(script, argv)
            found: dict[int, str] = {}
            reached: list[list] = []
            status, addresses = None, json.dumps([HERE, socket.gethostbyname(socket.gethostname())])
            while status is None:
                ended, code = os.waitpid(sweep, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if ended else None
                new = {port: a for port, a in listening(sweep).items() if port not in found}
                if new:
                    found |= new
                    ask = ["ip", "netns", "exec", NAME, sys.executable, "-I", "-c", ASK, json.dumps([*new]), addresses]
                    reached += json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
                time.sleep(0.2)
            Path("ports.json").write_text(
                json.dumps({"listening": found, "reached": reached, "code": status}), encoding="utf-8"
            )
            sys.exit(status)

    return act


def make(seed: int, number: int, scripts: Mapping[str, Script], templates: Path) -> Case:
    """The case of this number."""
    name = list(SWEEPS)[number % len(SWEEPS)]
    script, more = SWEEPS[name]
    wandb = "tracking.wandb" if script in ("run", "tune") else "wandb"
    base = {
        "wandb" if n == "tracking.wandb" and wandb == "wandb" else n: v
        for n, v in TINY.items()
        if n != "federation.rounds"
    }
    argv = [t for n, v in base.items() for t in (f"--{n}", v)] + [*more]

    def judge(here: Path, ended: Ended) -> list[Fault]:
        ports = json.loads((here / "ports.json").read_text())
        if "why" in ports:
            return []
        if not ports["listening"]:
            return [Fault("silent", "no port listens: nothing was tried")]
        reached = [
            f"{address}:{port} (listens on {ports['listening'][str(port)]})" for address, port in ports["reached"]
        ]
        detail = f"{len(ports['reached'])} of {len(ports['listening'])} ports: {', '.join(reached)}"
        return [Fault("silent", "answers from another network", detail)] if reached else []

    return Case(
        f"{name}: {script} {' '.join(more)}", _swept(scripts[script], argv), judge=judge, seconds=120, gigabytes=60
    )
