"""Load run folders as pandas frames: one row per run, per round, or per client and round."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.config.dotted import common_fields, effective, recorded
from fedcommons.core.rejections import rejection_summary
from fedcommons.errors import UserError, clean, quote
from fedcommons.privacy.mechanisms import columns
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.storage import safe_read
from fedcommons.tracking import run_folder
from fedcommons.tracking.record_schema import flaw_of_config, flaw_of_line, flaw_of_summary, last_of

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

_FIELDS = ("data.name", "algorithm", "sharing.setting", "seed", "target", "client.lr", "dp.local")
_NUMBERS = ("p", "n_clients", "participation", "learning_rate", "bytes_down", "bytes_up", "bytes_once")
"""``_FIELDS``: fields that the config in a summary must have. ``_NUMBERS``: numbers that the summary must have."""

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
      ``pool_epsilon``: largest epsilon of the shared data over clients. ``user_epsilon``: epsilon of user-level DP
      (``dp.central``). ``epsilon_local_training``: epsilon of model updates. With seeded noise these four columns are
      missing, and ``epsilon_if_secret`` etc. have the values if the noise were secret. ``commons``: ``nothing`` (no
      shared data), ``covered`` (protected) or ``uncovered``.
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

    Round 0 is the untrained model. With ``evaluate.every`` k, test metrics are missing (nan) in the rounds between two
    evaluations: only every k-th round and the last one are evaluated, so ``frame.dropna(subset="test/accuracy")`` has
    the evaluated rounds. Column names, ``folders``, ``say`` and errors are as in ``load_runs``.
    """
    import pandas as pd

    rows = []
    for run in read(folders, say):
        whose = _facts(run)
        rows += [_first(whose, {_short(name): value for name, value in line.items()}) for line in run.lines]
    return pd.DataFrame(rows)


