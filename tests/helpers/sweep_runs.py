"""Run the trials of a sweep in this process, so that the sweep's command finds finished trials and needs no Ray."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedcommons.errors import UserError
from fedcommons.runs import experiment
from fedcommons.tune.study import Entry, Study
from fedcommons.tune.sweep import Trial


def rows_of(markdown: str, begin: str = "|") -> list[list[str]]:
    """Return the texts of the table cells, for each line of the Markdown that starts with ``begin``."""
    lines = [line for line in markdown.splitlines() if line.startswith(begin)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def in_order(study: Study, entries: Sequence[Entry], out: Path) -> Iterator[Entry]:
    """Yield the entries that choose learning rates, then the reported ones at the rates that runs in ``out`` choose."""
    yield from (entry for entry in entries if entry.is_tuning)
    yield from (entry for entry in study.plan(entries, out) if not entry.is_tuning)


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that collects all figures that are saved later in the test."""
    figures, save = list[Figure](), Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def sweep_output(main: Callable[[Sequence[str]], int], folder: Path, *words: str, code: int = 0) -> str:
    """Run a sweep to its end in this process, with ``folder`` as current folder, and return what it prints."""
    folder.mkdir(exist_ok=True)
    with chdir(folder), redirect_stdout(StringIO()) as output, redirect_stderr(output):
        assert main(words) == code, output.getvalue()
    return output.getvalue()


def complete(
    main: Callable[[Sequence[str]], int],
    argv: Sequence[str],
    cells: Iterable[Trial],
    out: Path,
    also: Callable[[], object] = lambda: None,
    again: bool = False,
) -> str:
    """Run the trials, check the files and messages of the sweep's command with them, and return its Markdown table.

    also: further work before the command. again: check that a second call changes no file.
    """
    for cell in {trial.name: trial for trial in cells}.values():
        experiment.run(cell.config, out / cell.name)
    also()
    with pytest.raises(UserError, match="add --resume"):
        main(argv)
    assert main([*argv, "--resume"]) == 0
    written = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".md", ".csv", ".json", ".jsonl")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    tables = [path for path in written if path.parent == out and path.suffix == ".md"]
    stem = tables[0].stem
    assert {f"{stem}.csv", f"{stem}.png", "report.html", "summary.json"} <= {path.name for path in out.iterdir()}
    if again:
        assert main([*argv, "--resume"]) == 0
        assert {path: path.read_bytes() for path in written} == written
    return tables[0].read_text(encoding="utf-8")
