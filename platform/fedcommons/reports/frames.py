"""Load run folders as pandas frames: one row per run, per round, or per client and round."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.config.dotted import effective, recorded
from fedcommons.core.rejections import rejection_summary
from fedcommons.errors import UserError, clean, quote
from fedcommons.privacy.mechanisms import columns
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.storage import safe_read
from fedcommons.tracking.record_schema import flaw_of_config, flaw_of_line, flaw_of_summary, last_of
from fedcommons.tracking.run_folder import (
    STOPPED,
    accuracies,
    is_run,
    read_clients,
    read_config,
    read_run,
    read_summary,
)

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

_WHO = ("run", "dataset", "algorithm", "setting", "seed", "alpha", "p", "rho", "sigma", "lr")
"""Columns that identify a run; the frames by round and by client have them too."""

_CONVERGENCE = "convergence/"

_FIELDS = (
    "data.name",
    "algorithm",
    "sharing.setting",
    "seed",
    "target",
    "client.lr",
    "dp.local",
)
_SIGMA = ("dp.noise_multiplier",)
_NUMBERS = ("p", "n_clients", "participation", "learning_rate", "bytes_down", "bytes_up", "bytes_once")
"""``_FIELDS``: fields that the config in a summary must have. ``_SIGMA``: a field that it must have unless a target
epsilon decides the noise. ``_NUMBERS``: numbers that the summary must have."""

_CENTRAL = {
    "data.name": "dataset", "partition.n_clients": "n_clients", "federation.participation": "participation",
    "partition.alpha": "alpha", "sharing.setting": "setting", "lr": "learning_rate",
}  # fmt: skip
"""Names of columns of ``load_runs``, each with the name of its value in the summary of a central model."""

Say = Callable[[str], None]


def load_runs(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """Return a frame with one row per run in the folders.

    A value that a run does not have is missing (nan) in its row. The columns are:

    - ``run``: the run's folder. ``status``: finished, stopped (by a scheduler), failed or unfinished.
    - ``dataset``, ``algorithm``, ``setting``, ``seed``, and every field of the run's config by its dotted name.
    - The values that took effect. ``alpha``: Dirichlet concentration. ``p``: share of received examples in the clients'
      training data. ``rho``: share of images that generators see. ``sigma``: noise multiplier of DP-SGD. ``lr``:
      learning rate. rho is missing without a generator, sigma without DP-SGD.
    - Every number and text of the summary. ``rejections``: a sentence if the server rejected replies.
    - ``MB``: exchanged data in 10^6 bytes, over all clients and both directions. ``epsilon``: epsilon of all messages.
      ``pool_epsilon``: largest epsilon of the shared data over clients. ``epsilon_local_training``: epsilon of model
      updates. With seeded noise these three columns are missing, and ``epsilon_if_secret`` etc. have the values if the
      noise were secret. ``commons``: ``nothing`` (no shared data), ``covered`` (protected) or ``uncovered``.
    - For protected model updates: minimum and maximum over clients of the noise multiplier (``sigma_min``,
      ``sigma_max``), the sampling rate (``q_min``, ``q_max``) and the number of steps (``steps_min``, ``steps_max``),
      and ``clip`` and ``accountant``. With the prefix ``pool_``: the same values of the shared data.
    - Every metric, from the last round that has this metric. Convergence parameters have no prefix
      (``zeta_hat_sq``); ``zeta_hat_sq_mean`` is the mean over the rounds that have the parameter.

    Args:
        folders: run folders, or folders with run folders at any depth.
        say: called with a message on each run that cannot be read, with the reason. The run is left out.

    Raises:
        UserError: one of the folders does not exist or holds no run.
    """
    import pandas as pd

    return pd.DataFrame([row(run) for run in read(folders, say)])


def load_rounds(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """Return a frame with one row per run and round: columns that identify the run, ``round``, and the metrics.

    Round 0 is the untrained model. Column names are as in ``load_runs``.

    Args:
        folders: run folders, or folders with run folders at any depth.
        say: called with a message on each run that cannot be read, with the reason. The run is left out.

    Raises:
        UserError: one of the folders does not exist or holds no run.
    """
    import pandas as pd

    rows = []
    for run in read(folders, say):
        whose = {name: value for name, value in _facts(run).items() if name in _WHO}
        rows += [_first(whose, {_short(name): value for name, value in line.items()}) for line in run.lines]
    return pd.DataFrame(rows)


def load_clients(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """Return a frame with one row per client and round, for runs with ``evaluate.clients`` or ``measure.clients``.

    The columns identify the run, the ``round`` and the ``client``. Further columns are the client's metrics:
    ``n``: number of the client's test examples; ``accuracy``, ``loss``: the server model on these examples;
    ``personal/accuracy``, ``personal/loss``: the client's personal model, if the method has personal models.
    If clients have no test examples, their training examples are used, and the columns are named ``train_accuracy``,
    ``personal/train_accuracy``. With ``measure.clients`` all metrics are computed on training examples, and the columns
    are named ``accuracy``, ``loss``. Column names are as in ``load_runs``.

    Args:
        folders: run folders, or folders with run folders at any depth.
        say: called with a message on each run that cannot be read, with the reason. The run is left out.

    Raises:
        UserError: one of the folders does not exist or holds no run.
    """
    import pandas as pd

    rows = []
    for run in read(folders, say):
        whose = {name: value for name, value in _facts(run).items() if name in _WHO}
        try:
            lines = _of_clients(run.folder)
        except UserError as error:
            say(f"left out: {error}")
            continue
        for line in lines:
            metrics = {name: values for name, values in line.items() if name != "round"}
            of_clients = zip(*metrics.values(), strict=True)
            rows += [
                _first(whose, {"round": line["round"], "client": i}, dict(zip(metrics, values, strict=True)))
                for i, values in enumerate(of_clients)
            ]
    return pd.DataFrame(rows)


def load_central(*folders: Path) -> "pd.DataFrame":
    """Return a frame with one row per centrally trained model: its summary, partly also named as in ``load_runs``."""
    import pandas as pd

    rows = []
    for folder in folders:
        summary = read_summary(folder)
        if summary and all(summary_name in summary for summary_name in _CENTRAL.values()):
            scalars = {n: v for n, v in summary.items() if not isinstance(v, list | dict)}
            rows.append(
                {"run": str(folder), **scalars, **{n: summary[summary_name] for n, summary_name in _CENTRAL.items()}}
            )
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Recorded:
    """The content of a run folder: config, metrics of each round, and summary."""

    folder: Path
    config: Mapping[str, Any]  # values of the fields by dotted name, such as client.lr
    lines: Sequence[Mapping[str, Any]]  # metrics of each round, from round 0
    summary: Mapping[str, Any]  # empty if the run is not finished


def folder_path(folder: object) -> Path:
    """Check the type of a folder argument and return it as a path.

    Raises:
        UserError: ``folder`` is neither a string nor a path.
    """
    if not isinstance(folder, str | Path):
        raise UserError(f"a folder is a str or a Path, got {quote(folder)}.")
    return Path(folder)


def read(folders: Collection[str | Path], say: Say) -> Iterator[Recorded]:
    """Yield the content of each run in these folders once. ``say`` and errors are as in ``load_runs``."""
    seen = set()
    for folder in map(folder_path, folders):
        paths = list(runs_below(folder))
        if not paths:
            raise UserError(f"{folder} {'holds no run' if folder.is_dir() else 'is not a folder'}.")
        for path in paths:
            if (real := path.resolve()) in seen:
                continue
            seen.add(real)
            try:
                if clean(str(path)) != str(path):
                    raise UserError(f"{path} has control characters in its name.")
                yield _run(path)
            except UserError as error:
                say(f"left out: {error}")


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield ``folder`` if it is a run folder, otherwise all run folders below it, in the order of their names."""
    for path, inner, _ in os.walk(folder):
        inner.sort()
        if is_run(Path(path)):
            inner.clear()
            yield Path(path)


