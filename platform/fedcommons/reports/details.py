"""What a report tells of runs besides tables of numbers: what was run, partitions, pools, privacy, late clients."""

import base64
import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError
from fedcommons.reports import columns, intervals
from fedcommons.reports.cells import Cell
from fedcommons.reports.collect import Told
from fedcommons.reports.groups import Group
from fedcommons.reports.tables import commons_epsilon
from fedcommons.storage import safe_read
from fedcommons.tracking.run_folder import read_class_counts

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

SHOWN = 12
"""The most partitions, and the most pools."""

CLIENTS, CLASSES = 40, 20
"""The most rows and columns of a partition's picture."""

LARGEST_PNG, SIDE = 400_000, 1200
"""Bytes and pixels of a picture of a pool that W&B was given."""


@dataclass(frozen=True)
class Facts:
    """A fact and the numbers of the runs that share it."""

    text: Any
    runs: Sequence[int]


def shared(values: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Facts]:
    """Each different value once, with the numbers of the runs that have it; numbers: of the runs, if not 0, 1, ..."""
    found: dict[Any, list[int]] = {}
    for number, value in zip(numbers if numbers is not None else range(len(values)), values, strict=True):
        if value is not None:
            found.setdefault(value, []).append(number)
    return [Facts(value, runs) for value, runs in found.items()]