def load_clients(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """Return a frame with one row per client and round, for runs with ``evaluate.clients`` or ``measure.clients``.

    The columns identify the run, the ``round`` and the ``client``. Further columns are the client's metrics:
    ``n``: number of the client's test examples; ``accuracy``, ``loss``: the server model on these examples;
    ``personal/accuracy``, ``personal/loss``: the client's personal model, if the method has personal models.
    If clients have no test examples, their training examples are used, and the columns are named ``train_accuracy``,
    ``personal/train_accuracy``. With ``measure.clients`` all metrics are computed on training examples, and the columns
    are named ``accuracy``, ``loss``. Column names, ``folders``, ``say`` and errors are as in ``load_runs``.
    """
    import pandas as pd

    rows = []
    for run in read(folders, say):
        try:
            lines = _checked(run.folder / "clients.jsonl", run_folder.read_clients(run.folder), is_of_clients=True)
        except UserError as error:
            say(f"left out: {error}")
            continue
        whose = _facts(run)
        for line in lines:
            metrics = {name: values for name, values in line.items() if name != "round"}
            for i, values in enumerate(zip(*metrics.values(), strict=True)):
                of_client = dict(zip(metrics, values, strict=True))
                rows.append(_first(whose, {"round": line["round"], "client": i}, of_client))
    return pd.DataFrame(rows)


def load_central(*folders: Path) -> "pd.DataFrame":
    """Return a frame with one row per centrally trained model: its summary, and the columns ``_CENTRAL``."""
    import pandas as pd

    rows = []
    for folder in folders:
        summary = run_folder.read_summary(folder)
        if summary and all(name in summary for name in _CENTRAL.values()):
            scalars = {n: v for n, v in summary.items() if not isinstance(v, list | dict)}
            rows.append({"run": str(folder), **scalars, **{n: summary[field] for n, field in _CENTRAL.items()}})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Recorded:
    """The content of a run folder."""

    folder: Path
    config: Mapping[str, Any]  # values of the fields by dotted name, such as client.lr
    lines: Sequence[Mapping[str, Any]]  # metrics of each round, from round 0
    summary: Mapping[str, Any]  # empty if the run is not finished


def folder_path(folder: object) -> Path:
    """Return a folder argument as a path; a UserError is raised if it is neither a string nor a path."""
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
        if run_folder.is_run(Path(path)):
            inner.clear()
            yield Path(path)


def _run(folder: Path) -> Recorded:
    """Read a run folder and check its files; a damaged folder, or one of another version, is a UserError."""
    summary, rounds = run_folder.read_run(folder)
    if summary is None and rounds and (flaw := _flaw_of_end(folder, len(rounds) - 1)):
        raise UserError(f"{folder} is damaged: {flaw}.")
    lines = _checked(folder / "rounds.jsonl", rounds, is_of_clients=False)
    if not lines:
        raise UserError(f"{folder} has no round yet.")
    if summary and not isinstance(summary.get("config"), dict):
        raise UserError(f"{folder} was written by an earlier version of fedcommons: its summary.json has no config.")
    if summary:
        _check(folder / "summary.json", summary)
    config = summary["config"] if summary else run_folder.read_config(folder).flat
    if flaw := flaw_of_config(config):
        raise UserError(f"{folder} is damaged: {flaw}.")
    plain = {n: tuple(v) if isinstance(v, list) else v for n, v in recorded(config).items()}
    # Runs of earlier versions had the default of each newer field of the data, so reports compare them with new runs.
    younger = {n: field.default for n, field in common_fields().items() if n.startswith("data.")}
    return Recorded(folder, _first(plain, younger), lines, summary or {})


def _flaw_of_end(folder: Path, rounds: int) -> str | None:
    """Return why the summary of a run with this number of ``rounds`` is unusable; None: it is usable or missing."""
    if not (folder / "summary.json").exists():
        return None
    try:
        summary = safe_read.json_of(folder / "summary.json")
    except ValueError:
        return "its summary.json cannot be read"
    if not isinstance(summary, dict) or not isinstance(summary.get("rounds"), int):
        return "its summary.json does not have the number of rounds"
    return "its rounds.jsonl has fewer rounds than its summary" if rounds < summary["rounds"] else None


def _checked(file: Path, lines: Sequence[Mapping[str, Any]], is_of_clients: bool) -> Sequence[Mapping[str, Any]]:
    """Return the lines of a file without control characters in the names of metrics; a wrong value is a UserError."""
    if flaw := next((damage for line in lines if (damage := flaw_of_line(line, is_of_clients))), None):
        raise UserError(f"{file} is damaged: {flaw}.")
    has_odd_names = any(clean(name) != name for name in {name for line in lines for name in line})
    return [safe_read.cleaned(line) for line in lines] if has_odd_names else lines


def _first(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings; the first mapping with a name wins, so that no metric replaces a column that identifies a run."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: next(part[name] for part in parts if name in part) for name in names}


def _check(file: Path, summary: Mapping[str, Any]) -> None:
    """Check that a summary has the fields and numbers that tables use; a damaged or edited summary is a UserError."""
    if flaw := flaw_of_summary(summary):
        raise UserError(f"{file} is damaged: {flaw}.")
    for name in _NUMBERS:
        value = summary.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
            raise UserError(f"{file} is damaged: {name} is {quote(value)}.")
    if not isinstance(summary.get("partition"), str):
        raise UserError(f"{file} is damaged: it has no partition.")
    # ``recorded`` leaves the noise multiplier out if a target epsilon decides the noise.
    needed = (*_FIELDS, *recorded({"dp.noise_multiplier": None, **summary["config"]}))
    if missing := [name for name in needed if name not in summary["config"]]:
        raise UserError(f"{file} is damaged: its config has no {missing[0]}.")


def _facts(run: Recorded) -> dict[str, Any]:
    """Return the columns that identify a run, which the frames by round and by client have too."""
    c = run.config
    return {
        "run": str(run.folder), "dataset": c["data.name"], "algorithm": c["algorithm"], "setting": c["sharing.setting"],
        "seed": c["seed"], **effective(c, run.summary.get("p", c.get("sharing.p"))),
    }  # fmt: skip


def row(run: Recorded) -> dict[str, Any]:
    """Return the run's row in the frame of ``load_runs``, as column name -> value."""
    scalars = {n: v for n, v in run.summary.items() if isinstance(v, int | float | str)}
    columns_of_run = _first(_facts(run), {"status": _status(run)}, run.config, {**scalars, **_course(run)})
    measured: dict[str, list[float]] = {}
    for line in run.lines:
        for name, value in line.items():
            if value is not None and name != "round" and not isinstance(value, list | str):
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
    """Return the privacy columns of a run's row: epsilons and mechanisms."""
    privacy, last = run.summary.get("privacy", {}), run.lines[-1]
    # Earlier versions of fedcommons did not record whether the noise was seeded or secret; it was always seeded.
    ends = {"": IF_SECRET} if privacy and "noise" not in privacy else {"": "", IF_SECRET: IF_SECRET}
    epsilons = {"commons": privacy.get("commons")}
    for end, suffix in ends.items():
        epsilons[f"epsilon{suffix}"] = privacy.get(f"epsilon_of_messages{end}")
        epsilons[f"pool_epsilon{suffix}"] = privacy.get(f"pool_epsilon_max{end}")
        epsilons[f"user_epsilon{suffix}"] = privacy.get("user_level", {}).get(f"epsilon{end}")
        epsilons[f"epsilon_local_training{suffix}"] = last.get(f"privacy/epsilon_local_training{end}")
    return columns(privacy.get("mechanisms", {})) | {n: value for n, value in epsilons.items() if value is not None}


def _course(run: Recorded) -> dict[str, Any]:
    """Return rounds and accuracies computed from rounds.jsonl; for a finished run they equal the summary."""
    after = [accuracy for _, accuracy in run_folder.accuracies(run.lines)]
    return {
        "rounds": sum(line["round"] >= 1 for line in run.lines),
        "rounds_to_target": target.first(run.config["target"], run.lines),
        "last_accuracy": after[-1] if after else None, "best_accuracy": max(after, default=None),
        "validation_accuracy": last_of(run.lines, "validation/accuracy"),
    }  # fmt: skip


def _status(run: Recorded) -> str:
    if run.summary:
        return "finished"
    if (run.folder / run_folder.STOPPED).exists():
        return "stopped"
    return "failed" if (run.folder / "error.txt").exists() else "unfinished"


def _short(name: str) -> str:
    return name if name == "convergence/bytes" else name.removeprefix("convergence/")
