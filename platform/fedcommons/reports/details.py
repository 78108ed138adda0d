"""Sections of a report on sweeps, partitions, pools of images, privacy, stragglers, environments and commands."""

import base64
import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError
from fedcommons.reports import columns
from fedcommons.reports.cells import Cell, values
from fedcommons.reports.collect import Group, RunFacts
from fedcommons.reports.intervals import number
from fedcommons.reports.tables import commons_epsilon
from fedcommons.storage import safe_read
from fedcommons.tracking.run_folder import read_class_counts

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

PICTURES, CLIENTS, CLASSES = 12, 40, 20
"""Maximum numbers on the page: partitions and pictures of pools (``PICTURES``); clients and classes of a partition."""

LARGEST_PNG, SIDE = 400_000, 1200
"""Maximum number of bytes, and of pixels per side, of a picture logged to W&B; larger pictures are left out."""


def runs_by_value(every: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Return the indices of the runs that have each distinct value, except None. every: value by the run's index."""
    runs: dict[Any, list[int]] = {}
    for index, value in every.items():
        if value is not None:
            runs.setdefault(value, []).append(index)
    return runs


def sweeps(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return one line per parent folder of runs."""
    facts = {"data": "dataset", "methods": "algorithm", "settings": "setting", "seeds": "seed"}
    fields = ("partition.n_clients", "federation.participation", "partition.alpha")
    lines = []
    for parent, part in runs.groupby(runs["run"].map(lambda run: str(Path(run).parent)), sort=False):
        line = {"folder": parent, "runs": ", ".join(f"{n} {name}" for name, n in Counter(part["status"]).items())}
        for name, column in facts.items():
            line[name] = ", ".join(columns.text(value, column) for value in dict.fromkeys(part[column].tolist()))
        where = []
        for name in (name for name in fields if name in part):
            several = sorted({value for value in part[name].tolist() if value == value}, key=str)
            where.append(f"{columns.head(name)} {', '.join(map(columns.text, several))}")
        days = set()
        for run in part["run"]:  # runs do not record dates, so the dates of files are shown
            with suppress(OSError):
                written = os.lstat(Path(run) / "rounds.jsonl").st_mtime
                days.add(datetime.fromtimestamp(written, UTC).date().isoformat())
        when = " to ".join(dict.fromkeys([min(days), max(days)])) if days else "-"
        lines.append({**line, "where": "; ".join(where), "when": when})
    return lines


def privacy(groups: Sequence[Group], run_facts: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return one line per configuration that has a privacy statement."""
    lines: list[dict[str, Any]] = []
    for title, cell in ((group.title, cell) for group in groups for cell in group.cells):
        if words := runs_by_value({n: run_facts[n].words or None for n in cell.runs.index.tolist()}):
            facts = {"group": title, "cell": name(cell), "epsilon": commons_epsilon(cell), "words": words}
            lines.append({**facts, "line": len(lines)})
    return lines


def name(cell: Cell) -> str:
    """Return a configuration's name: algorithm, sharing strategy, and varying fields."""
    return f"{columns.method(cell)}, {columns.setting(cell)}"


def trouble(runs: "pd.DataFrame", run_facts: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return one line per run with stragglers or rejected replies."""
    lines = []
    every = zip(run_facts, values(runs, "rejections"), values(runs, "bytes_lost"), strict=True)
    for index, (facts, sentence, lost) in enumerate(every):
        rejection, lost = sentence if isinstance(sentence, str) else "", lost or 0
        if facts.n_late or rejection or lost > 0:
            megabytes = number(lost / 1e6, None) if lost > 0 else "-"
            lines.append({"run": index, "late": facts.n_late, "lost": megabytes, "rejected": rejection or "-"})
    return lines


def partitions(runs: "pd.DataFrame", say: Callable[[str], None]) -> tuple[list[dict[str, Any]], int]:
    """Return the heat maps of the first ``PICTURES`` partitions, as values for page.js, and their total number."""
    every, pictures = runs_by_value(dict(enumerate(values(runs, "partition")))), []
    for of_partition in list(every.values())[:PICTURES]:
        first = runs.iloc[of_partition[0]]
        try:
            counts = read_class_counts(Path(first["run"]))
        except UserError as error:
            say(f"left out: {error}")
            continue
        if not counts:  # no picture, because the labels are not classes
            continue
        clients, classes, most = len(counts), len(counts[0]), max(map(max, counts)) or 1
        rows = [[(n, f"{n / most:.2f}") for n in row[:CLASSES]] for row in counts[:CLIENTS]]
        title = f"{first['dataset']}, N = {clients}"
        if first.get("alpha") == first.get("alpha"):
            title += f", alpha = {columns.text(first['alpha'])}"
        title += f", seed {first['seed']}"
        if clients > CLIENTS or classes > CLASSES:
            title += f"; shown: {len(rows)} of {clients} clients, {len(rows[0])} of {classes} classes"
        pictures.append({"title": title, "rows": rows, "runs": of_partition})
    return pictures, len(every)


def pools(runs: "pd.DataFrame") -> tuple[list[dict[str, Any]], int]:
    """Return the first ``PICTURES`` distinct pictures of pools that runs logged to W&B, and their total number."""
    files = {}
    for index, (run, setting) in enumerate(zip(runs["run"], runs["setting"], strict=True)):
        if setting != "real" and (images := sorted(Path(run).glob("wandb/*run-*/files/media/images/media/pool_*.png"))):
            files[index] = images[-1]
    pictures, seen = [], dict[str, dict[str, Any]]()
    for index, file in files.items():
        key = file.name.rpartition("_")[2]  # a hash of the picture; equal pictures are shown once
        if key in seen:
            seen[key]["runs"].append(index)
        elif len(pictures) < PICTURES and (picture := _png(file)):
            first = runs.iloc[index]
            sharing, alpha = columns.text(first["setting"], "setting"), columns.text(first["alpha"])
            title = f"{sharing}, {first['dataset']}, alpha = {alpha}, seed {first['seed']}"
            seen[key] = {"data": picture, "runs": [index], "title": title}
            pictures.append(seen[key])
    return pictures, len({file.name for file in files.values()})


def _png(file: Path) -> str | None:
    """Return the pixels of a PNG file, without its metadata, as a data URL; None if it is no PNG or too large."""
    from PIL import Image

    try:
        # The last 7 components of the path of ``file`` (``wandb`` to ``pool_*.png``) must not be links.
        content = safe_read.content(file, LARGEST_PNG, inner=7) or b""
        # Sides are checked before Pillow decodes the file, because a huge picture would fill the memory.
        if max(int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) > SIDE:
            return None
        picture = Image.open(io.BytesIO(content), formats=["PNG"])
        encoded = io.BytesIO()
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(encoded, "PNG", optimize=True)
    except (OSError, ValueError, SyntaxError):  # UnreadableError is a ValueError; Pillow raises SyntaxError
        return None
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


def environments(run_facts: Sequence[RunFacts]) -> dict[Any, list[int]]:
    """Return each distinct environment (software and hardware) as (name, value) pairs, with the indices of its runs."""
    return runs_by_value({index: _environment(run.facts) for index, run in enumerate(run_facts)})


def _environment(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    names = ("python", "machine", "cpu", "gpus", "gpu_kinds", "code_hashes", "commit", "uncommitted_changes")
    pairs = [(name.replace("_", " "), str(facts[name])) for name in names if facts.get(name) not in (None, [])]
    if isinstance(packages := facts.get("packages"), dict) and packages:
        pairs.append(("packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    return tuple(pairs) or None


def command(folder: Path) -> str:
    """Return the command that repeats a run from its config.yaml and writes to another folder."""
    return shlex.join(["fedcommons", "run", "--config", str(folder / "config.yaml"), "--out", f"{folder}-again"])
