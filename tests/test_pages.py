"""Commands of pages are ones that the sweeps take; those of the pages that docs/played.py names are run."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
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
    matches = (re.match(r"(?:\$ )?(python sweeps/[a-z]\w*\.py.*?)(?:\s+#.*)?$", one) for one in (*spans, *lines))
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
    load, claims = cache(sweeps), pd.read_csv(ROOT / "docs/claims.csv")["command"].dropna()
    lines = [one for one in claims if "sweeps/" in one]  # the site's build checks those of pages.yaml
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


def test_numbers_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS))
    script = import_module("regenerate")
    other = (one := pd.DataFrame({"method": ["x", "y"], "accuracy": [0.5, 0.75]})).assign(accuracy=[0.5, 0.5])
    assert "accuracy is 0.25 off at y" in " ".join(script.differences(one, other, ["method"], {"accuracy": 0.125}))
    assert not script.differences(one, other, ["method"], {"accuracy": 0.25})


def test_a_page_with_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent / "_ext"))
    results, mine = import_module("results"), tmp_path / "mine.csv"
    mine.write_text("method,seed,share,rounds_to_target,rounds\nfedavg,0,0.5,3,9\nfedavg,1,0.7,,9\n")
    (tmp_path / "mine.md").write_text("![a picture](mine.png) <!-- table main -->")
    (tmp_path / "pictures.csv").write_text(f"picture,csv,crc\nmine.png,mine.csv,{results.crc(mine)}")
    columns = {"%": ["std", "100 * share", 1], "rounds": ["std", "rounds_to_target", 1]}
    columns["seed 1"] = ["value", "share ± rounds", 1, "seed == 1"]
    table = {"csv": "mine.csv", "rows": {"by": "method"}, "columns": columns}
    page: dict[str, Any] = {"command": "sweeps/table1.py --seeds 0", "tables": {"main": table}}
    assert "| FedAvg | 60.0 ± 14.1 | >6 (missed by 1 of 2) | 0.7 ± 9.0 |" in results.table(table, tmp_path)
    assert not [*results.faults("mine", page, tmp_path)]
    columns["%"][1], page["command"] = "shares", "sweeps/table1.py --sees 0"
    mine.write_text(mine.read_text() + "scaffold,0,0.5,3,9\n")
    page["tables"] |= {"unused": table | {"columns": {}}}
    words = ("unused", "shares", "--sees", "older than")
    for fault, word in zip(results.faults("mine", page, tmp_path), words, strict=True):
        assert fault.startswith("mine: ")
        assert word in fault
