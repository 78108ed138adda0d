"""Kinds of nodes: the bits of a result depend on the CPU that computes it, so a run stays on nodes of one kind.

``python -m fedcommons.runtime.cpu_kind`` prints the labels of this machine, as ``ray start --labels=`` takes them.
"""

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError, nearest

CPU, TORCH, GPU = "fedcommons-cpu", "fedcommons-torch", "ray.io/accelerator-type"
"""Labels of a node. Ray sets the last by itself, where there is a GPU."""

CHOICE = "FEDCOMMONS_CPU"
"""The variable that names the kind of CPU to use in a cluster that has several."""

_WIDEST = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2", "avx": "avx", "sse4": "sse4_1"}
"""Sets of instructions between which libraries choose, the widest first, and their flags in /proc/cpuinfo."""


def cpu(about: Path = Path("/proc/cpuinfo")) -> str:
    """The kind of this machine's CPU, such as intel-6-143-amx: maker, family, model, the widest instructions it has.

    A virtual machine may hide instructions that the model has. about: what Linux tells; elsewhere Python is asked.
    """
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    told = dict[str, str]()
    for name, _, value in (line.partition(":") for line in lines):
        told.setdefault(name.strip(), value.strip())  # of the first core
    flags = told.get("flags", "").split()
    maker = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(told.get("vendor_id", ""), told.get("vendor_id", ""))
    x86 = [maker, told.get("cpu family", ""), told.get("model", "")]
    arm = [platform.machine(), told.get("CPU implementer", ""), told.get("CPU part", "")]
    widest = [name for name, flag in _WIDEST.items() if flag in flags][:1]
    return _label("-".join(filter(None, [*(x86 if maker else arm), *widest])))


def labels() -> dict[str, str]:
    """The labels of this machine: its CPU's kind and its version of torch."""
    return {CPU: cpu(), TORCH: _label(version("torch"))}


def require_true() -> None:
    """Check the labels of the node that this process of Ray is on: a cluster file may have given it others.

    Raises:
        UserError: it has another CPU or torch than they say.
    """
    import ray

    said, here = ray.get_runtime_context().get_node_labels(), labels()
    for name in (CPU, TORCH):
        if said.get(name, here[name]) != here[name]:
            raise UserError(
                f"a node of Ray has the label {name}: {said[name]}, and is {here[name]}; correct it in the cluster "
                "file (available_node_types.*.labels)."
            )


def _label(text: str) -> str:
    """The text as a label's value: at most 63 letters, digits, dots, dashes and underscores, no dash at an end."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)[:63].strip("._-") or "unnamed"


def chosen(nodes: Sequence[Mapping[str, Any]], gpus: float) -> dict[str, str]:
    """The labels by which trials and actors are pinned to nodes of one kind; none where no node has any.

    Of the kinds with our version of torch, and with GPUs where ``gpus`` are asked for: the one that ``CHOICE`` names,
    else the one with the most cores (or GPUs).

    nodes: as of ``ray.nodes()``.

    Raises:
        UserError: no node has our version of torch, or none is of the kind that ``CHOICE`` names.
    """
    room, asked = Counter[tuple[str, ...]](), os.environ.get(CHOICE)
    names = (CPU, TORCH, GPU) if gpus else (CPU, TORCH)
    for node in _working(nodes, "GPU" if gpus else "CPU"):
        kind = tuple(node["Labels"].get(name, "") for name in names)
        room[kind] += node["Resources"]["GPU" if gpus else "CPU"]
    room = Counter({kind: n for kind, n in room.items() if kind[0]})
    if not room and not asked:
        return {}
    cpus = sorted({kind[0] for kind in room})
    if asked and asked not in cpus:
        there = f"The nodes have {', '.join(cpus)}." if cpus else "No node of Ray has a label of its CPU."
        raise UserError(f"{CHOICE}: no node is of the kind {asked!r}{nearest(asked, cpus)} {there}")
    ours, wanted = _label(version("torch")), {kind: n for kind, n in room.items() if asked in (None, "", kind[0])}
    if not (fitting := {kind: n for kind, n in wanted.items() if kind[1] == ours}):
        theirs = ", ".join(sorted({kind[1] for kind in wanted}))
        raise UserError(f"the nodes of Ray have torch {theirs}, and torch is {ours} here: install the same everywhere.")
    best = min(fitting, key=lambda kind: (-fitting[kind], kind))
    return {name: value for name, value in zip(names, best, strict=True) if value}


def resources(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> Counter[str]:
    """What the nodes with these labels have in all, by the resource."""
    found = Counter[str]()
    for node in nodes:
        if node["Alive"] and _has(node, selector):
            found.update(node["Resources"])
    return found


def described(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> str:
    """The nodes that work, and which others could but have no part in it, in words."""
    working = _working(nodes, "CPU")
    left = [node["Labels"] for node in working if not _has(node, selector)]
    others = Counter(f"{each.get(CPU, 'unlabelled')} with torch {each.get(TORCH, 'unlabelled')}" for each in left)
    unused = "".join(f", not on {n} node(s) {kind}" for kind, n in sorted(others.items()))
    return f"{len(working) - len(left)} node(s){f' {selector[CPU]}' if selector else ''}{unused}"


def selected(nodes: Sequence[Mapping[str, Any]], selector: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the nodes with these labels that have cores."""
    return [node for node in _working(nodes, "CPU") if _has(node, selector)]


def _has(node: Mapping[str, Any], selector: Mapping[str, str]) -> bool:
    return selector.items() <= node["Labels"].items()


def _working(nodes: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [node for node in nodes if node["Alive"] and node["Resources"].get(kind)]


if __name__ == "__main__":
    print(",".join(f"{name}={value}" for name, value in labels().items()))
