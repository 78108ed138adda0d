"""Sections of a report on sweeps, partitions, pools of images, privacy, stragglers, environments and commands."""

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
from fedcommons.reports.collect import RunFacts
from fedcommons.reports.groups import Group
from fedcommons.reports.tables import commons_epsilon
from fedcommons.storage import safe_read
from fedcommons.tracking.run_folder import read_class_counts

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

SHOWN = 12
"""Maximum number of partitions, and of pictures of pools, that a report shows."""

CLIENTS, CLASSES = 40, 20
"""Maximum number of clients (rows) and classes (columns) in the picture of a partition."""

LARGEST_PNG, SIDE = 400_000, 1200
"""Maximum number of bytes, and of pixels per side, of a picture logged to W&B; larger pictures are left out."""


@dataclass(frozen=True)
class Facts:
    """A value, such as an environment or a privacy statement, and the indices of the runs that have this value."""

    text: Any
    runs: Sequence[int]


def shared(values: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Facts]:
    """Return each distinct value, except None, with the indices of the runs that have this value.

    numbers: index of the run of each element of ``values``; None: the position of the element.
    """
    runs_by_value: dict[Any, list[int]] = {}
    for number, value in zip(numbers if numbers is not None else range(len(values)), values, strict=True):
        if value is not None:
            runs_by_value.setdefault(value, []).append(number)
    return [Facts(value, runs) for value, runs in runs_by_value.items()]


