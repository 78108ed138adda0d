"""Report of the FedDM sweep from its run folders: tables, CSV, summary and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import target
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, sweep


@dataclass(frozen=True)
class Entry:
    """One run in one table: a method at an alpha (of the Dirichlet partition), a learning rate and a seed.

    A run may be in several tables. rate: learning rate of the synthetic pixels for FedDM, of the clients for other
    methods; None for REAL (FedDM that sends its start images, without matching). cell: the trial of the run.
    """

    table: str
    method: str
    alpha: float
    rate: float | None
    cell: sweep.Trial


def rows(entries: Sequence[Entry], out: Path, say: Callable[[str], None]) -> Any:
    """Return a data frame with one row per entry whose run is finished.

    It has the columns of ``load_runs``, and ``table``, ``method``, ``at`` (alpha), ``rate`` (learning rate), ``cell``
    (name of the run folder) and ``level``. ``level`` is the noise level: FedDM's sigma, or the noise multiplier of
    DP-SGD.
    """
    import pandas as pd

    runs: Any = grid.finished(grid.once(e.cell for e in entries), out, say)  # Any: pandas' types are too wide to check
    if runs.empty:
        return runs
    sigma, private = (runs.get(name, pd.Series(index=runs.index, dtype=float)) for name in ("feddm.sigma", "sigma"))
    runs = runs.assign(cell=[Path(run).name for run in runs["run"]], level=private.fillna(sigma).fillna(0.0))
    ended = [e for e in entries if e.cell.name in set(runs["cell"])]
    stands = [{"table": e.table, "method": e.method, "at": e.alpha, "rate": e.rate, "cell": e.cell.name} for e in ended]
    return pd.DataFrame(stands).astype({"rate": float}).merge(runs, on="cell", how="left")


def notes(frame: Any, options: parse.Options) -> list[str]:
    """Return the footnotes of the tables: target, bytes, seeds, learning rates and rejected replies."""
    goal = target.plain(options.target)
    reach = f"{target.in_words(goal)}{'' if isinstance(goal, str) else ' test accuracy'}"
    texts = [
        f"Rounds: the first round whose server model has {reach}.",
        "MB: 10^6 bytes over all clients. In rounds and MB to target, a seed that missed the target counts with all "
        "its rounds, and the mean is marked with >.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation; intervals: Student's t, for the mean over seeds.",
        "Rate: learning rate, for feddm of the pixels (feddm.image_lr), for other methods client.lr; REAL has none. "
        "If several were tried, each row has the one with the highest validation accuracy after the last round (mean "
        "over seeds; in a tie the smaller). Test data were not used for this choice.",
    ]
    if (server := options.get("feddm.server_lr")) is not None:
        texts.append(
            f"FedDM and REAL train the server model with feddm.server_lr {server:g}, which was not chosen per row."
        )
    return [*texts, *tables.rejected_notes(frame.drop_duplicates("run"))]


def report(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write the tables, the CSV, the summary and the pictures into ``out``, and display the tables."""
    from papers.feddm import tables as feddm

    frame = rows(entries, out, display.say)
    if frame.empty:
        return
    frame, smoke = feddm.with_choice(frame), grid.is_smoke(options)
    text = grid.stamped(feddm.markdown(frame, notes(frame, options)), options)
    stands = [
        {"table": e.table, "method": e.method, "alpha": e.alpha, "rate": e.rate, "run_dir": e.cell.name}
        for e in entries
    ]
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "entries": stands})
    write_text(out / "feddm.md", text)
    names = ("table", "method", "at", "level", "rate", "chosen", *tables.RUN)
    write_text(out / "feddm.csv", tables.to_csv(tables.records(frame, names)))
    feddm.courses(frame, out / "feddm.png", smoke)
    feddm.noise(frame, out / "feddm_noise.png", smoke)
    feddm.pictures(frame, out / "feddm_images.png", smoke)
    feddm.figure1(out / "feddm_figure1.png", smoke)
    display.say("\n" + text)
