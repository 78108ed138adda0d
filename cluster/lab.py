"""Hosts of ``make cluster``: values of its command line, commands over SSH, and checks before the start."""

import getpass
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedcommons.federation.source_files import PACKAGES
from fedcommons.runtime import cpu_kind

MAKES = {"PYTHON", "LOCKED", "VENV", "ARGS"}
"""Variables of the Makefile that this script does not use."""

ROOM_GB, INSTALL_ROOM_GB = 1, 10
"""Free GB that a host needs in its home and in OUT, and in its home if packages are missing."""

OPTIONS = (
    "StrictHostKeyChecking=no UserKnownHostsFile=/dev/null IdentitiesOnly=yes BatchMode=yes ConnectTimeout=10 "
    "LogLevel=ERROR"
)
"""Options of SSH: those of Ray's launcher, no questions, and no message of its own."""

RUNS_A_SWEEP = "the start would end the sweep that runs there; wait, or run `make cluster-stop` first."

MARK = "\nfedcommons:"
"""Beginning of the line with a script's answer. A login shell may print other text, also without an end of line."""


class LackError(Exception):
    """Hosts or values of the command line are unsuitable. args: one sentence per fault."""


@dataclass(frozen=True)
class Lab:
    """The values of the command. hosts: name -> address; the first host is the head. dashboard: a port, or ""."""

    hosts: Mapping[str, str]
    user: str
    key: str
    out: str
    port: int
    dashboard: str = ""

    @property
    def ssh_words(self) -> list[str]:
        """Return the command ``ssh`` without the host."""
        options = [word for option in OPTIONS.split() for word in ("-o", option)]
        return ["ssh", *(["-i", self.key] if self.key else []), *options]

    def ssh(self, host: str, line: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a line on a host, in the shell that Ray's launcher uses, with ``text`` as its input."""
        shell = f". ~/.bashrc; PATH=~/fedcommons/.venv/bin:$PATH; {line}"
        words = [*self.ssh_words, f"{self.user}@{self.hosts[host]}", f"bash --login -i -c {shlex.quote(shell)}"]
        try:
            return subprocess.run(
                words, input=text, capture_output=True, encoding="utf-8", errors="replace", timeout=120
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, 255, "", "no answer within 120 s")

    def answer(self, host: str, script: str, before: str = "", **values: Any) -> Any:
        """Run a Python script on a host, with the variable ``values``, and return the answer that the script prints."""
        done = self.ssh(host, f"{before} exec python3 -", f"values = {dict(values, mark=MARK)!r}\n{script}")
        _, mark, answer = done.stdout.rpartition(MARK)
        if mark:
            return json.loads(answer.partition("\n")[0])
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].strip().rstrip(".")
        if done.returncode == 255 and "Permission denied" in last:
            key = self.key or "the default key files (an agent's other keys are not used)"
            raise LackError(f"host {host} refuses user {self.user} with {key}: {last}.")
        raise LackError(
            f"host {host} {'does not answer by SSH' if done.returncode == 255 else 'cannot run Python'} ({last})."
        )


def lab(words: Sequence[str]) -> Lab:
    """Return the values of NAME=VALUE words, the variables on the command line of make.

    Raises:
        LackError: a variable is unknown or has an invalid value, or a host has no usable address.
    """
    defaults = {"USER": getpass.getuser(), "KEY": "", "OUT": "", "PORT": "6379", "DASHBOARD": "", "HOSTS": None}
    values = {name: value for name, _, value in (word.partition("=") for word in words) if name not in MAKES}
    if unknown := sorted(values.keys() - defaults.keys()):
        near = get_close_matches(unknown[0].upper(), defaults, 1)
        advice = (
            f"did you mean {near[0]}?"
            if near
            else 'it takes HOSTS="a b" (in quotes), USER, KEY, OUT, PORT and DASHBOARD.'
        )
        raise LackError(f"make cluster has no variable {unknown[0]}; {advice}")
    user, key, out, port, dashboard, hosts = (defaults | values).values()
    if hosts is None:
        raise LackError(
            'HOSTS is missing: name the head and the workers (HOSTS="a b"), or this machine alone (HOSTS="").'
        )
    if not hosts.split() and (others := sorted(values.keys() - {"HOSTS"})):
        raise LackError(f'{others[0]} changes nothing with HOSTS="", which starts Ray on this machine alone.')
    key, names = key and os.path.abspath(os.path.expanduser(key)), hosts.split()
    if lacking := [tool for tool in ("ssh", "ssh-keygen", "rsync", "openssl") if names and not shutil.which(tool)]:
        raise LackError(f"this machine has no {', '.join(lacking)}; install it here.")
    flaw = _flaw_of_key(key) if key and names else ""
    for name, value, is_valid, allowed in (
        ("USER", user, re.fullmatch("[A-Za-z_][A-Za-z0-9_.-]*", user), "the name of a user on the hosts"),
        ("KEY", key, not flaw, f"a file with a private SSH key without passphrase ({flaw})"),
        ("OUT", out, not out or out.startswith("/"), "an absolute path"),
        *((name, text, re.fullmatch("[1-9][0-9]{3,4}", text) and int(text) < 2**16, "a number from 1000 to 65535")
          for name, text in (("PORT", port), ("DASHBOARD", dashboard or port))),
        ("DASHBOARD", dashboard, dashboard != port, "another port than PORT"),
        ("HOSTS", hosts, all(re.fullmatch(r"\w[\w.-]*", name) for name in names),
         "names or IPv4 addresses, separated by spaces, without the user (USER)"),
        ("HOSTS", hosts, len({*names}) == len(names), "different hosts"),
    ):  # fmt: skip
        if not is_valid:
            raise LackError(f"{name} must be {allowed}, got {value!r}.")
    addresses = {name: _address(name, len(names)) for name in names}
    if len({*addresses.values()}) < len(names):
        raise LackError(f"HOSTS must be different hosts, got {', '.join(f'{n} ({a})' for n, a in addresses.items())}.")
    return Lab(addresses, user, key, out, int(port), dashboard)


