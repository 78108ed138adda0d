"""Files that the FedDM sweep writes from its run folders."""

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
    """A run in a table: a method at an alpha, a learning rate and a seed. A run may be in several tables.

    rate: learning rate of the pixels for FedDM, None for REAL, of the clients for other methods.
    """

    table: str
    method: str
    alpha: float
    rate: float | None
    cell: sweep.Trial


def rows(entries: Sequence[Entry], out: Path, say: Callable[[str], None]) -> Any:
    """Return a frame with a row for each entry whose run is finished: table, method, alpha, and columns of the run.

    Column level: the noise level, which is FedDM's sigma or the noise multiplier of DP-SGD.
    """
    import pandas as pd

    runs: Any = grid.finished(grid.once(e.cell for e in entries), out, say)  # pandas' types are too wide for a checker
    if runs.empty:
        return runs
    sigma, private = (runs.get(name, pd.Series(index=runs.index, dtype=float)) for name in ("feddm.sigma", "sigma"))
    runs = runs.assign(cell=[Path(run).name for run in runs["run"]], level=private.fillna(sigma).fillna(0.0))
    ended = [e for e in entries if e.cell.name in set(runs["cell"])]
    stands = [{"table": e.table, "method": e.method, "at": e.alpha, "rate": e.rate, "cell": e.cell.name} for e in ended]
    return pd.DataFrame(stands).astype({"rate": float}).merge(runs, on="cell", how="left")


def notes(frame: Any, options: parse.Options) -> list[str]:
    """Return the footnotes that explain the numbers."""
    goal = target.plain(options.target)
    reach = f"{target.in_words(goal)}{'' if isinstance(goal, str) else ' test accuracy'}"
    texts = [
        f"Rounds: the first whose server model has {reach}; >R: not within R rounds.",
        "MB: 10^6 bytes over all clients; until the target a seed that missed it counts with all its rounds, and the "
        "mean has >.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation; intervals: Student's, for the mean over seeds.",
        "Rate: of feddm the pixels' (feddm.image_lr), of the others client.lr; REAL has none. Where several were "
        "tried, that of each row has the highest validation accuracy after the last round, the mean over seeds, ties "
        "to the smaller; test data had no part in it.",
    ]
    if (server := options.get("feddm.server_lr")) is not None:
        texts.append(f"The server of FedDM and REAL is the same: feddm.server_lr {server:g}, not chosen by row.")
    return [*texts, *tables.rejected_notes(frame.drop_duplicates("run"))]


def report(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write tables, curves and pictures from the run folders, and display the tables."""
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
