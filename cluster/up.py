"""Start and stop Ray on the machines of a laboratory, by SSH. The first host becomes the head of the cluster.

make cluster HOSTS="10.0.0.1 10.0.0.2" USER=me KEY=~/.ssh/id_ed25519 OUT=/shared  # exit code 2, one sentence per fault
make cluster HOSTS=""                                                            # this machine alone, without SSH
make cluster-sync                                                                # copy the code again
make cluster-stop

OUT: the folder that all hosts mount, for --out; without it, sweeps need --storage. PORT: port of the head's Ray (6379).
DASHBOARD: port of Ray's dashboard on the head's 127.0.0.1; without it, Ray starts none.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.lab import RUNS_A_SWEEP, Lab, LackError, describe, kind, lab, lacks, packages_lack
from cluster.probe import LOCAL_HEAD, accepts, rays

ROOT, CONFIG = Path(__file__).resolve().parents[1], "my_cluster.yaml"
RAY = str(Path(sys.executable).parent / "ray")

JOIN_S = 900
"""Seconds within which all hosts must have joined; they install packages meanwhile."""

INSTALL = (
    "cd ~/fedcommons && { [ -x .venv/bin/pip ] || python3 -m venv .venv; } && "
    ".venv/bin/pip install --quiet --constraint constraints.txt --editable ."
)
ENVIRONMENT = ". ~/fedcommons/cluster/environment.sh && export RAY_ADDRESS=auto &&"
NODES = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(values["mark"] + json.dumps([node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]))
"""


def content(lab: Lab, installs: bool) -> dict[str, Any]:
    """Return ray_cluster.yaml for these hosts. installs: whether the hosts install the packages of constraints.txt."""
    text = (ROOT / "ray_cluster.yaml").read_text(encoding="utf-8").replace("6379", str(lab.port))
    if lab.dashboard:
        switch = f"=true --dashboard-host=127.0.0.1 --dashboard-port={lab.dashboard}"
        text = text.replace("--include-dashboard=false", f"--include-dashboard{switch}")
    file = yaml.safe_load(text.replace("--head", "--head --autoscaling-config=~/ray_bootstrap_config.yaml"))
    for name in ("available_node_types", "head_node_type", "max_workers"):
        del file[name]
    head, *workers = lab.hosts.values()
    file["cluster_name"] += f"-{head.replace('.', '-')}"
    file["provider"] = {"type": "local", "head_ip": head, "worker_ips": workers}
    file["auth"] = {"ssh_user": lab.user} | ({"ssh_private_key": lab.key} if lab.key else {})
    return file | {"setup_commands": [INSTALL + " 'ray[default]'" * bool(lab.dashboard)] if installs else []}


def has_secrets(lab: Lab) -> bool:
    """Return whether ~/.fedcommons has a token, and a certificate for all hosts that is valid for 30 more days."""
    folder = Path.home() / ".fedcommons"
    ask = ["openssl", "x509", "-noout", "-in", str(folder / "node.crt")]
    checks = [["-checkend", str(30 * 86400)], *(["-checkip", address] for address in lab.hosts.values())]
    if not (folder / "auth_token").exists():
        return False
    done = [subprocess.run([*ask, *check], capture_output=True, text=True) for check in checks]
    return all(each.returncode == 0 and "NOT match" not in each.stdout for each in done)


def start(lab: Lab) -> None:
    """Check the hosts, write ``CONFIG``, start the cluster, and wait until all hosts have joined.

    Raises:
        LackError: hosts lack something, Ray's launcher fails, or a host does not join.
    """
    if not lab.hosts:
        if (works := rays(LOCAL_HEAD).get(lab.port)) or (works is None and accepts("127.0.0.1", lab.port)):
            raise LackError(
                f"host {socket.gethostname()}: {RUNS_A_SWEEP if works else f'another program uses port {lab.port}.'}"
            )
        _ray("up", "-y", "--no-config-cache", "ray_cluster.yaml")
        return
    require_no_other_cluster(lab)
    reports = describe(lab)
    if lacking := [*lacks(lab, reports)]:
        raise LackError(*lacking)
    head, kinds = next(iter(reports)), {host: kind(facts) for host, facts in reports.items()}
    for host in (host for host in reports if kinds[host] != kinds[head]):
        print(f"note: host {host} has CPU {kinds[host]}, {head} has {kinds[head]}: a sweep uses the hosts of one kind.")
    if not lab.out:
        print("note: OUT is not set, so sweeps need --storage to share results between hosts.")
    if not has_secrets(lab):
        subprocess.run(["sh", str(ROOT / "cluster" / "secrets.sh"), *lab.hosts.values()], check=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=ROOT, prefix=".my_cluster", delete=False) as file:
        file.write("# Written by make cluster from ray_cluster.yaml.\n")
        yaml.safe_dump(content(lab, packages_lack(reports)), file, sort_keys=False, width=1000)
    os.replace(file.name, ROOT / CONFIG)
    print(f"Starting Ray on {', '.join(reports)} ...", flush=True)
    _ray("up", "-y", "--no-config-cache", CONFIG, is_quiet=True)
    deadline, missing = time.monotonic() + JOIN_S, {facts["name"]: host for host, facts in reports.items()}
    while missing := {n: h for n, h in missing.items() if n not in lab.answer(head, NODES, ENVIRONMENT)}:
        if time.monotonic() > deadline:
            raise LackError(
                *(
                    f"host {h} has not joined; see /tmp/ray/session_latest/logs/monitor.* on {head}."
                    for h in missing.values()
                )
            )
        time.sleep(3)
    print(
        f"Ray runs on {', '.join(reports)}. Start a sweep by `ray exec {CONFIG} ...`; end Ray by `make cluster-stop`."
    )


