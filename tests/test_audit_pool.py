"""The sweep that audits a pool: of a generator that copies, and of stages that fit images to noisy sums."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from broken_noise import break_noise

from fedcommons.audits.directions import Estimate
from fedcommons.audits.lower_bound import lower_bound
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from papers.fedssyn.audits import GRID, words
from papers.fedssyn.noisy_sums import audited

PARROT = ["--preset", "smoke", "--generator", "user_parts:Parrot"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the sweep is called."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_a_pool_of_copies_is_called_memorised(
    here: Path, sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*PARROT, "--shadows", "4", "--canaries", "40", "--out", "out"]
    sweep = sweeps("audit_pool")
    assert sweep.audit_pool([*argv, "--dry-run"]) == 0
    assert not (here / "out").exists()
    assert "4 generators to train, then 4 shadows and 2 with canaries" in capsys.readouterr().out
    assert sweep.audit_pool(argv) == 0
    record = json.loads((here / "out" / "seed_0.json").read_text())["audit"]
    for space in ("pixels", "features"):
        found = record["spaces"][space]["all"]
        assert found["memorised"]
        assert found["near_copies"] == found["images"] == 200
        assert found["finds"] is None
    assert record["spaces"]["pixels"]["all"]["identical"] == 200
    assert set(record["attacks"]) == {"pool"}
    assert record["attacks"]["pool"]["auc"] > 0.8
    e = record["epsilon"]
    assert (e["canaries"], e["guesses"]) == (40, 10)
    assert e["right"] >= 8
    assert e["at_least"] == lower_bound(40, 10, e["right"], 1e-5) > 0
    assert e["ceiling"] == lower_bound(40, 10, 10, 1e-5) >= e["at_least"]
    assert (e["reported"], e["verdict"]) == (None, "no epsilon is reported")
    table = (here / "out" / "audit_pool.md").read_text()
    assert "**memorised**" in table
    assert f"trained on {record['validation']} validation images" in table
    assert "untrained" in words({0: {**record, "validation": 0}}, 4)
    assert re.search(r"epsilon reported +\| none ", table)
    assert f"| {e['at_least']:.3g} ({e['ceiling']:.3g}) " in table
    for name in ("roc", "pairs"):
        assert (here / "out" / f"audit_pool_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_seeds_are_audited_once_and_their_mean_and_range_stand_beside_them(
    here: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    """A seed of three is the audit that it is alone; a second call only reports, and one of other facts is refused."""
    argv = [*PARROT, "--shadows", "2", "--canaries", "8"]
    sweep = sweeps("audit_pool")
    assert sweep.audit_pool([*argv, "--seed", "1", "--out", "one"]) == 0
    assert sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two"]) == 0
    one, two = here / "one", here / "two"
    assert (one / "seed_1.json").read_bytes() == (two / "seed_1.json").read_bytes()
    records = [json.loads((two / f"seed_{seed}.json").read_text())["audit"] for seed in (0, 1)]
    areas = [record["attacks"]["pool"]["auc"] for record in records]
    (line,) = (line for line in (two / "audit_pool.md").read_text().splitlines() if "pool: AUC" in line)
    assert line.split("|")[-2].strip() == f"{sum(areas) / 2:.3f} [{min(areas):.3f}, {max(areas):.3f}]"
    for record in records:
        curve = record["attacks"]["pool"]["roc"]
        assert (len(curve), curve[-1]) == (len(GRID), 1)
        assert curve == sorted(curve)
        assert float(np.trapezoid(curve, GRID)) == pytest.approx(record["attacks"]["pool"]["auc"], abs=0.02)
    with (two / "audit_pool.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["images"] for row in rows if row["group"] == "all"] == ["200"] * 4  # two seeds, two spaces
    with pytest.raises(UserError, match="holds audits already"):
        sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two"])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in two.glob("seed_*.json")}
    assert sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two", "--resume"]) == 0
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in two.glob("seed_*.json")}
    with pytest.raises(UserError, match="shadows = 2, and now it is 3"):
        sweep.audit_pool([*argv[:-3], "3", *argv[-2:], "--seeds", "0,1", "--out", "two", "--resume"])


OF_SUMS = ["--sharing", "merf", "--sharing.target_epsilon", "10"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seeds", "0,1", "--seed", "2"], "use --seeds instead of 2"),
        (["--setting", "real"], "trains no generators"),
        (["--shadows", "1"], r"--shadows must lie in \[2, 10000\], got 1"),
        (["--canaries", "3"], r"--canaries must lie in \[4, 1e9\], got 3"),
        (["--generator", "user_parts:Parrot", "--attacked", "4", "--dry-run"], r"--attacked .* got 4"),
        ([*OF_SUMS, "--attacked", "10000"], r"--attacked .* got 10000"),
        ([*OF_SUMS[:2], "--sharing.noise_multiplier", "0"], "without noise"),
        ([*OF_SUMS, "--shadows", "5"], "--shadows is for audits of generators"),
        ([*OF_SUMS, "--resume"], "--resume is for audits of generators"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    more: list[str], said: str, here: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    with pytest.raises(UserError, match=said):
        sweeps("audit_pool").audit_pool(["--preset", "smoke", *more])


HELD_OUT = """
import torch

