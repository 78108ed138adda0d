"""Compare runs of any folders: plot a number against a field or another number, as means over seeds, with a CSV.

python sweeps/compare.py runs/tune runs/mine --x p --y zeta_hat_sq --colour alpha --facet rho --out runs/compare
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.errors import UserError, unknown
from fedcommons.reports import series
from fedcommons.reports.cells import Cell, cells, counted, drop_duplicates, varied
from fedcommons.reports.frames import load_runs
from fedcommons.reports.metrics import words
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import sweep_folder

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

AXES = {
    "x": ("p", "the horizontal axis: a field or a number"),
    "y": ("last_accuracy", "a number: an accuracy, rounds_to_target, MB, epsilon, zeta_hat_sq, zeta_hat_sq_mean, ..."),
    "colour": (None, "a series for each value of this field"),
    "facet": (None, "a panel for each value of this field"),
}


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="compare.py DIR [DIR ...] [options]")
    for name, (default, text) in AXES.items():
        parser.add_argument(f"--{name}", type=str if default else str | None, default=default, help=text)
    parser.add_argument("--out", type=str, default="runs/compare", help="folder for compare.png and compare.csv")
    options = parse.parse(parser, argv)
    options.folders = parse.run_folders(options, "DIR", "compare.py DIR [DIR ...] --x NAME --y NAME")
    return options


def columns(runs: "pd.DataFrame", options) -> dict[str, str]:
    """Return the name of the column of ``runs`` for each requested axis: x, y, colour and facet."""
    result = {}
    for option in AXES:
        if (name := options[option]) is None:
            continue
        full = name if name in runs else SHORT_NAMES.get(name, name)
        if full not in runs:
            raise unknown(f"column --{option}", name, runs.columns)
        if full == "seed":
            raise UserError(f"--{option} seed cannot be drawn: points are means over seeds.")
        result[option] = full
    if any(isinstance(value, str | tuple | bool) for value in runs[result["y"]].tolist()):
        raise UserError(f"--y takes a number, and {options.y} is not one.")
    return result


def rows(compared: Sequence[Cell], names: dict[str, str]) -> "pd.DataFrame":
    """Return a table with a row per configuration: varying fields, axes, seeds, mean and standard deviation of y."""
    lines = []
    for cell in compared:
        values, missed = counted(cell.runs, names["y"])
        row = {**cell.fields, **{n: series.value(cell, n) for n in names.values()}, "seeds": len(cell.runs)}
        row |= {names["y"]: fmean(values) if values else None}
        row |= {f"{names['y']}_sd": stdev(values) if len(values) > 1 else None}
        lines.append(row | ({"not_reached": missed} if names["y"] == "rounds_to_target" else {}))
    import pandas as pd

    return pd.DataFrame(lines)


def hint(runs: "pd.DataFrame", compared: Sequence[Cell], names: dict[str, str]) -> str | None:
    """Return a message that names further varying fields, or None if the axes distinguish all configurations."""
    chosen = [name for option, name in names.items() if option != "y"]
    places: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in compared:
        places.setdefault(tuple(series.text(cell, n) for n in chosen), []).append(cell)
    shared = [group for group in places.values() if len(group) > 1]
    if not shared:
        return None
    besides = [n for n in varied(runs) if any(len({str(series.value(c, n)) for c in group}) > 1 for group in shared)]
    return (
        f"Some configurations have the same {', '.join(chosen)} and are drawn at the same place: they differ in "
        f"{', '.join(besides)}. Use --colour or --facet for such a field, or name fewer folders."
    )


def panels(compared: Sequence[Cell], names: dict[str, str]) -> list[series.Panel]:
    """Return a panel for each value of the facet field, with a point for each configuration that has a y."""

    def text(cell: Cell, option: str) -> str:
        return series.text(cell, names[option]) if option in names else ""

    result = []
    for facet in dict.fromkeys(text(cell, "facet") for cell in compared):
        inside = [cell for cell in compared if text(cell, "facet") == facet]
        points = [series.point(cell, names["x"], names["y"], text(cell, "colour")) for cell in inside]
        title = f"{words(names['facet'])} = {facet}" if facet else ""
        result.append(series.Panel(title, words(names["x"]), [p for p in points if p is not None]))
    return result


def compare(argv: Sequence[str]) -> int:
    options = arguments(argv)
    every = load_runs(*options.folders)
    if every.empty:
        raise UserError("none of the runs can be read.")
    runs = every.loc[every["status"] == "finished", :]
    if ended := len(every) - len(runs):
        print(f"left out: {ended} of {len(every)} runs are not finished.")
    if runs.empty:
        raise UserError("no run is finished.")
    runs = drop_duplicates(runs)
    names, out = columns(runs, options), Path(options.out)
    compared = cells(runs)
    table, drawn_panels = rows(compared, names), panels(compared, names)
    if not any(panel.points for panel in drawn_panels):
        raise UserError(f"no run has a number for --y {options.y}.")
    if message := hint(runs, compared, names):
        print(message)
    with sweep_folder.open_folder(out):
        write_text(out / "compare.csv", table.to_csv(index=False, lineterminator="\n"))
        legend = words(names["colour"]) if "colour" in names else ""
        series.draw(out / "compare.png", drawn_panels, names["y"], legend, series.title(runs))
    print(f"{len(compared)} configurations of {len(runs)} runs: {out / 'compare.png'}, {out / 'compare.csv'}.")
    return 0


if __name__ == "__main__":
    parse.main(compare, resumes=False)
