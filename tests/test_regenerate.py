"""The script that makes pages' numbers anew: its list is true of the pages, and it tells numbers that differ."""

import re
import shlex
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = yaml.safe_load((RESULTS / "pages.yaml").read_text())


@pytest.fixture
def script() -> ModuleType:
    spec = spec_from_file_location("regenerate", RESULTS / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_command_and_its_csv_has_the_columns(page: str) -> None:
    text = re.sub(r"\s+", " ", (RESULTS / f"{page}.md").read_text())
    facts = PAGES[page]
    assert f"`python {facts['command']}`" in text
    assert facts["compare"]
    for name, how in facts["compare"].items():
        frame = pd.read_csv(RESULTS / name)
        assert {*how["rows"], *how["tolerance"]} <= set(frame.columns)
        assert not frame.duplicated(how["rows"]).any()
        assert all(frame[column].dtype.kind in "if" for column in how["tolerance"])


@pytest.mark.parametrize("page", PAGES)
def test_its_command_is_one_of_ours(page: str, sweeps: Callable[[str], ModuleType], tmp_path: Path) -> None:
    path, *words = shlex.split(PAGES[page]["command"].replace("DIR", str(tmp_path)))
    assert (ROOT / path).is_file()
    module = sweeps(Path(path).stem)
    assert module.arguments([*words, "--out", str(tmp_path)])


def test_the_cheapest_pages_are_taken_as_far_as_the_minutes_go(script: ModuleType) -> None:
    minutes = {"a": 5.0, "b": 1.0, "c": 4.0, "d": 30.0}
    assert script.within(9.9, minutes) == ["b", "c"]
    assert script.within(10, minutes) == ["b", "c", "a"]
    assert script.within(0.5, minutes) == []


def test_numbers_that_differ_are_told(script: ModuleType) -> None:
    one = pd.DataFrame({"method": ["x", "y"], "seed": [0, 0], "accuracy": [0.5, 0.75], "rounds": [None, 3.0]})
    other = one.iloc[::-1]
    tolerance = {"accuracy": 0.125, "rounds": 0}
    assert script.differences(one, other, ["method", "seed"], tolerance) == []
    assert script.differences(one, other.assign(accuracy=[0.625, 0.5]), ["method", "seed"], tolerance) == []
    (said,) = script.differences(one, other.assign(accuracy=[0.5, 0.5]), ["method", "seed"], tolerance)
    assert said == "accuracy is 0.25 off at y, 0 (allowed: 0.125)"
    (said,) = script.differences(one, other.assign(rounds=[3.0, 8.0]), ["method", "seed"], tolerance)
    assert said.startswith("rounds is inf off at x, 0")
    (said,) = script.differences(one, one[:1], ["method", "seed"], tolerance)
    assert said == "other rows: 2 committed, 1 made"


def test_a_page_is_made_compared_and_recorded(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a command that writes a CSV: what differs decides the exit code, a page has one row, others keep theirs."""
    command = tmp_path / "sweep.py"
    command.write_text(
        "import pathlib, sys\nif '--help' in sys.argv: print('--resume'); sys.exit()\nassert '--resume' in sys.argv\n"
        "out = pathlib.Path(sys.argv[-1]); out.mkdir(parents=True)\n(out / 'a.csv').write_text('n,x\\n1,2\\n')\n"
    )
    (tmp_path / "a_page.csv").write_text("n,x\n1,2\n")
    compare = {"a_page.csv": {"file": "a.csv", "rows": ["n"], "tolerance": {"x": 0}}}
    there = {"a_page": {"command": str(command), "minutes": 1, "compare": compare}}
    (tmp_path / "pages.yaml").write_text(yaml.safe_dump(there))
    (record := tmp_path / "regenerated.csv").write_text(
        "page,date,minutes,torch,machine,outcome\na_page,x,1,y,z,old\nother,x,1,y,z,agrees\n"
    )
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(script, "RECORD", record)
    assert script.main(["--out", str(tmp_path / "one")]) == 0
    assert pd.read_csv(record)["outcome"].tolist() == ["agrees", "agrees"]
    (tmp_path / "a_page.csv").write_text("n,x\n1,3\n")
    assert script.main(["--out", str(tmp_path / "two")]) == 1
    assert pd.read_csv(record)["outcome"].tolist() == ["a_page.csv: x is 1 off at 1 (allowed: 0)", "agrees"]
    with pytest.raises(SystemExit, match="2"):
        script.main(["--pages", "nothing"])
    assert "there is no page 'nothing'" in capsys.readouterr().err
