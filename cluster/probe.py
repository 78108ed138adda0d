"""Describe a host to cluster/up.py, which sends this file over SSH after a line that sets ``values``.

The script runs with the host's Python, and imports the standard library only.
"""

import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version

values = globals().get("values", {})

HEAD, LOCAL_HEAD = rb"--gcs(?:_server_port=|-address=[^\0]*:)", rb"--gcs_server_port="
DASHBOARD = rb"/dashboard\.py\0--host=[^\0]*\0--port="
"""What precedes the port on command lines of Ray: the port of any head, of a head on this host, and of a dashboard."""


def installed(name):
    """Return the version of a package, or None."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def out_lacks(folder, marker, is_head):
    """Return why a folder is not shared by all hosts, or "". The head writes a marker file; other hosts look for it."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
        if is_head:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL, 0o644))
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    until = time.time() + 5  # a network file system may show a new file late
    while not os.path.exists(marker) and time.time() < until:
        time.sleep(0.2)
    return "" if os.path.exists(marker) else "is not the same folder as on the head; mount one folder on all hosts"


def accepts(address, port):
    """Return whether a program accepts connections at a port."""
    try:
        socket.create_connection((address, port), 5).close()
    except OSError:
        return False
    return True


def logs_in(ssh, address):
    """Return whether this host can log in at an address. ssh: the command without the address; empty: not tested."""
    words = [*ssh, address, "true"] if ssh and shutil.which("ssh") else ["true"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def rays(before=HEAD):
    """Return port -> whether tasks or actors run there, for this user's Rays; `ray stop` ends them all.

    before: regular expression of what precedes these ports on command lines.
    """
    heads, parents, ports = {}, set(), set()
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{folder}/cmdline", "rb") as file, open(f"{folder}/stat", "rb") as facts:
                line = file.read() if os.stat(folder).st_uid == os.getuid() else b""
                heads[os.path.basename(folder)] = {*map(int, re.findall(HEAD + rb"(\d+)\0", line))}
                ports.update(map(int, re.findall(before + rb"(\d+)\0", line)))
                if re.match(rb"ray::(?!IDLE|DashboardAgent|RuntimeEnvAgent)", line):  # a task or an actor
                    parents.add(facts.read().rpartition(b")")[2].split()[1].decode())
        except OSError:  # the process has ended
            continue
    busy = set().union(*(heads.get(parent, ()) for parent in parents))
    return {port: port in busy for port in ports}


def ssh_port(address):
    """Return the port for SSH to an address; ~/.ssh/config may name another one than 22."""
    try:
        config = subprocess.run(["ssh", "-G", address], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    except OSError:  # this host has no ssh, which ``tools`` reports
        config = ""
    match = re.search(r"^port (\d+)$", config, re.MULTILINE)
    return int(match[1]) if match else 22


def describe(names, out, marker, ports, is_head, address, others, ssh):
    """Return the facts of this host.

    names: packages. ports: variable of ``make cluster`` -> port. others: name -> address of the head's workers.
    """
    cpuinfo = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpuinfo = file.read()
    own_rays, port = rays(), ports["PORT"]
    foreign = {name: n for name, n in ports.items() if is_head and n not in own_rays and n not in rays(DASHBOARD)}
    return {
        "name": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "packages": {name: installed(name) for name in names},
        "cpu": [platform.machine(), cpuinfo.partition("\n\n")[0]],
        "free": {path: shutil.disk_usage(path).free for path in (os.path.expanduser("~"), out) if os.path.isdir(path)},
        "out": out and out_lacks(out, marker, is_head),
        "tools": [tool for tool in ("rsync", "openssl", *["ssh"] * bool(others)) if not shutil.which(tool)],
        "venv": importlib.util.find_spec("ensurepip") is not None,
        "taken": {name: n for name, n in foreign.items() if accepts("127.0.0.1", n) or accepts(address, n)},
        "rays": sorted(own_rays.keys() - {0, port}),
        "works": own_rays.get(port, False),
        "unreachable": [name for name, at in others.items() if not (accepts(at, ssh_port(at)) and logs_in(ssh, at))],
    }


if values:
    print(values.pop("mark") + json.dumps(describe(**values)))
