"""Commands of pages are ones that the sweeps take; those of the pages that docs/played.py names are run."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from math import atan, pi, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import played
import pytest
from forked import call, forked, warm_up
from sweep_runs import sweep_output

from fedcommons.cli import parse

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
OWN_PARTS = "docs/own_parts.md"
on_ray = re.compile(r"python sweeps/(methods|table1|tune)\.py").match
"""Commands that start Ray; a played page has them at its end, and they use no result of the commands before."""


def commands(page: str) -> list[str]:
    """Return each command of a sweep in a code span or a line of a block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    lines = [line for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    matches = (re.match(r"(?:\$ )?(python sweeps/[a-z]\w*\.py.*?)(?:\s+#.*)?$", line) for line in (*spans, *lines))
    return list(dict.fromkeys(match[1] for match in matches if match))


def test_a_command_of_a_page_is_one_that_its_sweep_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    played.write_files((ROOT / OWN_PARTS).read_text(encoding="utf-8"), tmp_path)
    examples = ("own_method", "own_tracker", "own_measure")
    (tmp_path / "my_lab.py").write_text("\n".join((ROOT / f"examples/{name}.py").read_text() for name in examples))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(tmp_path)
    load, files = cache(sweeps), [ROOT / f"docs/{name}.csv" for name in ("claims", "papers")]
    listed = pd.concat([pd.read_csv(file)["command"].dropna() for file in files])
    lines = [line for line in listed if "sweeps/" in line]  # the site's build checks those of pages.yaml
    assert all((ROOT / line.split()[-1]).exists() for line in listed if "pytest" in line)
    others = {f"docs/{page}.md" for page in played.PAGES} - {OWN_PARTS}
    folders = ("howto", "tutorials", "coming_from", "ideas", "methods", ".")
    guides = [str(path.relative_to(ROOT)) for name in folders for path in sorted((ROOT / "docs" / name).glob("*.md"))]
    for page in {"README.md", "docs/results/README.md", *guides} - others:
        lines += commands(page)
    for command in lines:
        _, script, *words = shlex.split(command)
        if "--replay" in words:  # no other option goes with it
            assert parse.named(words) <= {"replay", "round", "client", "pdb"}
        elif "fedavgg" not in command:
            load(Path(script).stem).arguments(words)


def wrong_facts(page: str, run: played.Run, folder: Path, chosen: Callable[[str], object]) -> list[str]:
    """Run the chosen commands of a page; return what the page shows and does not come, with the outputs."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").replace("--data.limit null", "--data.limit 300")
    played_page = played.play(text, folder, run, chosen)
    return [f"{command.line}: {wrong}\n{output}" for command, output, wrong in played_page if wrong]


@pytest.mark.long
@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("page", [page for page in played.PAGES if page != "tutorials/tuning"])
def test_a_page_shows_what_comes(page: str, tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    def run(line: str, folder: Path) -> tuple[int, str]:
        python, script, *words = shlex.split(line)
        if python != "python":
            return played.shell(line, folder)

        def action() -> None:
            if script.startswith("sweeps/"):
                call(getattr(sweeps(name := Path(script).stem), name), *words)
            sys.argv = [script, *words]
            runpy.run_path(script, run_name="__main__")

        ended = forked(action, folder, {"WANDB_MODE": "disabled"})
        return ended.code, ended.out + ended.err

    warm_up()
    assert not wrong_facts(page, run, tmp_path, lambda line: not on_ray(line))


@pytest.mark.ray
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("page", ["start", "tutorials/tuning", "tutorials/synthetic_data"])
def test_a_page_shows_what_comes_of_its_sweeps(
    page: str, sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(line: str, folder: Path) -> tuple[int, str]:
        _, script, *words = shlex.split(line)
        name = Path(script).stem
        return 0, sweep_output(getattr(sweeps(name), name), folder, *words, "--wandb=off", "--client.epochs=1")

    monkeypatch.delenv("FEDCOMMONS_PARTS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert not wrong_facts(page, run, tmp_path, on_ray)


@pytest.fixture
def regenerate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RESULTS))
    return import_module("regenerate")


def test_numbers_that_differ_are_reported(regenerate: ModuleType) -> None:
    other = (base := pd.DataFrame({"method": ["x", "y"], "accuracy": [0.5, 0.75]})).assign(accuracy=[0.5, 0.5])
    assert "accuracy is 0.25 off at y" in " ".join(regenerate.differences(base, other, ["method"], {"accuracy": 0.125}))
    assert not regenerate.differences(base, other, ["method"], {"accuracy": 0.25})


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RESULTS.parent / "_ext"))
    return import_module("comparisons")


def test_p_values_and_holms_adjustment(comparisons: ModuleType) -> None:
    assert comparisons.p_value([1, 3]) == pytest.approx(1 - atan(2) / (pi / 2))  # Cauchy's distribution
    t = 6 / 4 * sqrt(3)  # mean 6, standard deviation 4; with 2 degrees of freedom P(T < t) has a closed form
    assert comparisons.p_value([2, 6, 10]) == pytest.approx(1 - t / sqrt(2 + t**2))
    assert (comparisons.p_value([2, 2, 2]), comparisons.p_value([0, 0])) == (0, 1)
    assert comparisons.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])


@pytest.mark.parametrize(
    ("differences", "margin", "least", "verdict"),
    [([4, 5, 6], None, 3, "holds"), ([4, 5, 6], None, 5, "on all seeds"), ([4, 5, 6, 5, 4], None, 5, "holds"),
     ([1, 5, 9], None, 3, "on all seeds"), ([4, 5], None, 3, "in part"), ([-1, 5, 9], None, 3, "not here"),
     ([*[5, 6] * 9, -1], None, 3, "in part"), ([1, -1, 0], 5, 3, "holds"), ([4, -4, 0], 5, 3, "on all seeds"),
     ([1, -1, 0], 0, 3, "in part"), ([8, 9, 8], 5, 3, "not here")],
)  # fmt: skip
def test_a_verdict_follows_from_differences(
    comparisons: ModuleType, differences: list[float], margin: float | None, least: int, verdict: str
) -> None:
    assert comparisons.verdict(comparisons.Comparison(tuple(differences), margin), least) == verdict


def test_claims_are_recounted_from_the_csv_files_of_their_pages(comparisons: ModuleType) -> None:
    assert comparisons.combined(["holds", "on all seeds"]) == "on all seeds"
    assert comparisons.combined(["holds", "not here"]) == "in part"
    assert comparisons.combined(["not here", "not here"]) == "not here"
    assert comparisons.least_seeds({"command": "x --seeds 0,1,2", "minutes": 14}) == 5
    assert comparisons.least_seeds({"command": "x --seeds 0,1", "minutes": 14}) == 3
    effects = comparisons.named(RESULTS.parent)
    assert effects["digits_rounds_fedavg"].differences == (8, 3, 6, 12, 5)  # 10, 5, 7, 14, 6 less 2, 2, 1, 2, 1
    assert f"{effects['digits_rounds_fedavg']:fewer}" == "6.8 fewer [2.6, 11.0]"
    rows = comparisons.rows(RESULTS.parent / "claims.csv")
    assert effects.keys() == {name for row in rows for name in comparisons.cited(row["effect"], row["more"])} | {
        row["minus"] for row in comparisons.rows(RESULTS.parent / "comparisons.csv") if row["minus"]
    }


def test_each_table_figure_and_theorem_of_the_papers_has_a_verdict_or_a_reason(comparisons: ModuleType) -> None:
    claims, docs = import_module("claims"), RESULTS.parent
    rows, items = comparisons.rows(docs / "claims.csv"), comparisons.rows(docs / "papers.csv")
    assert [item["number"] for item in items] == [str(n) for n in range(1, 64)]
    named = list[str]()
    for item in items:
        matches = claims.claims_on(rows, item)
        assert {row["in_the_paper"] for row in matches} == {*filter(None, item["claims"].split(";"))}, item
        assert matches or item["verdict"] in claims.OTHERS, item
        assert item["verdict"] != "not tried" or (item["missing"] and item["command"]), item
        assert all((docs / page).exists() for page in item["page"].split()), item
        named += [str(row) for row in matches]
    assert {*named} == {str(row) for row in rows if row["paper"] != "Others"}
    assert not any(item["claims"] and item["verdict"] for item in items)  # so a row contradicts no claim


CSV = """way,seed,share
a,0,4\na,1,5\na,2,6
b,0,0\nb,1,0\nb,2,0
c,0,6\nc,1,8\nc,2,4
"""
SITE = {
    "results/pages.yaml": """
mine:
  command: x --seeds 0,1,2
  minutes: 1
  tables: {main: {csv: mine.csv, rows: {by: way}, base: {way: b}, columns: {gain: [gain, share, 1]}}}
other: {command: x}
""",
    "comparisons.csv": """name,csv,where,rows,base,value,minus,margin
high,mine.csv,,way == 'a',way == 'b',share,,
near,mine.csv,,way == 'b',way == 'a',100 * share,,2000
less,mine.csv,,way == 'c',way == 'b',share,high,
few,mine.csv,seed < 2,way == 'c',way == 'b',share,,
late,mine.csv,seed > 0,way == 'c',way == 'b',share,,
""",
    "claims.csv": """claim,verdict,effect,runs,more,page
one,,{high} {near},,{few},results/mine.md
two,,{few} {less},,,results/mine.md
three,,{late},,,results/other.md
""",
}


def site(folder: Path, table: str = CSV, **changed: str) -> Path:
    """Write the files of a site. Differences by seed: high 4, 5, 6; near -100 times that; less 2, 3, -2; few 6, 8."""
    (folder / "results").mkdir(parents=True)
    for name, text in {**SITE, "results/mine.csv": table, **changed}.items():
        (folder / name).write_text(text)
    return folder


def test_verdicts_p_values_and_counts_of_a_page(comparisons: ModuleType, tmp_path: Path) -> None:
    # p of high 0.0131, of c - b in the table 0.0351, of few 0.0903, of less 0.58; near is high in another unit
    assert [(claim["verdict"], claim["runs"]) for claim in comparisons.claims(site(tmp_path / "site"))] == [
        ("on all seeds", "3 seeds, p = 0.052"),  # a seed costs less than five minutes; 4 * 0.0131
        ("in part", "2 seeds, p = 0.58"),
        ("in part", "2 seeds, p = 0.2"),
    ]
    assert f"{comparisons.named(tmp_path / 'site')['less']:0}".startswith("1 [")
    counts = re.findall(r" (\d+)(?: |\.$)", comparisons.summary("results/mine.md", tmp_path / "site"))
    assert counts == ["4", "2", "0"]
    typed = site(tmp_path / "typed", **{"claims.csv": SITE["claims.csv"].replace("two,,", "two,holds,")})
    with pytest.raises(ValueError, match=r"two .*in part"):
        comparisons.claims(typed)


@pytest.mark.parametrize("table", [CSV + CSV[15:], CSV.replace("c,2,4\n", ""), CSV.replace("c,2,4", "c,2,")])
def test_seeds_of_two_sides_are_equal_and_each_has_a_value(comparisons: ModuleType, table: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"high|less"):
        comparisons.named(site(tmp_path / "site", table))


def test_seeds_of_a_comparison_and_of_what_is_subtracted_are_the_same(comparisons: ModuleType, tmp_path: Path) -> None:
    other = "rest,mine.csv,seed < 2,way == 'c',way == 'b',share,late,\n"  # seeds 0, 1 minus seeds 1, 2
    with pytest.raises(ValueError, match=r"rest has seeds \(0, 1\), late \(1, 2\)"):
        comparisons.named(site(tmp_path / "site", **{"comparisons.csv": SITE["comparisons.csv"] + other}))


@pytest.mark.parametrize(
    ("table", "reported"),
    [
        (CSV, []),
        (CSV.replace("a,0,4", "a,0,5"), []),  # high: 5.3, inside [2.5, 7.5]
        (re.sub(r"a,(\d),\d", r"a,\1,0", CSV), ["high is 0", "near is 0", "less is"]),  # the effect of a vanished
        (CSV.replace("c,2,4", "c,2,-40"), ["less is", "late is"]),  # few has no seed 2
        ("way,seed,share\na,0,-10\na,1,4\na,2,14\n" + CSV[33:], ["high is", "near is"]),  # the means lie inside
        (CSV + "a,3,5\nb,3,0\nc,3,6\n", ["high is", "near is", "less is", "late is"]),  # a further seed
        (CSV.replace("c,1,8\n", ""), ["less: ValueError", "few: ValueError", "late: ValueError"]),
    ],
)
def test_a_vanished_effect_is_reported(regenerate: ModuleType, table: str, reported: list[str], tmp_path: Path) -> None:
    (folder := tmp_path / "made").mkdir()
    (folder / "mine.csv").write_text(table)
    sentences = regenerate.changed(site(tmp_path / "site"), folder)
    assert [text.startswith(start) for text, start in zip(sentences, reported, strict=True)] == [True] * len(reported)
    assert not regenerate.changed(tmp_path / "site", tmp_path)  # no file of a comparison was made


@pytest.mark.parametrize(("share", "is_reported"), [(9, False), (0, True), (-4, True)])
def test_one_seed_has_the_sign_only(regenerate: ModuleType, share: int, is_reported: bool, tmp_path: Path) -> None:
    one_seed = "name,csv,where,rows,base,value,minus,margin\nhigh,mine.csv,seed == 0,way == 'a',way == 'b',share,,\n"
    (tmp_path / "mine.csv").write_text(CSV.replace("a,0,4", f"a,0,{share}"))
    sentences = regenerate.changed(site(tmp_path / "site", **{"comparisons.csv": one_seed}), tmp_path)
    assert bool(sentences) == is_reported


def test_a_page_that_fails_has_an_outcome_and_only_folders_of_the_script_change(
    regenerate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import sys\nfrom pathlib import Path\nif '--help' not in sys.argv: Path(sys.argv[-1]).mkdir()\n"
    (script := tmp_path / "x.py").write_text(text)
    page = {"command": str(script), "minutes": 1, "compare": {"mine.csv": {"file": "lost.csv"}}}
    monkeypatch.setattr(regenerate, "pages", lambda: {"theirs": page, "mine": page, "late": page | {"compare": {}}})
    monkeypatch.setattr(regenerate, "RECORD", tmp_path / "regenerated.csv")
    regenerate.RECORD.write_text("page,date,minutes,torch,machine,outcome\n")
    (tmp_path / "theirs").mkdir()
    for old in ("late", "late.differs", "mine.differs"):  # of another commit; the command refuses a folder that exists
        (tmp_path / old / "runs").mkdir(parents=True)
        (tmp_path / old / regenerate.MARK).write_text("another")
    assert regenerate.main(["--pages", "theirs,mine,late", "--out", str(tmp_path)]) == 1
    outcomes = {name: row["outcome"] for name, row in regenerate.last_runs().items()}
    assert "did not make" in outcomes["theirs"]
    assert outcomes["mine"].startswith("FileNotFoundError")
    assert outcomes["late"] == "agrees"
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} == {"theirs", "late.differs", "mine.differs"}
    assert (tmp_path / "mine.differs" / regenerate.MARK).read_text() != "another"
    assert (tmp_path / "late.differs" / regenerate.MARK).read_text() == "another"  # no run replaces it


def test_a_page_with_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent / "_ext"))
    results, file = import_module("results"), tmp_path / "mine.csv"
    file.write_text("method,seed,share,rounds_to_target,rounds\nfedavg,0,0.5,3,9\nfedavg,1,0.7,,9\n")
    (tmp_path / "mine.md").write_text("![a picture](mine.png) <!-- table main -->")
    (tmp_path / "pictures.csv").write_text(f"picture,csv,crc\nmine.png,mine.csv,{results.crc(file)}")
    columns = {"%": ["std", "100 * share", 1], "rounds": ["std", "rounds_to_target", 1]}
    columns["seed 1"] = ["value", "share ± rounds", 1, "seed == 1"]
    table = {"csv": "mine.csv", "rows": {"by": "method"}, "columns": columns}
    page: dict[str, Any] = {"command": "sweeps/table1.py --seeds 0", "tables": {"main": table}}
    assert "| FedAvg | 60.0 ± 14.1 | >6 (missed by 1 of 2) | 0.7 ± 9.0 |" in results.table(table, tmp_path)
    assert not [*results.faults("mine", page, tmp_path)]
    file.write_text("method,seed,rounds_to_target\nfedavg,0,3\nfedavg,1,5\nscaffold,0,2\nscaffold,1,\n")
    gains = {name: [name, "rounds_to_target", 1] for name in ("gain", "ratio")}
    text = results.table(table | {"columns": gains, "base": {"method": "fedavg"}}, tmp_path)
    assert "| SCAFFOLD | - | - |" in text  # a run missed the target, and no column has the number of its rounds
    file.write_text("method,seed,share,rounds_to_target,rounds\nfedavg,0,0.5,3,9\nfedavg,1,0.7,,9\n")
    columns["%"][1], page["command"] = "shares", "sweeps/table1.py --sees 0"
    file.write_text(file.read_text() + "scaffold,0,0.5,3,9\n")
    page["tables"] |= {"unused": table | {"columns": {}}}
    words = ("unused", "shares", "--sees", "older than")
    for fault, word in zip(results.faults("mine", page, tmp_path), words, strict=True):
        assert fault.startswith("mine: ")
        assert word in fault