def sweeps(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return one line per parent folder of runs: data, federations, methods, seeds, numbers of runs, and dates."""
    facts = {"data": "dataset", "methods": "algorithm", "settings": "setting", "seeds": "seed"}
    fields = ("partition.n_clients", "federation.participation", "partition.alpha")
    lines = []
    for parent, runs_of_folder in runs.groupby(runs["run"].map(lambda run: str(Path(run).parent)), sort=False):
        values = {
            name: ", ".join(columns.text(value, column) for value in dict.fromkeys(runs_of_folder[column].tolist()))
            for name, column in facts.items()
        }
        where = [
            f"{columns.head(name)} {_listed(runs_of_folder[name].tolist())}"
            for name in fields
            if name in runs_of_folder
        ]
        state = ", ".join(f"{count} {status}" for status, count in Counter(runs_of_folder["status"].tolist()).items())
        lines.append(
            {
                "folder": parent,
                "runs": state,
                "where": "; ".join(where),
                **values,
                "when": _when(runs_of_folder["run"].tolist()),
            }
        )
    return lines


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(columns.text(value) for value in sorted({value for value in values if value == value}, key=str))


def _when(folders: Sequence[str]) -> str:
    """Return the first and last date on which these runs wrote a round (file dates, as runs do not record dates)."""
    times = []
    for folder in folders:
        try:
            times.append(os.lstat(Path(folder) / "rounds.jsonl").st_mtime)
        except OSError:
            continue
    days = sorted({datetime.fromtimestamp(time, UTC).date().isoformat() for time in times})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "-"


def privacy(groups: Sequence[Group], run_facts: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return one line per configuration: epsilon of the shared data, and each privacy statement with its runs."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for cell in group.cells:
            numbers = cell.runs.index.tolist()
            words = shared([run_facts[n].words or None for n in numbers], numbers)
            if words:
                facts = {"group": group.title, "cell": name(cell), "epsilon": _epsilon(cell), "words": words}
                lines.append({**facts, "line": len(lines)})
    return lines


def join_statements(words: Sequence[Facts]) -> str:
    """Join the privacy statements of a configuration's runs into one text."""
    return " / ".join(" ".join(fact.text) for fact in words)


def _epsilon(cell: Cell) -> str:
    return commons_epsilon(cell) if "commons" in cell.runs else "-"


def name(cell: Cell) -> str:
    """Return a configuration's name: algorithm, sharing strategy, and varying fields."""
    return f"{columns.method(cell)}, {columns.setting(cell)}"


def trouble(runs: "pd.DataFrame", run_facts: Sequence[RunFacts]) -> list[dict[str, Any]]:
    """Return one line per run with stragglers or rejected replies: count of late replies, MB lost, and rejection."""
    lines = []
    rejected = runs["rejections"] if "rejections" in runs else [None] * len(runs)
    lost = runs["bytes_lost"] if "bytes_lost" in runs else [0.0] * len(runs)
    for number, (facts, sentence, bytes_lost) in enumerate(zip(run_facts, rejected, lost, strict=True)):
        rejection = sentence if isinstance(sentence, str) else ""
        megabytes = intervals.number(bytes_lost / 1e6, None) if bytes_lost > 0 else "-"
        if facts.n_late or rejection or bytes_lost > 0:
            lines.append({"run": number, "late": facts.n_late, "lost": megabytes, "rejected": rejection or "-"})
    return lines


def partitions(runs: "pd.DataFrame", say: Callable[[str], None]) -> tuple[list[dict[str, Any]], int]:
    """Return the first ``SHOWN`` partitions, and the number of all partitions.

    ``rows``: pairs by client and class: the number of training examples, and this number divided by the largest number.
    """
    every, pictures = shared(runs["partition"].where(runs["partition"].notna(), None).tolist()), []
    for fact in every[:SHOWN]:
        first = runs.iloc[fact.runs[0]]
        try:
            counts = read_class_counts(Path(first["run"]))
        except UserError as error:
            say(f"left out: {error}")
            continue
        if not counts:  # no picture, because the labels are not classes
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
    """Return the first ``SHOWN`` distinct pictures of pools that runs logged to W&B, and the number of all pictures."""
    files = []
    for number, run in enumerate(runs["run"]):
        if runs["setting"].iloc[number] != "real":
            images = sorted(Path(run).glob("wandb/*run-*/files/media/images/media/pool_*.png"))
            files += [(number, images[-1])] if images else []
    pictures, seen = [], dict[str, dict[str, Any]]()
    for number, file in files:
        key = file.name.rpartition("_")[2]  # a hash of the picture; equal pictures are shown once
        if key in seen:
            seen[key]["runs"].append(number)
        elif len(pictures) < SHOWN and (picture := _png(file)):
            first = runs.iloc[number]
            sharing, alpha = columns.text(first["setting"], "setting"), columns.text(first["alpha"])
            title = f"{sharing}, {first['dataset']}, alpha = {alpha}, seed {first['seed']}"
            seen[key] = {"data": picture, "runs": [number], "title": title}
            pictures.append(seen[key])
    return pictures, len({file.name for _, file in files})


def _png(file: Path) -> str | None:
    """Return the pixels of a PNG file, without its metadata, as a data URL; None if it is no PNG or too large."""
    from PIL import Image

    try:
        # Below the run folder, the path of ``file`` has 7 components (``wandb`` to ``pool_*.png``). None may be a link.
        content = safe_read.content(file, LARGEST_PNG, inner=7) or b""
        if (
            max(int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) > SIDE
        ):  # checked before Pillow decodes the file, because a huge picture would fill the memory
            return None
        picture = Image.open(io.BytesIO(content), formats=["PNG"])
        encoded = io.BytesIO()
        picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(encoded, "PNG", optimize=True)
    except (
        OSError,
        ValueError,
        SyntaxError,
    ):  # ``content`` raises UnreadableError, a ValueError; Pillow raises SyntaxError for a damaged PNG
        return None
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


def environments(run_facts: Sequence[RunFacts]) -> list[Facts]:
    """Return each distinct environment (software and hardware) as (name, value) pairs, with the indices of its runs."""
    return shared([_environment(run.facts) for run in run_facts])


def _environment(facts: Mapping[str, Any]) -> tuple[tuple[str, str], ...] | None:
    packages = facts.get("packages")
    versions = ", ".join(f"{n} {v}" for n, v in packages.items()) if isinstance(packages, dict) else ""
    names = ("python", "machine", "cpu", "gpus", "gpu_kinds", "code_hashes", "commit", "uncommitted_changes")
    pairs = [(name.replace("_", " "), str(facts[name])) for name in names if facts.get(name) not in (None, [])]
    return (*pairs, *([("packages", versions)] if versions else [])) or None


def command(folder: Path) -> str:
    """Return the command that repeats a run from its config.yaml and writes to another folder."""
    return shlex.join(["fedcommons", "run", "--config", str(folder / "config.yaml"), "--out", f"{folder}-again"])
