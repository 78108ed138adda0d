"""Many experiments from Python: side by side on Ray, as the sweeps run them."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pandas as pd

from fedcommons.cli.display import Display
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import is_ignored
from fedcommons.core.worker import only_thread
from fedcommons.errors import ClientError, UserError, shown
from fedcommons.reports.frames import folder_path, load_runs
from fedcommons.sweeping.sweep import MOST, Trial, cell, open_sweep, require_few, run_cells, todo
from fedcommons.sweeping.sweep_mirror import SweepMirror


def sweep(experiments: Iterable[Experiment], folder: str | Path, *, show: bool = False) -> pd.DataFrame:
    """Run each of these in a folder of its own in ``folder``; a row a run, as ``load_runs`` has them.

    Runs that are there already are read, those that were broken off go on; generators are trained once for all. Ray is
    started where it is not running, and stays for the next sweep. show: what the command of a sweep shows; without it
    only the logger ``fedcommons`` is told.

    Raises:
        UserError: what is asked for cannot be met, or is no experiment, or another thread of this process is in an
            experiment; nothing has been run then.
        ClientError: some runs failed; the others are finished and can be loaded.
    """
    out, cells = folder_path(folder), named(listed(experiments))
    with only_thread(), Display(quiet=not show) as display:
        SweepMirror(cells, out, display.say).begin(resume=True)
        left = todo(cells, out, display)
        with open_sweep(out, resume=True, say=lambda text: None):
            try:
                failures = run_cells(left, out, display).failures
            except BaseException:  # Ctrl-C too: the next sweep would wait for what this one holds
                from fedcommons.sweeping import trials  # Ray takes a second to import

                trials.remove_all()
                raise
    if failures:
        raise ClientError("; ".join(f"{name}: {why}" for name, why in failures.items()))
    return load_runs(*(out / c.name for c in cells))


def listed(experiments: Iterable[Experiment]) -> list[Experiment]:
    """They as a list, one of them alone too.

    Raises:
        UserError: something among them is no experiment, or there are too many.
    """
    found = [experiments] if isinstance(experiments, Experiment) else experiments
    if not isinstance(found, Iterable):
        raise UserError(f"sweep takes experiments, got {shown(found)}.")
    some = list(islice(found, MOST + 1))
    require_few(len(some))
    if wrong := [one for one in some if not isinstance(one, Experiment)]:
        raise UserError(f"sweep takes experiments, got {shown(wrong[0])}.")
    return some


def named(experiments: list[Experiment]) -> list[Trial]:
    """A cell for each experiment, each once, named after the fields in which they differ.

    Raises:
        UserError: there is none.
    """
    if not experiments:
        raise UserError("a sweep needs at least one experiment.")
    flat = [one.flat for one in experiments]
    names = dict.fromkeys(n for f in flat for n in f if not is_ignored(n) and not n.startswith("source."))
    labels = {n: n.rpartition(".")[2] for n in names if len({repr(f[n]) for f in flat if n in f}) > 1}
    for name in ("algorithm", "sharing.setting"):  # every name begins with these
        labels.pop(name, None)
    return list({c.name: c for c in (cell(one, labels) for one in experiments)}.values())
