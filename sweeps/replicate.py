"""Replications: compare our numbers with published numbers of other papers and programs, each with a verdict.

python sweeps/replicate.py --data-dir DIR                          # R1, R4, R5, R6 and R10 with five seeds
python sweeps/replicate.py --data-dir DIR --rows R2 --dry-run      # what another row costs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError, unknown
from fedcommons.tracking.run_folder import is_run, read_rounds, read_summary
from fedcommons.tune import grid, main, sweep
from papers.replications.rows import NOT_HERE, ROWS, Quantity

SMALL = "R1,R4,R5,R6,R10"
VARIED = {"partition.name": "", "federation.participation": "C", "client.lr": "lr", "seed": "seed"}
"""Fields whose values are part of the names of run folders, each with its label in the name."""


@dataclass(frozen=True)
class Entry:
    """A trial with one seed. row: name of the replication, such as R1. variant: name of a set of fields in this row."""

    row: str
    variant: str
    cell: sweep.Trial


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options, and check the names of rows and the seeds; ``rows`` becomes a sequence."""
    parser = parse.Parser(description=(__doc__ or "").partition("\n")[0])
    for name, kind, default, text in (
        ("rows", str, SMALL, f"rows to run, separated by commas, of {', '.join(ROWS)}"),
        ("seeds", str, "0,1,2,3,4", "seeds, separated by commas; with fewer than three there is no verdict"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("out", str, "runs/replicate", "folder of the sweep"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(parser)
    options = parse.parse(parser, argv)
    options.rows = parse.split("--rows", options.rows)
    for name in options.rows:
        if name in NOT_HERE:
            raise UserError(f"--rows {name} is not run here: {NOT_HERE[name]}.")
        if name not in ROWS:
            raise unknown("row", name, ROWS)
    parse.split("--seeds", options.seeds, int, common_fields()["seed"].allowed)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each row, variant and seed, in the order of the page."""
    result = []
    for name in options.rows:
        for variant, fields in ROWS[name].variants.items():
            for seed in parse.split("--seeds", options.seeds, int):
                values: dict[str, Any] = {**fields, "seed": seed, "data.dir": options.data_dir, "tracking.wandb": "off"}
                result.append(Entry(name, variant, sweep.cell(presets.experiment("small", "mnist", values), VARIED)))
    return result


def numbers(folder: Path, quantities: Sequence[Quantity]) -> dict[str, float | None] | None:
    """Return the run's value of each quantity by name, accuracies in percent; None if the run is not finished."""
    if not is_run(folder) or (summary := read_summary(folder)) is None:
        return None
    accuracy = {line["round"]: 100 * line["test/accuracy"] for line in read_rounds(folder) if "test/accuracy" in line}
    return {q.words: summary["rounds_to_target"] if q.round is None else accuracy[q.round] for q in quantities}


def report(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write the page from the run folders, and display its table."""
    from papers.replications.report import compared, write

    runs: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    for entry in entries:
        quantities = [q for q in ROWS[entry.row].quantities if q.variant == entry.variant]
        if values := numbers(out / entry.cell.name, quantities):
            runs.setdefault((entry.row, entry.variant), {})[entry.cell.config.seed] = values
    if runs:
        display.say("\n" + write(compared(runs), options.seeds, out))


def replicate(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    cells = grid.once(entry.cell for entry in rows)
    return main.run(options, "replicate", cells, partial(report, rows, options))


if __name__ == "__main__":
    parse.main(replicate)