def require_no_other_cluster(lab: Lab) -> None:
    """Check that the user's Ray of ``CONFIG`` runs on no host outside ``lab``, which ``stop`` would no longer reach.

    Raises:
        LackError: Ray runs on such a host.
    """
    if (ROOT / CONFIG).exists():
        old, _ = started()
        head, *_ = old.hosts
        is_ray = f"[ -O $p ] && grep -qsa '[-]-gcs-address={head}:' $p/cmdline"  # -O: a process of the user
        look = f"for p in /proc/[0-9]*; do {is_ray} && exit; done; false"
        for host in old.hosts:
            if host not in lab.hosts.values() and old.ssh(host, look).returncode == 0:
                raise LackError(
                    f"host {host} runs Ray for the cluster of head {head}; run `make cluster-stop` here first."
                )


def started() -> tuple[Lab, dict[str, Any]]:
    """Return the hosts of ``CONFIG`` by their addresses, and its content.

    Raises:
        LackError: the file is missing or damaged.
    """
    if not (ROOT / CONFIG).exists():
        raise LackError(f'{CONFIG} is missing: `make cluster HOSTS="a b"` writes it.')
    try:
        file = yaml.safe_load((ROOT / CONFIG).read_text(encoding="utf-8"))
        addresses = [file["provider"]["head_ip"], *file["provider"]["worker_ips"]]
        user, key = file["auth"]["ssh_user"], file["auth"].get("ssh_private_key", "")
    except (yaml.YAMLError, ValueError, LookupError, TypeError):
        raise LackError(f"{CONFIG} is damaged; remove the file, and end Ray on each host by `ray stop`.") from None
    return Lab({address: address for address in addresses}, user, key, "", 0), file


def sync() -> None:
    """Copy the code to all hosts again; `ray rsync-up -A` would copy it to the head only, without an error.

    Raises:
        LackError: the copy to a host fails.
    """
    lab, file = started()
    excluded = [word for pattern in file["rsync_exclude"] for word in ("--exclude", pattern)]
    words = ["rsync", "-az", "--rsh", shlex.join(lab.ssh_words), *excluded, "./"]
    copies = {host: subprocess.run([*words, f"{lab.user}@{host}:fedcommons/"], cwd=ROOT) for host in lab.hosts}
    if failed := [host for host, done in copies.items() if done.returncode]:
        raise LackError(*(f"host {host} has no new copy of the code; see rsync's messages above." for host in failed))
    print(f"Copied the code to {', '.join(lab.hosts)}.")


def stop() -> None:
    """End the cluster of ``CONFIG``, and that of this machine; `ray down` alone leaves processes on the workers.

    Raises:
        LackError: a command of Ray fails, or a host does not answer.
    """
    hosts, silent = list[str](), list[str]()
    if (ROOT / CONFIG).exists():
        lab, _ = started()
        _ray("down", "-y", CONFIG, is_quiet=True)
        hosts = [*lab.hosts]
        silent = [host for host in hosts if lab.ssh(host, "ray stop").returncode]
    _ray("down", "-y", "ray_cluster.yaml", is_quiet=True)
    if silent:
        raise LackError(*(f"host {host}: `ray stop` failed, so Ray may still run there." for host in silent))
    print(f"Ray has ended on {', '.join([*hosts, 'this machine'])}.")


def _ray(*words: str, is_quiet: bool = False) -> None:
    """Run a command of Ray. is_quiet: print the command's output, which lists all copied files, only if it fails."""
    # Without the variable, Ray 2.60 starts no worker of provider local.
    environment = {**os.environ, "RAY_UP_enable_autoscaler_v2": "0", "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}"}
    out, errors = (subprocess.PIPE, subprocess.STDOUT) if is_quiet else (None, None)
    done = subprocess.run([RAY, *words], cwd=ROOT, env=environment, stdout=out, stderr=errors, errors="replace")
    if done.returncode:
        print(done.stdout or "", file=sys.stderr)
        raise LackError(f"`ray {' '.join(words)}` failed; see its last lines.")


def _of_make() -> list[str]:
    """Return the variables on make's command line, in which a backslash precedes each space of a value."""
    words = re.findall(r"(?:\\.|\S)+", os.environ.get("MAKEFLAGS", "").partition("-- ")[2])
    return [re.sub(r"\\(.)", r"\1", word) for word in words]


def main(words: Sequence[str]) -> int:
    """Run ``stop`` or ``sync``, or ``start`` with NAME=VALUE words (default: the variables on make's command line)."""
    try:
        {"stop": stop, "sync": sync}.get(" ".join(words), lambda: start(lab(words or _of_make())))()
    except LackError as error:
        for sentence in error.args:
            print(f"error: {sentence}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
