"""The main function of all sweeps: run the trials and report the results, or only estimate the cost (``--dry-run``)."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedcommons.cli import parse
from fedcommons.cli.display import Display, create_display
from fedcommons.cli.values import seconds
from fedcommons.config import presets
from fedcommons.errors import UserError, Warned, sentence
from fedcommons.tune import grid, sweep
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import Limits, Outcome, Todo, Trial
from fedcommons.tune.sweep_folder import MESSAGES

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from fedcommons.tune.dry_run import ExtraJob


def run(
    options: parse.Options,
    stem: str,
    cells: Sequence[Trial],
    report: Callable[[Path, Display], None],
    *,
    play: Callable[[Todo, Path, Display], Outcome] = sweep.run_cells,
    extra: Callable[[], "Sequence[ExtraJob]"] = tuple,
) -> int:
    """Run the unfinished trials in ``--out`` and report on all trials; return the exit code.

    Args:
        stem: the beginning of the names of the result files.
        report: writes the result files into ``--out``, from all run folders, also those of earlier calls.
        play: runs the unfinished trials, and further jobs of the sweep, if it has any.
        extra: returns the further jobs that ``play`` runs, for the dry run.

    Raises:
        UserError: an option is invalid, or a trial cannot be run. Nothing has been run in this case.
    """
    if options.on_cores is not None and not options.dry_run:
        raise UserError("--on-cores changes nothing without --dry-run.")
    budget = options.time_budget and seconds("--time-budget", options.time_budget)
    limits = Limits(options.jobs, time.monotonic() + budget if budget else math.inf)
    out = Path(options.out)
    with create_display(options) as display:
        if options.dry_run:
            dry_run(cells, out, display, options.on_cores, extra, options.get("total"), options.jobs)
            return 0
        mirror = SweepMirror(cells, out, display.say)
        mirror.begin(options.resume)
        remaining = replace(sweep.todo(cells, out, display), limits=limits)
        with sweep.open_sweep(out, options.resume, display.say):
            display.record(out / MESSAGES)
            mirror.claim()
            outcome = play(remaining, out, display)
            report(out, display)
            code = conclude(outcome, options, stem, display)
            mirror.end()
            return code


def write_page(out: Path, stem: str, display: Display, folders: Sequence[Path] | None = None) -> str | None:
    """Write ``report.html`` and return its verdict; after an error, warn. folders: of the runs; default: ``out``.

    Without any folder, a page of an earlier call is removed, because its numbers may belong to other rates.
    """
    try:
        if folders is not None and not folders:
            (out / "report.html").unlink(missing_ok=True)
            return None
        from fedcommons.reports import page  # altair takes a second to import, and a dry run needs none

        return page.write(out / "report.html", folders or [out], f"fedcommons report: {stem}", lambda text: None)
    except Exception as error:  # no error of the report may make hours of runs fail
        display.say(Warned(f"report.html was not written: {sentence(error)}"))
        return None


def dry_run(
    cells: Sequence[Trial], out: Path, display: Display, on_cores: int | None = None,
    extra: Callable[[], "Sequence[ExtraJob]"] = tuple, total: int | None = None, jobs: int | None = None,
) -> None:  # fmt: skip
    """Print which trials would run, and their time, memory and disk space; arguments: see ``dry_run.print_costs``."""
    display.load_libraries()
    from fedcommons.tune.dry_run import print_costs

    print_costs(cells, out, display, on_cores, extra(), total=total, jobs=jobs)


def conclude(outcome: Outcome, options: parse.Options, stem: str, display: Display) -> int:
    """Write ``report.html``, and print its verdict, failures, durations and the folder.

    Returns:
        The exit code, 1 after a failure.
    """
    out, smoke = Path(options.out), grid.is_smoke(options)  # runs of the preset smoke are too small for a verdict
    verdict = write_page(out, stem + f" ({presets.SMOKE})" * smoke, display, options.get("reported"))
    if verdict and not smoke:
        display.say(verdict)
    for name, message in outcome.failures.items():
        display.say(f"failed: {name}: {message}")
    spent = ", ".join(f"{name} {its:.0f} s" for name, its in outcome.seconds.items())
    display.say(f"Time: {options.elapsed():.0f} s ({spent}; {outcome.generators_trained} generators trained).")
    names = f"{stem}.md", f"{stem}.csv", f"{stem}.png", "summary.json"
    files = [*["report.html"][: verdict is not None], *(name for name in names if (out / name).is_file())]
    if files:
        display.say(f"All in {out}: {', '.join(files)}, and a folder for each run.")
    return 1 if outcome.failures else 0