def _flaw_of_key(key: str) -> str:
    """Return why Ray's head cannot use a file as the key for the workers, in the words of ssh-keygen, or ""."""
    if not os.access(key, os.R_OK):
        return "it cannot be read"
    done = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", key], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"ssh-keygen: {last.rpartition(': ')[2].rstrip('.')}" if done.returncode else ""


def _address(host: str, number: int) -> str:
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise LackError(f"host {host} has no address ({getattr(error, 'strerror', None) or error}).") from None
    if address.startswith("0.") or (number > 1 and address.startswith("127.")):
        raise LackError(f"host {host} resolves to {address}, which other hosts cannot reach; use its network address.")
    return address


def describe(lab: Lab) -> dict[str, Any]:
    """Return host -> facts from cluster/probe.py. The head is asked first, because it writes the marker file into OUT.

    Raises:
        LackError: hosts do not answer.
    """
    script, (head, *workers) = Path(__file__).with_name("probe.py").read_text(encoding="utf-8"), lab.hosts
    marker, lacks = f"{lab.out}/.shared-{secrets.token_hex(4)}", list[str]()
    others = {worker: lab.hosts[worker] for worker in workers}

    def ask(host: str) -> Any:
        at = {"is_head": host == head, "address": lab.hosts[host], "others": others if host == head else {}}
        at["ssh"] = [] if lab.key else [*lab.ssh_words, "-l", lab.user]
        at["ports"] = {"PORT": lab.port} | ({"DASHBOARD": int(lab.dashboard)} if lab.dashboard else {})
        try:
            names = [*PACKAGES, "ray", "fedcommons", *["aiohttp-cors"] * bool(lab.dashboard)]  # of ray[default]
            return lab.answer(host, script, names=names, out=lab.out, marker=marker, **at)
        except LackError as error:
            lacks.append(str(error))

    with ThreadPoolExecutor(8) as pool:
        reports = {head: ask(head), **dict(zip(workers, pool.map(ask, workers), strict=True))}
    if reports[head] and lab.out:
        lab.ssh(head, f"rm -f {shlex.quote(marker)}")
    if lacks:
        raise LackError(*lacks)
    return reports


def kind(facts: Mapping[str, Any]) -> str:
    """Return the kind of a host's CPU, as ``cpu_kind.cpu`` names it there."""
    machine, about = facts["cpu"]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(about)
        file.flush()
        return f"{cpu_kind.cpu(Path(file.name))} ({machine})"


def packages_lack(reports: Mapping[str, Any]) -> bool:
    """Return whether hosts lack a package, or have it in different versions."""
    return None in (packages := [facts["packages"] for facts in reports.values()])[0].values() or any(
        each != packages[0] for each in packages
    )


def lacks(lab: Lab, reports: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence per requirement that a host does not meet. reports: see ``describe``."""
    head = next(iter(reports))
    installs = packages_lack(reports)
    for host, facts in reports.items():
        if tuple(map(int, facts["python"].split("."))) < (3, 11):
            yield f"host {host} has Python {facts['python']}, and fedcommons needs 3.11 or newer."
        elif facts["python"] != reports[head]["python"]:
            yield f"host {host} has Python {facts['python']}, and {head} {reports[head]['python']}; install the same."
        if installs and not facts["venv"]:
            yield f"host {host} cannot create a virtual environment; install python{facts['python']}-venv there."
        for tool in facts["tools"]:
            yield f"host {host} has no {tool}; install it there."
        for name, port in facts["taken"].items():
            yield f"host {host}: another program uses port {port}; end it, or choose another {name}."
        for port in facts["rays"]:
            yield f"host {host}: the start would end {lab.user}'s Ray at port {port}; end it first (`ray stop`)."
        if facts["works"]:
            yield f"host {host}: {RUNS_A_SWEEP}"
        for worker in facts["unreachable"]:
            yield (
                f"host {worker} cannot be reached by SSH from the head, {host}, which starts the workers"
                f"{'' if lab.key else ' with its own keys, as KEY is not set'}."
            )
        if facts["out"]:
            yield f"host {host}: OUT={lab.out} {facts['out']}."
        for folder, free in facts["free"].items():
            needed = INSTALL_ROOM_GB if installs and folder != lab.out else ROOM_GB
            if free < needed * 2**30:
                yield f"host {host} has {free / 2**30:.1f} GB free in {folder}, and needs {needed} GB."
