"""Run folders as pandas frames: a row a run, or a row a round."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config.flat import effective, flat_dict
from fedcommons.errors import UserError
from fedcommons.tracking.run_folder import STOPPED, is_run, read_clients, read_config, read_run

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

_WHO = ("run", "dataset", "algorithm", "setting", "seed", "alpha", "p", "rho", "sigma", "lr")
"""Who a run is: columns that every frame has."""

_CONVERGENCE = "convergence/"

Say = Callable[[str], None]


def load_runs(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """A row for each run in these folders, each a run folder or one with run folders at any depth.

    Columns: ``run`` (the folder); ``dataset``, ``algorithm``, ``setting``, ``seed``; ``alpha, p, rho, sigma, lr`` that
    took effect (p: the share the clients got; rho: with a generator; sigma: with DP-SGD); every field of what was
    chosen by its dotted name (``client.epochs``); ``status``: finished, stopped (by a scheduler), failed or unfinished;
    every scalar of the summary; ``MB``: 10^6 bytes over all clients, both ways; ``epsilon``: of all messages, where one
    can be stated, and ``epsilon_local_training``; every metric of the last round by its name, the convergence
    parameters without their prefix (``zeta_hat_sq``), and their means over the rounds that have them
    (``zeta_hat_sq_mean``). What a run does not have is missing. ``say`` is told which run folders cannot be read, and
    why; they are left out.

    Raises:
        UserError: one of the folders does not exist or holds no run.
    """
    import pandas as pd

    return pd.DataFrame([_row(run) for run in _read(folders, say)])


def load_rounds(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """A row for each round of each run: whose it is (``run``, ``algorithm``, ``alpha``, ...), ``round``, its metrics.

    Round 0 is the untrained model. Names, ``say`` and errors: as in ``load_runs``.
    """
    import pandas as pd

    rows = []
    for run in _read(folders, say):
        whose = {name: value for name, value in _facts(run).items() if name in _WHO}
        rows += [{**whose, **{_short(name): value for name, value in line.items()}} for line in run.lines]
    return pd.DataFrame(rows)


def load_clients(*folders: str | Path, say: Say = print) -> "pd.DataFrame":
    """A row a client and round, of runs with ``measure.clients``: whose it is, ``round``, ``client``, its metrics.

    ``n``: how many images the client holds; ``accuracy``, ``loss``: of the server model on them. Names, ``say`` and
    errors: as in ``load_runs``.
    """
    import pandas as pd

    rows = []
    for run in _read(folders, say):
        whose = {name: value for name, value in _facts(run).items() if name in _WHO}
        for line in read_clients(run.folder):
            metrics = {name: values for name, values in line.items() if name != "round"}
            of_clients = zip(*metrics.values(), strict=True)
            rows += [
                {**whose, "round": line["round"], "client": i, **dict(zip(metrics, values, strict=True))}
                for i, values in enumerate(of_clients)
            ]
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Run:
    folder: Path
    config: Mapping[str, Any]  # flat
    lines: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]  # empty where the run is not finished


def _read(folders: Collection[str | Path], say: Say) -> Iterator[_Run]:
    """The runs of these folders, each once, in the order of their names."""
    seen = set()
    for folder in map(Path, folders):
        found = list(_runs_below(folder))
        if not found:
            raise UserError(f"{folder} {'holds no run' if folder.is_dir() else 'is not a folder'}.")
        for path in found:
            if (real := path.resolve()) in seen:
                continue
            seen.add(real)
            try:
                yield _run(path)
            except UserError as error:
                say(f"left out: {error}")


def _runs_below(folder: Path) -> Iterator[Path]:
    for path, inner, _ in os.walk(folder):
        inner.sort()
        if is_run(Path(path)):
            inner.clear()
            yield Path(path)


def _run(folder: Path) -> _Run:
    """What a run folder holds.

    Raises:
        UserError: it is damaged, or of another version.
    """
    summary, lines = read_run(folder)
    if not lines:
        raise UserError(f"{folder} has no round yet.")
    if summary and not isinstance(summary.get("config"), dict):
        raise UserError(f"{folder} is of an earlier version: its summary.json does not have the config.")
    config = summary["config"] if summary else flat_dict(read_config(folder))
    return _Run(folder, {n: tuple(v) if isinstance(v, list) else v for n, v in config.items()}, lines, summary or {})


def _facts(run: _Run) -> dict[str, Any]:
    """Who a run is."""
    c = run.config
    return {
        "run": str(run.folder), "dataset": c["data.name"], "algorithm": c["algorithm"], "setting": c["sharing.setting"],
        "seed": c["seed"], **effective(c, run.summary.get("p", c.get("sharing.p"))),
    }  # fmt: skip


def _row(run: _Run) -> dict[str, Any]:
    scalars = {n: v for n, v in run.summary.items() if isinstance(v, int | float | str)}
    row = {**_facts(run), "status": _status(run), **run.config, **scalars, **_course(run)}
    measured: dict[str, list[float]] = {}
    for line in run.lines:
        for name, value in line.items():
            if value is not None and name != "round" and not isinstance(value, list):
                measured.setdefault(name, []).append(value)
    row |= {_short(name): values[-1] for name, values in measured.items()}
    row |= {f"{_short(n)}_mean": fmean(values) for n, values in measured.items() if _short(n) != n}
    row["MB"] = run.lines[-1].get("comm/total_bytes", float("nan")) / 1e6
    spent = {
        "epsilon": run.summary.get("privacy", {}).get("epsilon_of_messages"),
        "epsilon_local_training": run.lines[-1].get("privacy/epsilon_local_training"),
    }
    return row | {name: value for name, value in spent.items() if value is not None}


def _course(run: _Run) -> dict[str, Any]:
    """What the rounds that are there say; of a finished run the same as its summary."""
    after = [(line["round"], line["test/accuracy"]) for line in run.lines if line["round"] >= 1]
    reached = [number for number, accuracy in after if accuracy >= run.config["target"]]
    accuracies = [accuracy for _, accuracy in after]
    return {
        "rounds": len(after),
        "rounds_to_target": reached[0] if reached else None,
        "last_accuracy": accuracies[-1] if after else None,
        "best_accuracy": max(accuracies, default=None),
        "validation_accuracy": run.lines[-1].get("validation/accuracy"),
    }


def _status(run: _Run) -> str:
    if run.summary:
        return "finished"
    if (run.folder / STOPPED).exists():
        return "stopped"
    return "failed" if (run.folder / "error.txt").exists() else "unfinished"


def _short(name: str) -> str:
    return name if name == f"{_CONVERGENCE}bytes" else name.removeprefix(_CONVERGENCE)
