"""Follow a sweep from its folder, in any terminal and on any host that shares the folder; stop it on its host.

fedcommons status runs/table1
fedcommons logs runs/table1 --follow
fedcommons stop runs/table1
fedcommons logs runs/table1 RUN

``status`` counts the runs that are done, running, failed, stopped or waiting, and estimates the time left. ``logs``
shows the last messages of the sweep or of a run. ``stop`` ends the sweep; its command with --resume continues it.
"""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import duration
from fedcommons.errors import ClientError, UserError, unknown
from fedcommons.storage import file_lock, safe_read
from fedcommons.storage.error_file import read_error
from fedcommons.storage.paths import user_path
from fedcommons.tracking.run_folder import STOPPED, is_run, planned_rounds, read_summary
from fedcommons.tune.sweep_folder import MESSAGES, PLAN, rounds_done

STOP_S = 2 * parse.LAST_S
"""Maximum seconds that ``stop`` waits for the end of the sweep's process."""


def status(argv: Sequence[str]) -> int:
    """Print the states of a sweep's runs, and the time left."""
    folder = _folder(parse.parse(_parser("status FOLDER"), argv))
    plan, is_locked = _plan(folder), file_lock.is_locked(folder)
    states = {name: _state(folder / name, is_locked) for name in _runs(folder, plan)}
    counts = ", ".join(f"{n} {state}" for state, n in sorted(Counter(states.values()).items()))
    remaining = _remaining_s(folder, plan, states) if is_locked else None
    time_left = "" if remaining is None else f"; about {duration(remaining)} left"
    who = "process {} on {}".format(*process) if is_locked and (process := file_lock.holder(folder)) else "no process"
    print(f"{folder}: {who}; {counts or 'no run yet'}{time_left}.")
    for name, state in states.items():
        if state == "failed":
            print(f"failed: {name}: {read_error(folder / name)}")
        elif state in ("running", "stopped"):
            print(f"{state}: {name}: {rounds_done(folder / name)}/{planned_rounds(folder / name)} rounds")
    return 0


def logs(argv: Sequence[str]) -> int:
    """Print the last messages of a sweep or of one of its runs."""
    parser = _parser("logs FOLDER [RUN]")
    parser.add_argument("--follow", action="store_true", help="also print new messages, until Ctrl-C")
    parser.add_argument("--lines", type=Annotated[int, "[1, 1000000]"], default=20, help="number of messages")
    options = parse.parse(parser, argv)
    folder = place = _folder(options, 2)
    if len(options.words) == 2:
        if (run := options.words[1]) not in (runs := _runs(folder, _plan(folder))):
            raise unknown("run", run, runs)
        place = folder / run
    if not os.path.lexists(path := place / MESSAGES) and not options.follow:
        raise UserError(f"{place} has no {MESSAGES}: no sweep has written a message there.")
    with suppress(KeyboardInterrupt):
        subprocess.run(["tail", "-n", str(options.lines), *["-F"][: options.follow], str(path.resolve())], check=False)
    return 0


def stop(argv: Sequence[str]) -> int:
    """End the process of a sweep; its finished rounds are kept."""
    folder = _folder(parse.parse(_parser("stop FOLDER"), argv))
    if not file_lock.is_locked(folder) or (process := file_lock.holder(folder)) is None:
        raise UserError(f"no sweep is running in {folder}.")
    pid, host = process
    if not file_lock.is_holder_here(folder):
        raise UserError(f"process {pid} of this host does not run in {folder}: call `fedcommons stop` on host {host}.")
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"process {pid}, which runs in {folder}, belongs to another user.") from None
    deadline = time.monotonic() + STOP_S
    while file_lock.is_holder_here(folder):
        if time.monotonic() > deadline:
            raise ClientError(f"process {pid} has not ended after {duration(STOP_S)}.")
        time.sleep(0.1)
    print(f"process {pid} has ended; the same command with --resume continues the sweep in {folder}.")
    return 0


def _parser(usage: str) -> parse.Parser:
    return parse.Parser(description=__doc__, usage=f"fedcommons {usage} [options]")


def _folder(options: parse.Options, most: int = 1) -> Path:
    """Return the sweep's or run's folder, the first word of a command with at most ``most`` words.

    Raises:
        UserError: the number of words is wrong, or the folder is not that of a sweep or run.
    """
    if not 1 <= len(options.words) <= most:
        raise UserError("name the folder of a sweep" + (", and at most one run." if most > 1 else "."))
    folder = user_path("FOLDER", options.words[0])
    is_ours = folder.is_dir() and (is_run(folder) or _runs(folder, _plan(folder)) or file_lock.is_locked(folder))
    if not is_ours:
        raise UserError(f"{folder} is not the folder of a sweep or run.")
    return folder


def _plan(folder: Path) -> Mapping[str, Any]:
    """Return the plan of the sweep (see ``sweep_folder.write_plan``), without runs if it cannot be read."""
    try:
        plan = safe_read.json_of(folder / PLAN)
        runs = {str(name): (int(before), int(planned)) for name, (before, planned) in plan["runs"].items()}
        return {"time": float(plan["time"]), "runs": runs}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"time": 0.0, "runs": {}}


def _runs(folder: Path, plan: Mapping[str, Any]) -> list[str]:
    """Return the names of a sweep's runs: those with a folder, and those that wait; ``.`` for a single run."""
    names = (path.parent.name for path in sorted(folder.glob("*/config.yaml")) if is_run(path.parent))
    return ["."] if is_run(folder) else list(dict.fromkeys([*names, *plan["runs"]]))


def _state(run: Path, is_locked: bool) -> str:
    """Return the state of a run. is_locked: the sweep's process runs."""
    if read_summary(run) is not None or (run / STOPPED).exists():
        return "done"
    if (run / "error.txt").exists():
        return "failed"
    return "waiting" if not is_run(run) else "running" if is_locked else "stopped"


def _remaining_s(folder: Path, plan: Mapping[str, Any], states: Mapping[str, str]) -> float | None:
    """Return the estimated seconds left at the pace since the plan was written; None before the first round."""
    done = remaining = 0
    for name, (before, planned) in plan["runs"].items():
        n = planned if states[name] in ("done", "failed") else rounds_done(folder / name)
        done, remaining = done + n - before, remaining + planned - n
    return (time.time() - plan["time"]) / done * remaining if done > 0 else None
