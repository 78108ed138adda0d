"""Table A.2 of Fedssyn: percentage of communication that the shuffled synthetic pool saves until a target accuracy.

python sweeps/communication_saved.py --from sweeps/papers/fedssyn/published/fedssyn_table1_rounds.csv
python sweeps/communication_saved.py --from runs/table1-small-digits --out DIR      # a Table 1 sweep of ours
"""

from collections.abc import Sequence
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.errors import UserError
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_text
from fedcommons.tune import sweep_folder
from papers.fedssyn import saved


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options; ``from`` is required."""
    parser = parse.Parser(description=__doc__)
    parser.add_argument(
        "--from", type=str | None, help="a CSV of rounds, or a folder with runs, such as a Table 1 sweep"
    )
    parser.add_argument("--out", type=str | None, help="folder for communication_saved.md and .csv")
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = parse.parse(parser, argv)
    if options["from"] is None:
        raise UserError("--from is missing: name a CSV of rounds or a folder with runs.")
    return options


def communication_saved(argv: Sequence[str]) -> int:
    options = arguments(argv)
    source = Path(options["from"])
    lines = saved.from_sweep(source) if source.is_dir() else saved.from_rounds(source)
    if not lines:
        wanted = "pair of runs with the settings real and shuffled_synthetic" if source.is_dir() else "rows"
        raise UserError(f"{source} has no {wanted}.")
    if options.dry_run:
        print(f"{source}: {len(lines)} lines to print")
        return 0
    notes = (*saved.NOTES, *(saved.SWEEP_NOTES if source.is_dir() else saved.ROUNDS_NOTES))
    table = tables.markdown(list(lines[0]), [list(line.values()) for line in lines])
    table += tables.numbered(notes)
    if options.out:
        out = Path(options.out)
        with sweep_folder.open_folder(out):
            write_text(out / "communication_saved.md", table)
            write_text(out / "communication_saved.csv", tables.to_csv(lines))
    print(table, end="")
    return 0


if __name__ == "__main__":
    parse.main(communication_saved, resumes=False)
