"""Result pages: what they print from ``docs/results/pages.yaml`` and the committed CSV files.

A page docs/results/NAME.md asks by a comment; the facts stand below NAME in pages.yaml:

<!-- command -->      ``command``, ``what`` and ``minutes``, those of each of ``runs``, ``ran`` (date, machine)
<!-- table KEY -->    the table ``tables: KEY:`` (below), its CSV, its seeds and what its brackets mean
<!-- trees FILE -->   the decision trees of FILE.csv, as lists (sweeps/papers/commons/decide.py)
<!-- table FILE -->   on a page of docs/notes or docs/methods, which has no facts: FILE.csv in its folder as it is
<!-- pages -->        all pages: title, ``paper``, ``data``, verdicts in docs/claims.csv, minutes, start of the answer

A table has ``csv`` (a name or a list). Without more it is the CSV as it is; otherwise it has ``rows`` (columns that
tell its rows apart, each below its heading) and ``columns`` (heading: [statistic, expression of CSV columns, decimals
or null, condition or nothing]), and may have ``where`` (a condition on CSV rows), ``base`` (column: value; the row
that ``gain`` and ``ratio`` compare with), ``across`` (a column whose values, {} in a heading, become columns),
``best`` (a column, of whose values the one with the best mean validation accuracy stays) and ``names`` (of row values).
Columns such as ``accuracy_seed7`` become one row per seed. A page says how many comparisons it makes, after *How sure*.
The build fails and names the page where a CSV lacks a column, a command is refused, or a picture is older than the CSV
that pictures.csv names. A picture that is drawn again: python docs/_ext/results.py PICTURE ...
"""

import csv
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

from comparisons import claims, pages, summary
from result_tables import as_text, table
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
sys.path[:] = dict.fromkeys([str(ROOT / "sweeps"), *sys.path])


def runs(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for run in (facts, *facts.get("runs", [])) if "command" in run]


def command(facts: Mapping[str, Any]) -> str:
    lines = []
    for run in runs(facts):
        about = [str(run.get("what", "")), f"{run['minutes']:g} min" if "minutes" in run else ""]
        lines += [f"# {', '.join(filter(None, about))}"] * any(about) + [f"python {' '.join(run['command'].split())}"]
    return "\n".join(["```bash", *lines, "```", "", facts.get("ran", "")])


def overview(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """A sortable table of all pages."""
    lines = ["| page | paper or idea | data | claims | minutes | answer |", "|---" * 6 + "|"]
    for name, row in facts.items():
        title, _, text = (RESULTS / f"{name}.md").read_text(encoding="utf-8").partition("\n")
        answer = re.search(r"\*\*Answer\.\*\* (.+?\.)\s+(?=[A-Z\[`]|$)", text, re.S | re.M)
        verdicts = [claim["verdict"] for claim in claims() if claim["page"] == f"results/{name}.md"]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)) or "-"
        cells = [f"[{title.lstrip('# ')}]({name}.md)", row["paper"], row["data"], counts, as_text(row.get("minutes"))]
        cells = [" ".join(cell.split()).replace("|", r"\|") for cell in (*cells, answer[1] if answer else "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["```{table}", ":class: sortable", "", *lines, "```"])


def trees(file: Path) -> str:
    decide = import_module("papers.commons.decide")
    lists = (f"Alpha {alpha:g}:\n\n{decide.in_words(node)}" for alpha, node in decide.from_csv(file).items())
    return "\n".join([*lists, decide.RULE])


def faults(page: str, facts: Mapping[str, Any], folder: Path = RESULTS) -> Iterator[str]:
    """What is wrong with a page: a table that cannot be made, a command that is refused, a picture that is too old."""
    text = (folder / f"{page}.md").read_text(encoding="utf-8")
    for key in facts.get("tables", {}).keys() ^ {*re.findall(r"<!-- table (\w+) -->", text)}:
        yield f"{page}: table {key} is only in one of the page and pages.yaml"
    for key, spec in facts.get("tables", {}).items():
        try:
            table(spec, folder)
        except (KeyError, ValueError, NameError, OSError) as error:
            yield f"{page}: table {key} of {spec['csv']}: {type(error).__name__}: {error}"
    for run in runs(facts):
        script, *words = shlex.split(re.sub(r"\b[A-Z]{2,}\b", str(folder), run["command"]))
        try:
            (ROOT / script).stat()
            if script.startswith("sweeps/"):
                import_module(Path(script).stem).arguments(words)
        except (Exception, SystemExit) as error:
            yield f"{page}: {run['command']}: {error}"
    rows = {line["picture"]: line for line in pictures(folder)}
    for picture in re.findall(r"!\[[^\]]*\]\((\w+\.png)\)", text):
        if picture not in rows:
            yield f"{page}: {picture} is not in pictures.csv"
        elif (source := rows[picture]["csv"]) and rows[picture]["crc"] != crc(folder / source):
            yield f"{page}: {picture} is older than {source}: draw it again"


def pictures(folder: Path) -> list[dict[str, str]]:
    """The lines of pictures.csv: picture, the CSV that it shows (none: only run folders have its numbers), its CRC."""
    with (folder / "pictures.csv").open(encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def crc(file: Path) -> str:
    return f"{crc32(file.read_bytes()):08x}"


def check(app: Sphinx) -> None:
    if messages := [fault for page, facts in pages().items() for fault in faults(page, facts)]:
        raise ExtensionError("docs/results: " + "\n".join(messages))


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    folder, _, page = docname.partition("/")
    if folder in ("results", "notes", "methods"):
        home = ROOT / "docs" / folder
        for file in [RESULTS / "pages.yaml", *(ROOT / "docs").glob("*.csv"), *home.glob("*.csv")]:
            app.env.note_dependency(str(file))
        every, own_facts = pages(), pages().get(page, {})
        if counted := summary(f"{docname}.md"):
            text[0] = re.sub(
                r"(\*\*How sure\.\*\*.*?)\n\n", lambda sure: f"{sure[1]}\n\n{counted}\n\n", text[0], count=1, flags=re.S
            )
        text[0] = text[0].replace("<!-- pages -->", overview(every)).replace("<!-- command -->", command(own_facts))

        def make_table(match: re.Match[str]) -> str:
            return table(own_facts["tables"][match[1]] if own_facts else {"csv": f"{match[1]}.csv"}, home)

        text[0] = re.sub(r"<!-- table (\w+) -->", make_table, text[0])
        text[0] = re.sub(r"<!-- trees (\w+) -->", lambda file: trees(RESULTS / f"{file[1]}.csv"), text[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", check)
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":  # these pictures were drawn from the CSV as it is now
    lines = pictures(RESULTS)
    if unknown := {*sys.argv[1:]} - {line["picture"] for line in lines if line["csv"]}:
        sys.exit(f"pictures.csv names no CSV of {', '.join(sorted(unknown))}")
    with (RESULTS / "pictures.csv").open("w", encoding="utf-8", newline="") as file:
        (out := csv.DictWriter(file, ["picture", "csv", "crc"], lineterminator="\n")).writeheader()
        redrawn = [line for line in lines if line["csv"] and line["picture"] in sys.argv]
        out.writerows(line | {"crc": crc(RESULTS / line["csv"])} if line in redrawn else line for line in lines)
