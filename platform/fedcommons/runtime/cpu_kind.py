"""Kinds of CPU, and choice of Ray nodes. Results can differ in rounding between CPUs, so a run uses one kind of CPU.

``python -m fedcommons.runtime.cpu_kind`` prints the labels of this machine in the format of ``ray start --labels=``.
"""

import os
import platform
import re
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.errors import FEW, UserError, nearest

CPU, TORCH, GPU = "fedcommons-cpu", "fedcommons-torch", "ray.io/accelerator-type"
"""Names of the labels of a Ray node: kind of CPU, version of torch, and kind of GPU (set by Ray itself)."""

CHOICE = "FEDCOMMONS_CPU"
"""Environment variable that names the kind of CPU to use in a cluster with several kinds."""

_WIDEST = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2", "avx": "avx", "sse4": "sse4_1"}
"""CPU instruction sets among which numerical libraries choose, the widest first -> their flags in /proc/cpuinfo."""


def cpu(about: Path = Path("/proc/cpuinfo")) -> str:
    """Return the kind of this machine's CPU, such as intel-6-143-amx: maker, family, model, widest instruction set.

    The instruction set is part of the kind, because a virtual machine may hide instructions of the CPU.
    about: Linux's file that describes the CPU. If it does not exist, the kind is ``platform.machine()``.
    """
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    values = defaultdict[str, str](str)
    for name, _, value in (line.partition(":") for line in lines):
        values.setdefault(name.strip(), value.strip())  # later cores do not replace the first core's values
    flags, vendor = values["flags"].split(), values["vendor_id"]
    x86 = [{"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(vendor, vendor), values["cpu family"], values["model"]]
    arm = [platform.machine(), values["CPU implementer"], values["CPU part"]]
    widest = [name for name, flag in _WIDEST.items() if flag in flags][:1]
    return _label("-".join(filter(None, [*(x86 if vendor else arm), *widest])))


def labels() -> dict[str, str]:
    """Return the labels of this machine: kind of CPU and version of torch."""
    return {CPU: cpu(), TORCH: _label(version("torch"))}


def require_this_kind() -> None:
    """Check that the labels of this process's Ray node are true, because a cluster file may set wrong labels.

    Raises:
        UserError: the node's CPU or version of torch differs from its labels.
    """
    import ray

    stated, actual = ray.get_runtime_context().get_node_labels(), labels()
    for name in (CPU, TORCH):
        if stated.get(name, actual[name]) != actual[name]:
            raise UserError(
                f"host {socket.gethostname()} has the label {name}: {stated[name]}, but it is {actual[name]}; correct "
                "the label in the cluster file (available_node_types.*.labels)."
            )


def _label(text: str) -> str:
    """Convert text to a valid value of a Ray label.

    The value has at most 63 letters, digits and characters of ``._-``, and begins and ends with a letter or digit.
    """
    return re.sub("[^A-Za-z0-9._-]+", "-", text)[:63].strip("._-") or "unnamed"


def choose_kind(nodes: Sequence[Mapping[str, Any]], gpus: float) -> dict[str, str]:
    """Return the labels of the Ray nodes on which a run's processes may start; empty if no node has a CPU label.

    All these nodes have one kind of CPU and this process's version of torch. If ``gpus`` is above 0, they have one kind
    of GPU. The environment variable ``CHOICE`` may name the kind of CPU. Else the kind with the most cores (or GPUs) is
    chosen.

    nodes: as returned by ``ray.nodes()``.

    Raises:
        UserError: no node has this version of torch, or no node has the kind of CPU that ``CHOICE`` names.
    """
    room, requested = Counter[tuple[str, ...]](), os.environ.get(CHOICE)
    names = (CPU, TORCH, GPU) if gpus else (CPU, TORCH)
    working = _working(nodes, "GPU" if gpus else "CPU")
    for node in working:
        kind = tuple(node["Labels"].get(name, "") for name in names)
        room[kind] += node["Resources"]["GPU" if gpus else "CPU"]
    room = Counter({kind: n for kind, n in room.items() if kind[0]})
    if not room and not requested:
        return {}
    cpus = sorted({kind[0] for kind in room})
    if requested and requested not in cpus:
        nodes_sentence = f"The nodes have {', '.join(cpus)}." if cpus else "No node of Ray has a label of its CPU."
        raise UserError(f"{CHOICE}: no node is of the kind {requested!r}{nearest(requested, cpus)} {nodes_sentence}")
    ours, wanted = _label(version("torch")), {kind: n for kind, n in room.items() if requested in (None, "", kind[0])}
    if not (fitting := {kind: n for kind, n in wanted.items() if kind[1] == ours}):
        theirs = ", ".join(sorted({kind[1] or "unlabelled" for kind in wanted}))
        kinds = {kind[:2] for kind in wanted}
        hosts = _hosts(n for n in working if (n["Labels"].get(CPU), n["Labels"].get(TORCH, "")) in kinds)
        raise UserError(f"host {hosts} has torch {theirs}, and this machine {ours}; install the same everywhere.")
    best = min(fitting, key=lambda kind: (-fitting[kind], kind))
    return {name: value for name, value in zip(names, best, strict=True) if value}


def resources(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> Counter[str]:
    """Return resource ("CPU", "GPU", ...) -> total over the running Ray nodes that have the labels ``selector``."""
    totals = Counter[str]()
    for node in nodes:
        if node["Alive"] and _has(node, selector):
            totals.update(node["Resources"])
    return totals


def describe_nodes(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> str:
    """Return a text: the number of nodes with the labels ``selector``, and the unused hosts per kind of CPU."""
    others = defaultdict[str, list[Mapping[str, Any]]](list)
    for node in (node for node in _working(nodes, "CPU") if not _has(node, selector)):
        names = (node["Labels"].get(name, "unlabelled") for name in (CPU, TORCH))
        others[" with torch ".join(names)].append(node)
    unused = "".join(f"; not used: host {_hosts(them)} ({kind})" for kind, them in sorted(others.items()))
    return f"{len(select_nodes(nodes, selector))} node(s){f' {selector[CPU]}' if selector else ''}{unused}"


def select_nodes(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the running Ray nodes that have CPU cores and the labels ``selector``."""
    return [node for node in _working(nodes, "CPU") if _has(node, selector)]


def _hosts(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return the names of the nodes' hosts; of many hosts, the first few."""
    names = sorted({node["NodeManagerHostname"] for node in nodes})
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _has(node: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    return selector.items() <= node["Labels"].items()


def _working(nodes: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [node for node in nodes if node["Alive"] and node["Resources"].get(kind)]


if __name__ == "__main__":
    print(",".join(f"{name}={value}" for name, value in labels().items()))