def of(label, n):
    x = torch.randint(0, 256, (200 + n, 1, 8, 8), dtype=torch.uint8)
    y = torch.arange(200 + n) % 2
    return (x[:200], y[:200]), (x[200:], y[200:] if label is None else torch.full((n,), label))

def few():
    return of(None, 3)

def others():
    return of(2, 10)
"""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("few", r"at least 4 test images.*theirs.py:few has 3"),
        ("others", "needs held-out images of client 0's classes"),
    ],
)
@pytest.mark.long
def test_an_audit_without_held_out_data_is_refused_before_any_work(
    data: str, said: str, here: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    (here / "theirs.py").write_text(HELD_OUT)
    argv = ["--preset", "smoke", "--data.name", f"theirs.py:{data}", "--data.validation", "0", "--generator.rho", "1"]
    with pytest.raises(UserError, match=said):
        sweeps("audit_pool").audit_pool([*argv, "--out", "out"])
    assert [path.name for path in (here / "out").glob("*") if not path.name.startswith(".")] == []


STAGES = {
    "merf": ["--sharing.features", "20", "--partition.n_clients", "2"],
    "ndpdc": ["--sharing.iterations", "30", "--sharing.batch", "5", "--partition.n_clients", "2"],
}


@pytest.fixture(scope="module")
def sweep(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("audit_pool")


def found(sweep: ModuleType, setting: str, canaries: int, *more: str) -> Estimate:
    argv = ["--preset", "smoke", "--sharing", setting, "--sharing.target_epsilon", "10", *STAGES[setting], *more]
    return audited(prepare(sweep.arguments(argv).config), None, canaries)[1]


@pytest.mark.long
@pytest.mark.parametrize("setting", STAGES)
def test_right_sums_say_most_of_what_is_reported_and_no_more(sweep: ModuleType, setting: str) -> None:
    """merf: with one step and q = 1 mu says all; ndpdc: mu says less than who weighs each step by itself."""
    of = found(sweep, setting, 20 if setting == "merf" else 100)
    assert of.faults == []
    assert 0.75 * of.ceiling < of.epsilon < of.reported == pytest.approx(10, abs=0.01)
    assert of.ceiling == pytest.approx(of.reported, rel=1e-3 if setting == "merf" else 0.5)
    assert of.verdict == "not above the reported one"
    if setting == "merf":
        summed = found(sweep, "merf", 40, "--sharing.noise", "summed")
        assert summed.faults == []
        assert summed.noise[0] == pytest.approx(summed.sigma, rel=0.1)


@pytest.mark.parametrize(("setting", "name"), [("merf", "half"), ("ndpdc", "half"), ("ndpdc", "the same in each step")])
@pytest.mark.long
def test_a_broken_stream_of_secret_noise_is_found(
    sweep: ModuleType, setting: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_noise(monkeypatch, name)
    of = found(sweep, setting, 20)
    assert any("the noise multiplier is about" in fault for fault in of.faults)
    assert of.epsilon > of.reported
    assert of.verdict == "above the reported one"


def test_the_sweep_writes_a_line_for_each_seed(
    sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "smoke", "--sharing", "merf", "--sharing.target_epsilon", "5", *STAGES["merf"]]
    argv += ["--seeds", "0,1", "--out", str(tmp_path / "out")]
    assert sweep.audit_pool([*argv, "--dry-run"]) == 0
    assert "Nothing is trained" in capsys.readouterr().out
    assert sweep.audit_pool(argv) == 0
    text = (tmp_path / "out" / "audit_pool.md").read_text()
    assert text.startswith("**SMOKE")
    rows = re.findall(r"^\| ([01]) +\| [01] +\| 1 +\| 0\.89\d* +\| 1 ", text, re.M)
    assert rows == ["0", "1"]
    with pytest.raises(UserError, match="holds an audit already"):
        sweep.audit_pool([*argv, "--sharing.features", "30"])
    assert (tmp_path / "out" / "audit_pool.md").read_text() == text