def _run(folder: Path) -> Recorded:
    """Read a run folder and check its files.

    Raises:
        UserError: the folder is damaged, or another version of fedcommons wrote it.
    """
    summary, rounds = read_run(folder)
    if summary is None and rounds and (flaw := _flaw_of_end(folder, len(rounds) - 1)):
        raise UserError(f"{folder} is damaged: {flaw}.")
    lines = _named(folder / "rounds.jsonl", rounds)
    if not lines:
        raise UserError(f"{folder} has no round yet.")
    if summary and not isinstance(summary.get("config"), dict):
        raise UserError(f"{folder} was written by an earlier version of fedcommons: its summary.json has no config.")
    if summary:
        _check(folder, summary)
    config = summary["config"] if summary else read_config(folder).flat
    if flaw := flaw_of_config(config):
        raise UserError(f"{folder} is damaged: {flaw}.")
    plain = {n: tuple(v) if isinstance(v, list) else v for n, v in recorded(config).items()}
    return Recorded(folder, plain, lines, summary or {})


def _flaw_of_end(folder: Path, rounds: int) -> str | None:
    """Return why the summary of an ended run is unusable, or None if the run has no summary or a usable one.

    rounds: number of rounds in rounds.jsonl; a continued run may have more rounds than the summary states.
    """
    if not (folder / "summary.json").exists():
        return None
    try:
        summary = safe_read.json_of(folder / "summary.json")
    except ValueError:
        return "its summary.json cannot be read"
    if not isinstance(summary, dict) or not isinstance(summary.get("rounds"), int):
        return "its summary.json does not have the number of rounds"
    return "its rounds.jsonl has fewer rounds than its summary" if rounds < summary["rounds"] else None


