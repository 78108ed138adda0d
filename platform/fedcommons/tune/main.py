"""The main of every sweep of runs: with ``--dry-run`` what it would cost, else its runs, its tables, its last words."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcommons.cli import parse
from fedcommons.cli.display import Display, asked
from fedcommons.errors import UserError, Warned, sentence
from fedcommons.tune import sweep
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import Outcome, Todo, Trial

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
    """Run what is left of these cells in ``--out`` and report on all; the exit code.

    stem: how the files begin that ``report`` writes into ``--out`` from the run folders; a cell that was done before
    counts too. play: runs what is left, in the open folder, where a sweep does more than that. extra: makes the
    list of the jobs that ``play`` runs besides, with their cost.

    Raises:
        UserError: something that cannot be met, before any work.
    """
    if options.on_cores is not None and not options.dry_run:
        raise UserError("--on-cores changes nothing without --dry-run.")
    started, out = time.perf_counter(), Path(options.out)
    with asked(options) as display:
        if options.dry_run:
            dry_run(cells, out, display, options.on_cores, extra, options.get("total"))
            return 0
        mirror = SweepMirror(cells, out, display.say)
        mirror.begin(options.resume)
        left = sweep.todo(cells, out, display)
        with sweep.open_sweep(out, options.resume):
            mirror.claim()
            outcome = play(left, out, display)
            report(out, display)
            code = conclude(outcome, started, out, stem, display)
            mirror.end()
            return code


def write_page(out: Path, stem: str, display: Display) -> bool:
    """Write ``report.html`` on all runs in ``out``; whether it is there. What hinders it is said and stops nothing."""
    try:
        from fedcommons.reports.page import report  # altair takes a second to import, and a dry run needs none

        report(out, out=out / "report.html", title=f"fedcommons report: {stem}", say=lambda text: None)
    except Exception as error:  # of whatever kind: hours of runs do not fail for a page
        display.say(Warned(f"report.html was not written: {sentence(error)}"))
        return False
    return True


def dry_run(
    cells: Sequence[Trial], out: Path, display: Display, on_cores: int | None = None,
    extra: Callable[[], "Sequence[ExtraJob]"] = tuple, total: int | None = None,
) -> None:  # fmt: skip
    """Print what would run, and what it would cost; see ``dry_run.print_costs``."""
    display.say("Loading torch and the data ...")
    from fedcommons.tune.dry_run import print_costs

    print_costs(cells, out, display, on_cores, extra(), total=total)


def conclude(outcome: Outcome, started: float, out: Path, stem: str, display: Display) -> int:
    """Write the page, say what failed, how long it took and where it all is; the exit code."""
    page = "report.html, " if write_page(out, stem, display) else ""
    for name, message in outcome.failures.items():
        display.say(f"failed: {name}: {message}")
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.seconds.items())
    display.say(
        f"Time: {time.perf_counter() - started:.0f} s ({spent}; {outcome.generators_trained} generators trained)."
    )
    display.say(f"All in {out}: {page}{stem}.md, {stem}.csv, {stem}.png, summary.json, and a folder for each run.")
    return 1 if outcome.failures else 0