def sweeps(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """A line for each folder that runs stand in: what was run, in how many runs, with which seeds, when."""
    facts = {"data": "dataset", "methods": "algorithm", "settings": "setting", "seeds": "seed"}
    fields = ("partition.n_clients", "federation.participation", "partition.alpha")
    lines = []
    for parent, of in runs.groupby(runs["run"].map(lambda run: str(Path(run).parent)), sort=False):
        told = {name: ", ".join(map(str, dict.fromkeys(of[column].tolist()))) for name, column in facts.items()}
        where = [f"{columns.head(name)} {_listed(of[name].tolist())}" for name in fields if name in of]
        state = ", ".join(f"{count} {status}" for status, count in Counter(of["status"].tolist()).items())
        lines.append(
            {"folder": parent, "runs": state, "where": "; ".join(where), **told, "when": _when(of["run"].tolist())}
        )
    return lines


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(columns.text(value) for value in sorted({value for value in values if value == value}, key=str))


def _when(folders: Sequence[str]) -> str:
    """The dates of the runs' last lines; a run does not record when it ran, so its files say it."""
    times = []
    for folder in folders:
        try:
            times.append(os.lstat(Path(folder) / "rounds.jsonl").st_mtime)
        except OSError:
            continue
    days = sorted({datetime.fromtimestamp(time, UTC).date().isoformat() for time in times})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "-"


def privacy(groups: Sequence[Group], told: Sequence[Told]) -> list[dict[str, Any]]:
    """By cell: the epsilon of the commons, and the statement's words, where runs differ each with its runs."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for cell in group.cells:
            numbers = cell.runs.index.tolist()
            words = shared([told[n].words or None for n in numbers], numbers)
            if words:
                facts = {"group": group.title, "cell": name(cell), "epsilon": _epsilon(cell), "words": words}
                lines.append({**facts, "line": len(lines)})
    return lines


def said(words: Sequence[Facts]) -> str:
    """The sentences of a cell in one text."""
    return " / ".join(" ".join(fact.text) for fact in words)


def _epsilon(cell: Cell) -> str:
    return commons_epsilon(cell) if "commons" in cell.runs else "-"


def name(cell: Cell) -> str:
    """A cell in words: its algorithm and setting, and the fields besides that vary."""
    return f"{columns.method(cell)}, {columns.setting(cell)}"


def trouble(runs: "pd.DataFrame", told: Sequence[Told]) -> list[dict[str, Any]]:
    """A line for each run that had late clients or rejected replies."""
    lines = []
    rejected = runs["rejections"] if "rejections" in runs else [None] * len(runs)
    lost = runs["bytes_lost"] if "bytes_lost" in runs else [0.0] * len(runs)
    for number, (told_of, why, bytes_lost) in enumerate(zip(told, rejected, lost, strict=True)):
        said = why if isinstance(why, str) else ""
        megabytes = intervals.number(bytes_lost / 1e6, None) if bytes_lost > 0 else "-"
        if told_of.late or said or bytes_lost > 0:
            lines.append({"run": number, "late": told_of.late, "lost": megabytes, "rejected": said or "-"})
    return lines


def partitions(runs: "pd.DataFrame", say: Callable[[str], None]) -> tuple[list[dict[str, Any]], int]:
    """The first ``SHOWN`` partitions as counts by client and class, and how many there are in all."""
    every, pictures = shared(runs["partition"].where(runs["partition"].notna(), None).tolist()), []
    for fact in every[:SHOWN]:
        first = runs.iloc[fact.runs[0]]
        try:
            counts = read_class_counts(Path(first["run"]))
        except UserError as error:
            say(f"left out: {error}")
            continue
        if not counts:  # labels are no classes
            continue
        most = max(map(max, counts)) or 1
        rows = [[(n, f"{n / most:.2f}") for n in row[:CLASSES]] for row in counts[:CLIENTS]]
        cut = len(counts) > CLIENTS or len(counts[0]) > CLASSES
        size = (
            f"; shown: {len(rows)} of {len(counts)} clients, {len(rows[0])} of {len(counts[0])} classes" if cut else ""
        )
        alpha = f", alpha = {columns.text(first['alpha'])}" if first.get("alpha") == first.get("alpha") else ""
        title = f"{first['dataset']}, N = {len(counts)}{alpha}, seed {first['seed']}{size}"
        pictures.append({"title": title, "rows": rows, "runs": fact.runs, "fingerprint": fact.text})
    return pictures, len(every)


def pools(runs: "pd.DataFrame") -> tuple[list[dict[str, Any]], int]:
    """The first ``SHOWN`` pictures of pools that runs were asked to keep for W&B, each once, and how many there are."""
    files = []
    for number, run in enumerate(runs["run"]):
        if runs["setting"].iloc[number] != "real":
            found = sorted(Path(run).glob("wandb/*run-*/files/media/images/media/pool_*.png"))
            files += [(number, found[-1])] if found else []
    shown, seen = [], dict[str, dict[str, Any]]()
    for number, file in files:
        key = file.name.rpartition("_")[2]  # a digest of the picture
        if key in seen:
            seen[key]["runs"].append(number)
        elif len(shown) < SHOWN and (picture := _png(file)):
            first = runs.iloc[number]
            title = (
                f"{first['setting']}, {first['dataset']}, alpha = {columns.text(first['alpha'])}, seed {first['seed']}"
            )
            seen[key] = {"data": picture, "runs": [number], "title": title}
            shown.append(seen[key])
    return shown, len({file.name for _, file in files})


def _png(file: Path) -> str | None:
    """The picture as a data URL, written anew so that only its pixels come along; None if it is none of ours."""
    from PIL import Image

    try:
        found = safe_read.content(file, LARGEST_PNG, inner=7) or b""  # no folder from the run's on is a link
        if max(int.from_bytes(found[16:20]), int.from_bytes(found[20:24])) > SIDE:  # before anything is unpacked
            return None
        picture = Image.open(io.BytesIO(found), formats=["PNG"])
        made = io.BytesIO()
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(made, "PNG", optimize=True)
    except (OSError, ValueError, SyntaxError):  # UnreadableError is a ValueError; Pillow says SyntaxError of bad chunks
        return None
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def environments(told: Sequence[Told]) -> list[Facts]:
    """Each environment that runs were made in, as names and values, with its runs."""
    return shared([_environment(one.facts) for one in told])


def _environment(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    packages = facts.get("packages")
    versions = ", ".join(f"{n} {v}" for n, v in packages.items()) if isinstance(packages, dict) else ""
    names = ("python", "machine", "cpu", "gpus", "gpu_kinds", "code_hashes", "commit", "uncommitted_changes")
    told = [(name.replace("_", " "), str(facts[name])) for name in names if facts.get(name) not in (None, [])]
    return (*told, *([("packages", versions)] if versions else [])) or None


def command(folder: Path) -> str:
    """The command that plays a run again, from the fields in its folder, into another one."""
    return shlex.join(["fedcommons", "run", "--config", str(folder / "config.yaml"), "--out", f"{folder}-again"])
