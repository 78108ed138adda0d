"""Send recorded runs from their folders to W&B or another tracker, on any machine.

fedcommons wandb runs/table1 --project P
fedcommons track runs/mine --tracker mlflow

The tracker gets the same calls as during the run. The file ``tracked.json`` in a run folder lists what was sent, so a
second call sends only runs that are new or have new rounds.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import registry
from fedcommons.config.dotted import is_ignored, values_of
from fedcommons.config.validate import require_tracker
from fedcommons.errors import ClientError, UserError, quote, sentence, unknown
from fedcommons.reports.frames import load_runs, runs_below
from fedcommons.storage import file_lock, safe_read
from fedcommons.storage.atomic_files import write_json
from fedcommons.tracking.run_folder import read_config, read_summary, stranger
from fedcommons.tracking.tracker import Tracker, build_tracker, finite, numbers, replayed
from fedcommons.tracking.wandb_tracker import (
    NAME_AT_WANDB,
    NAMES_OF_ONE_RUN,
    WandbTracker,
    describe,
    log_table,
    logged_in,
    recorded_id,
)

FILE = "tracked.json"
"""File of a run folder: destination -> [number of rounds sent, whether the run had ended]."""


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="fedcommons wandb RUNS [RUNS ...] [options]")
    parser.add_options((
        ("tracker", str, "wandb", "tracker: wandb, mlflow, tensorboard, trackio, csv, or an import path"),
        ("project", str | None, None, "project at the tracker; null: tracking.project of each run"),
        ("entity", str | None, None, "user or team at W&B; null: WANDB_ENTITY, or your default at W&B"),
        ("model", bool, False, "also upload each run's last model to W&B, as an artifact"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    options.folders = parse.run_folders(options, "RUNS", "fedcommons wandb RUNS [RUNS ...] --project P")
    names = ("wandb", *registry.choices("tracker"))
    if options.tracker not in names and not registry.is_user_defined(options.tracker):
        raise unknown("tracker", options.tracker, names)
    if options.tracker != "wandb":
        require_tracker(options.tracker)
    for name in ("project", "entity"):
        if options[name] is not None and not re.fullmatch(NAME_AT_WANDB, options[name].strip()):
            raise UserError(
                f"--{name} is a name of 1 to 128 characters without / \\ # ? % :, got {quote(options[name])}."
            )
    if options.entity and options.tracker != "wandb":
        raise UserError(f"--entity is for W&B, and --tracker is {quote(options.tracker)}.")
    return options


def track(argv: Sequence[str]) -> int:
    """Send recorded runs to W&B or another tracker, from their folders.

    If sending a run fails, the command ends, and the next call continues with that run.
    """
    options = arguments(argv)
    for name in NAMES_OF_ONE_RUN:
        os.environ.pop(name, None)
    runs = _runs(options.folders)
    mode = "offline" if os.environ.get("WANDB_MODE") == "offline" else "online"
    if options.tracker == "wandb" and mode == "online" and not logged_in():
        raise UserError("W&B has no login on this machine: set WANDB_API_KEY or run `wandb login`.")
    sent, sweeps = 0, [folder for folder in options.folders if folder not in runs and options.tracker == "wandb"]
    for folder in (*runs, *sweeps):
        try:
            if folder in runs:
                with file_lock.open_lock(folder, stranger, "run folder"):  # no process runs or sends it now
                    sent += _send(folder, options, mode)
            elif sent:
                _send_table(folder, options, mode)
        except Exception as error:  # each tracker's package has errors of its own
            raise ClientError(
                f"sending {folder} to {options.tracker} failed ({sentence(error).rstrip('.')}); {sent} of {len(runs)} "
                "runs were sent, and the same command sends the remaining runs."
            ) from error
    is_offline = options.tracker == "wandb" and mode == "offline"
    what = "written for `wandb sync`" if is_offline else f"sent to {options.tracker}"
    print(f"{sent} of {len(runs)} runs {what}; {len(runs) - sent} had no new rounds.")
    return 0


def _runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders in ``folders``, each once.

    Raises:
        UserError: a folder has no run, a run cannot be read, or two folders hold one W&B run.
    """
    runs: dict[Path, Path] = {}
    for folder in folders:
        if not (inner := list(runs_below(folder))):
            raise UserError(f"{folder} {'holds no run' if folder.is_dir() else 'is not a folder'}.")
        runs |= {path.resolve(): path for path in inner}
    ids: dict[str, Path] = {}
    for path in runs.values():
        read_config(path)
        if (run_id := recorded_id(path)) and ids.setdefault(run_id, path) != path:
            raise UserError(
                f"{ids[run_id]} and {path} are the same W&B run (wandb-id.txt has {run_id} in both): name one folder."
            )
    return list(runs.values())


def _send(folder: Path, options: parse.Options, mode: str) -> bool:
    """Send one run, and record in ``FILE`` that it was sent; return False if there is nothing new to send."""
    config, summary, rounds = read_config(folder), read_summary(folder), list(replayed(folder))
    fields = dict(values_of(config))
    p = summary["p"] if summary else fields.get("sharing.p") or 0.0
    described = describe(config, p) | {"system": False, "model": options.model} | _place(options)
    owner = described["entity"] if options.tracker == "wandb" else None
    place = " ".join(filter(None, (options.tracker, owner, described["project"])))
    state, sent = [len(rounds), summary is not None], _marks(folder)
    if not rounds or sent.get(place) == state:
        return False
    tracker: Tracker
    if is_wandb := options.tracker == "wandb":
        tracker = WandbTracker(folder, described, mode, print, is_required=True)
    else:
        tracker = build_tracker(options.tracker, {}, folder, {**fields, "tracking.project": described["project"]})
    for number, metrics in rounds:
        tracker.log(number, numbers(metrics) if is_wandb else finite(metrics))
    tracker.finish(summary)
    if not is_wandb or mode == "online":
        write_json(folder / FILE, {**sent, place: state})
    return True


def _place(options: parse.Options) -> dict[str, str]:
    """Return the entity and the project that the user named as options."""
    return {name: options[name].strip() for name in ("entity", "project") if options[name]}


def _marks(folder: Path) -> dict[str, Any]:
    try:
        marks = safe_read.json_of(folder / FILE)
    except ValueError:
        return {}
    return marks if isinstance(marks, dict) else {}


def _send_table(folder: Path, options: parse.Options, mode: str) -> None:
    """Send the table of a sweep, one row per run, as a W&B run with the name of the sweep's folder."""
    frame = load_runs(folder)
    frame["run"] = [Path(run).name for run in frame["run"]]
    frame = frame.loc[:, [name for name in frame if not is_ignored(str(name))]]
    log_table(folder, frame.astype(object).where(frame.notna(), None), _place(options), mode)