def _named(file: Path, lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Check the lines of rounds.jsonl, and return them without control characters in the names of metrics.

    Raises:
        UserError: a line has a value that is not allowed in this file.
    """
    if flaw := next((line_flaw for line in lines if (line_flaw := flaw_of_line(line, is_of_clients=False))), None):
        raise UserError(f"{file} is damaged: {flaw}.")
    return [safe_read.cleaned(line) for line in lines] if _has_odd_names(lines) else lines


def _has_odd_names(lines: Sequence[Mapping[str, Any]]) -> bool:
    return any(clean(name) != name for name in {name for line in lines for name in line})


def _of_clients(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Read clients.jsonl; each line has the metrics of a round, each as a list with one value per client.

    Raises:
        UserError: a line cannot be read, or has a value that is not allowed in this file.
    """
    lines = read_clients(folder)
    if flaw := next((line_flaw for line in lines if (line_flaw := flaw_of_line(line, is_of_clients=True))), None):
        raise UserError(f"{folder / 'clients.jsonl'} is damaged: {flaw}.")
    return [safe_read.cleaned(line) for line in lines] if _has_odd_names(lines) else lines


def _first(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings; the first mapping with a name wins, so that no metric replaces a column that identifies a run."""
    return {
        name: next(part[name] for part in parts if name in part) for name in dict.fromkeys(n for p in parts for n in p)
    }


def _check(folder: Path, summary: Mapping[str, Any]) -> None:
    """Check that a summary has valid numbers and fields, which tables use.

    Raises:
        UserError: the summary is damaged or was edited.
    """
    if flaw := flaw_of_summary(summary):
        raise UserError(f"{folder / 'summary.json'} is damaged: {flaw}.")
    most = sys.float_info.max
    for name in _NUMBERS:
        value = summary.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise UserError(f"{folder / 'summary.json'} is damaged: {name} is {quote(value)}.")
    if not isinstance(summary.get("partition"), str):
        raise UserError(f"{folder / 'summary.json'} is damaged: it has no partition.")
    needed = (*_FIELDS, *recorded({**dict.fromkeys(_SIGMA), **summary["config"]}))
    if missing_fields := [name for name in needed if name not in summary["config"]]:
        raise UserError(f"{folder / 'summary.json'} is damaged: its config has no {missing_fields[0]}.")


def _facts(run: Recorded) -> dict[str, Any]:
    """Return the columns ``_WHO``, which identify a run, with their values."""
    c = run.config
    return {
        "run": str(run.folder), "dataset": c["data.name"], "algorithm": c["algorithm"], "setting": c["sharing.setting"],
        "seed": c["seed"], **effective(c, run.summary.get("p", c.get("sharing.p"))),
    }  # fmt: skip


def row(run: Recorded) -> dict[str, Any]:
    """Return the run's row in the frame of ``load_runs``, as column name -> value."""
    scalars = {n: v for n, v in run.summary.items() if isinstance(v, int | float | str)}
    course = _course(run)
    columns_of_run = _first(_facts(run), {"status": _status(run)}, run.config, {**scalars, **course})
    measured: dict[str, list[float]] = {}
    for line in run.lines:
        for name, value in line.items():
            if value is not None and name != "round" and not isinstance(value, list):
                measured.setdefault(name, []).append(value)
    for name, value in run.lines[-1].items():
        if value is None and name.startswith("privacy/"):  # an earlier round's epsilon does not hold for the run
            measured.pop(name, None)
    columns_of_run = _first(columns_of_run, {_short(name): values[-1] for name, values in measured.items()})
    columns_of_run |= {f"{_short(n)}_mean": fmean(values) for n, values in measured.items() if _short(n) != n}
    columns_of_run["MB"] = run.lines[-1].get("comm/total_bytes", float("nan")) / 1e6
    if rejected := run.summary.get("rejected"):
        columns_of_run["rejections"] = rejection_summary(rejected)
    return columns_of_run | _spent(run)


def _spent(run: Recorded) -> dict[str, Any]:
    """Return the privacy columns of a run's row: epsilons and mechanisms.

    Earlier versions of fedcommons did not record whether the noise was seeded or secret; it was always seeded.
    """
    privacy, last = run.summary.get("privacy", {}), run.lines[-1]
    old = IF_SECRET if privacy and "noise" not in privacy else ""
    epsilons = {"commons": privacy.get("commons")}
    for end in ("", IF_SECRET):
        epsilons[f"epsilon{end or old}"] = privacy.get(f"epsilon_of_messages{end}")
        epsilons[f"pool_epsilon{end or old}"] = privacy.get(f"pool_epsilon_max{end}")
        epsilons[f"epsilon_local_training{end or old}"] = last.get(f"privacy/epsilon_local_training{end}")
        if old:
            break
    return columns(privacy.get("mechanisms", {})) | {
        name: value for name, value in epsilons.items() if value is not None
    }


def _course(run: Recorded) -> dict[str, Any]:
    """Return rounds and accuracies computed from rounds.jsonl; for a finished run they equal the summary."""
    after = accuracies(run.lines)
    return {
        "rounds": sum(line["round"] >= 1 for line in run.lines),
        "rounds_to_target": target.first(run.config["target"], run.lines),
        "last_accuracy": after[-1][1] if after else None,
        "best_accuracy": max((accuracy for _, accuracy in after), default=None),
        "validation_accuracy": last_of(run.lines, "validation/accuracy"),
    }


def _status(run: Recorded) -> str:
    if run.summary:
        return "finished"
    if (run.folder / STOPPED).exists():
        return "stopped"
    return "failed" if (run.folder / "error.txt").exists() else "unfinished"


def _short(name: str) -> str:
    return name if name == f"{_CONVERGENCE}bytes" else name.removeprefix(_CONVERGENCE)
