"""Simulated hosts on one machine, with separate network, processes, home, /tmp and /dev/shm, and an SSH server each.

The hosts share a network bridge and the folder /mnt. This needs root, and Debian's iproute2 and openssh-server.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("ip", "unshare", "nsenter", "rsync", "ssh", "ssh-keygen", "/usr/sbin/sshd")

START = """
set -e
mount --make-rprivate /
mount --bind "$1" /mnt
hostname "$2"
shift 2
n=0
for kept; do mkdir -p /mnt/kept/$((n += 1)); mount --bind "$kept" /mnt/kept/$n; done
for hidden in /root /tmp /run; do mount -t tmpfs tmpfs $hidden; done
n=0
for kept; do mkdir -p "$kept"; mount --bind /mnt/kept/$((n += 1)) "$kept"; umount /mnt/kept/$n; done
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p /run/sshd /root/.ssh
chmod 700 /root /root/.ssh
ip link set lo up
echo started
while :; do sleep 3600 & wait $!; done
"""
"""Shell script that starts a host. $1: shared folder; $2: name of the host; others: folders that stay visible.

The first process of the host waits in a loop, so that it reaps processes whose parents have ended."""

SSHD = """
Port 22
ListenAddress {ip}
HostKey /mnt/keys/host
AuthorizedKeysFile /mnt/keys/operator.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
PidFile none
MaxStartups 100
"""

ASK = r"""
import json, socket, ssl, sys
START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /get_runtime_envs_info HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
def answer(port, tls, request):
    try:
        with socket.create_connection((sys.argv[1], port), 10) as plain:
            plain.settimeout(10)
            if not tls:
                plain.sendall(request)
                return plain.recv(100)
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            with context.wrap_socket(plain) as inside:
                inside.sendall(request)
                return inside.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""
asked = {"plain": (False, START), "tls": (True, START), "get": (False, GET), "post": (False, POST)}
print(json.dumps({f"{p} {n}": answer(int(p), *a).decode("latin-1") for p in sys.argv[2:] for n, a in asked.items()}))
"""
"""Script that prints what the ports of a host answer to a caller without token. Arguments: address, ports."""


def missing() -> str | None:
    """Return the reason why this machine cannot simulate hosts, or None if it can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces take root"
    if lacking := [name for name in NEEDED if not shutil.which(name)]:
        return f"hosts need {', '.join(lacking)}: apt-get install iproute2 openssh-server rsync"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    return None if tried.returncode == 0 else "this system does not allow network namespaces"


@dataclass(frozen=True)
class Host:
    """A simulated host; pid: process id of the host's first process, outside the host's namespace."""

    name: str
    ip: str
    pid: int

    def command(self, *words: str) -> list[str]:
        inside = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        clean = ["env", "-i", "HOME=/root", "USER=root", f"PATH={inside}", "LANG=C.UTF-8", "TERM=dumb"]
        return ["nsenter", f"--target={self.pid}", "--all", "--wd=/root", *clean, *words]

    def run(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=timeout)


@contextmanager
def network(shared: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Start hosts 198.18.7.1, 198.18.7.2, ... on one bridge; their folder /mnt is ``shared``."""
    keys = shared / "keys"
    keys.mkdir(parents=True)
    for name in ("host", "operator"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    with ExitStack() as stack:
        bridge = stack.enter_context(_started("sh", "-c", "ip link set lo up; echo started; exec sleep infinity"))
        _inside(bridge, "ip link add bridge type bridge")
        _inside(bridge, "ip link set bridge up")
        yield [stack.enter_context(_host(shared, bridge, name, n)) for n, name in enumerate(names, 1)]


@contextmanager
def _host(shared: Path, bridge: int, name: str, number: int) -> Iterator[Host]:
    needed = dict.fromkeys((sys.base_prefix, sys.prefix))
    folders = [folder for folder in needed if folder.startswith(("/root/", "/tmp/", "/run/"))]
    with _started("sh", "-c", START, "host", str(shared), name, *folders) as pid:
        host = Host(name, f"198.18.7.{number}", pid)
        cable = f"to-{name}"
        subprocess.run(
            ["nsenter", "--net", f"--target={bridge}", "ip", "link", "add", cable, "type", "veth", "peer", "name",
             "eth0", "netns", str(pid)], check=True,
        )  # fmt: skip
        _inside(bridge, f"ip link set {cable} master bridge up")
        for line in (f"ip address add {host.ip}/24 dev eth0", "ip link set eth0 up", "ip route add default dev eth0"):
            _inside(pid, line)
        conf = shared / f"sshd-{name}.conf"
        conf.write_text(SSHD.format(ip=host.ip))
        code = "/root/fedcommons/platform:/root/fedcommons"  # as if it were installed from there
        profile = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={code}\n"
        for file in (".profile", ".bash_profile", ".bashrc"):
            host.run("sh", "-c", f"printf '%s' '{profile}' > /root/{file}")
        serving = host.run("/usr/sbin/sshd", "-f", f"/mnt/{conf.name}", "-E", f"/mnt/sshd-{name}.log")
        assert serving.returncode == 0, serving.stderr
        yield host


@contextmanager
def _started(*words: str) -> Iterator[int]:
    """Run a command in new namespaces, wait until it prints ``started``, and yield its process id outside them."""
    kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(["unshare", *kinds, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        yield int(child)
    finally:
        process.kill()  # this also ends all processes in the namespaces
        process.communicate()


def _inside(pid: int, line: str) -> None:
    subprocess.run(["nsenter", "--net", f"--target={pid}", *line.split()], check=True)
