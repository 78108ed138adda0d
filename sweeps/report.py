"""Write a report on runs: one HTML file with tables, curves, privacy, partitions and the source runs of each number.

python sweeps/report.py runs/table1 --out report.html
python sweeps/report.py runs/table1 runs/tune runs/mine --out report.html --title "Which commons?"
"""

from collections.abc import Sequence

from fedcommons.cli import parse


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="report.py RUNS [RUNS ...] [options]")
    parser.add_argument("--out", type=str, default="report.html", help="the file; an earlier report is replaced")
    parser.add_argument("--title", type=str | None, default=None, help="title of the page; default: the folders' names")
    options = parse.parse(parser, argv)
    options.folders = parse.run_folders(options, "RUNS", "report.py RUNS [RUNS ...] --out report.html")
    return options


def report(argv: Sequence[str]) -> int:
    options = arguments(argv)
    from fedcommons.reports import page  # pandas takes a second to import, and --help needs none

    path = page.report(*options.folders, out=options.out, title=options.title)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB. It opens in any browser and needs no network.")
    return 0


if __name__ == "__main__":
    parse.main(report, resumes=False)
