"""Replications: compare our numbers with published numbers of other papers and programs, each with a verdict.

python sweeps/replicate.py --data-dir DIR                          # R1, R4, R5, R6 and R10 with five seeds
python sweeps/replicate.py --data-dir DIR --rows R2 --dry-run      # what another row costs
"""

from collections.abc import Sequence

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError, unknown
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Report, Results, Study
from papers.replications.rows import NOT_HERE, ROWS

SMALL = "R1,R4,R5,R6,R10"
VARIED = {"partition.name": "", "federation.participation": "C", "client.lr": "lr", "seed": "seed"}
"""Fields whose values are part of the names of run folders, each with its label in the name."""


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options, and check the names of rows and the seeds; ``rows`` becomes a sequence."""
    parser = parse.Parser(description=__doc__)
    parser.add_options((
        ("rows", str, SMALL, f"rows to run, separated by commas, of {', '.join(ROWS)}"),
        ("seeds", str, "0,1,2,3,4", "seeds, separated by commas; with fewer than three there is no verdict"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("out", str, "runs/replicate", "folder of the sweep"),
        ("resume", bool, False, "continue the sweep in that folder"),
    ))  # fmt: skip
    parse.add_shared(parser)
    options = parse.parse(parser, argv)
    options.rows = grid.values(options, "rows")
    for name in options.rows:
        if name in NOT_HERE:
            raise UserError(f"--rows {name} is not run here: {NOT_HERE[name]}.")
        if name not in ROWS:
            raise unknown("row", name, ROWS)
    grid.values(options, "seeds", int, common_fields()["seed"].allowed)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each row, variant (name of a set of fields in the row) and seed, in the order of the page."""
    result = []
    for row in options.rows:
        for variant, fields in ROWS[row].variants.items():
            for seed in grid.values(options, "seeds", int):
                values = {**fields, "seed": seed, "data.dir": options.data_dir, "tracking.wandb": "off"}
                cell = sweep.cell(presets.experiment("small", "mnist", values), VARIED)
                result.append(Entry(cell, {"row": row, "variant": variant}))
    return result


def render(results: Results) -> Report:
    from papers.replications.report import report

    return report(results)


replicate = Study("replicate", arguments, entries, render)

if __name__ == "__main__":
    parse.main(replicate)
