"""The sweeps as a user runs them: a real Ray, Ray Tune, W&B offline; small numbers, the same code."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedcommons.federation.rejections import told

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.ray


# One algorithm, one with memory, and every setting; options that stand later decide.
TABLE1 = [sys.executable, str(ROOT / "sweeps" / "table1.py"), "--preset=smoke", "--algorithms=scaffold",
          "--settings=real,local_synthetic,shuffled_synthetic"]  # fmt: skip


def script(name: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    plain = [sys.executable, str(ROOT / "sweeps" / name), "--preset=smoke"]
    command = [*(TABLE1 if name == "table1.py" else plain), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=cwd)


def results(out: Path) -> dict[str, bytes]:
    """All that must be equal between a sweep that was killed and one that was not."""
    found = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.glob("*/rounds.jsonl")}
    summary = json.loads((out / "summary.json").read_text())
    return found | {"summary": json.dumps(summary["cells"]).encode()}


@pytest.fixture(scope="module", autouse=True)
def temporary() -> Iterator[Path]:
    """Where sweeps have their temporary files. The name is short because sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


def left(temporary: Path) -> list[Path]:
    """What lies there, without a cache of torch's, which is empty as nothing is compiled."""
    return [
        path for path in temporary.iterdir() if not (path.name.startswith("torchinductor") and not [*path.iterdir()])
    ]


def contents(folder: Path) -> dict[Path, bytes]:
    """The files in there and below; some may vanish meanwhile."""
    found = {}
    for where, _, names in os.walk(folder):
        for path in (Path(where) / name for name in names):
            with suppress(OSError):
                found[path] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> tuple[Path, Path, str]:
    """A finished table 1: its folder, its artifacts, what it printed."""
    folder = tmp_path_factory.mktemp("table1")
    out, artifacts = folder / "out", folder / "artifacts"
    # relative folders, as a user would name them: a trial works in a folder of its own and must find them all the same
    done = script("table1.py", "--out=out", "--artifacts=artifacts", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert left(temporary) == []
    return out, artifacts, done.stdout


def test_table1_leaves_what_it_promises(table: tuple[Path, Path, str]) -> None:
    out, _, printed = table
    summary = json.loads((out / "summary.json").read_text())
    assert {(c["alpha"], c["setting"]) for c in summary["cells"]} == {
        (alpha, setting) for alpha in (0.01, 0.1) for setting in ("real", "local_synthetic", "shuffled_synthetic")
    }
    for cell in summary["cells"]:
        assert (out / cell["run_dir"] / "rounds.jsonl").exists()
        assert list((out / cell["run_dir"]).glob("wandb/offline-run-*/*.wandb"))
    for alpha in (0.01, 0.1):
        assert len({c["partition"] for c in summary["cells"] if c["alpha"] == alpha}) == 1
    assert (out / "table1.md").read_text() in printed
    parts = ["scaffold  alpha 0.01  N 4  C 1  real ", "scaffold  alpha 0.1  N 4  C 1  real ", "| data set"]
    assert all(printed.count(part) == 1 for part in parts)
    assert sorted(parts, key=printed.index) == parts  # row by row, before the table
    assert "failed" not in printed
    assert (out / "table1.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "table1.csv").read_text().splitlines()) == 7
    assert "8 generators trained" in printed
    assert re.search(r"Time: \d+ s \(generators \d+ s, cells \d+ s", printed)


def test_another_learning_rate_and_another_p_train_no_generator(table: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, artifacts, _ = table
    done = script(
        "table1.py", f"--out={tmp_path / 'out'}", f"--artifacts={artifacts}", "--client.lr=0.07",
        "--sharing.p=0.3", "--settings=shuffled_synthetic", "--alphas=0.1", "--federation.rounds=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "none had to be trained" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["cells"][0]["p"] == pytest.approx(0.3, abs=0.01)


def test_a_sweep_is_not_overwritten_and_resume_runs_nothing_twice(table: tuple[Path, Path, str]) -> None:
    out, artifacts, _ = table
    before = results(out)
    refused = script("table1.py", f"--out={out}", f"--artifacts={artifacts}")
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    again = script("table1.py", f"--out={out}", f"--artifacts={artifacts}", "--resume")
    assert again.returncode == 0, again.stderr
    assert "6 of 6 cells are done already" in again.stdout
    assert results(out) == before


def test_dry_run_prints_cells_and_artifacts_and_runs_nothing(table: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, artifacts, _ = table
    done = script("table1.py", f"--out={tmp_path / 'out'}", f"--artifacts={artifacts}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "6 cells, 0 generators to make. In all about " in done.stdout
    assert done.stdout.count("4 of 4 clients' synthetic images exist") == 4
    assert not (tmp_path / "out").exists()


def test_a_sweep_killed_half_way_and_resumed_equals_one_that_was_not(
    table: tuple[Path, Path, str], tmp_path: Path, temporary: Path
) -> None:
    whole, artifacts, _ = table
    out = tmp_path / "out"
    options = [f"--out={out}", f"--artifacts={artifacts}"]
    command = [*TABLE1, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    family: list[psutil.Process] = []
    deadline = time.monotonic() + 300
    while len(list(out.glob("*/summary.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for child in family:  # what Ray leaves behind of a killed driver, by pid
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=30)
    done = [folder for folder in whole.iterdir() if (out / folder.name / "summary.json").exists()]
    assert len(done) < len([*whole.glob("*/summary.json")]), "it ended before it could be killed"
    assert left(temporary)
    done = script("table1.py", *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert results(out) == results(whole)
    assert left(temporary) == []


RATE = "0.0719283"


def test_ctrl_c_stops_ray_and_says_how_to_go_on(table: tuple[Path, Path, str], tmp_path: Path, temporary: Path) -> None:
    """While the sweep runs nobody else can enter its temporary folders, and no file in them tells a run's config."""
    _, artifacts, _ = table
    out = tmp_path / "out"
    command = [*TABLE1, "--federation.rounds=2000", f"--client.lr={RATE}"]
    process = subprocess.Popen(
        [*command, f"--out={out}", f"--artifacts={artifacts}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(out.glob("*/rounds.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    modes = {stat.S_IMODE(folder.stat().st_mode) for folder in left(temporary)}
    written = contents(temporary)
    (cell, *_) = out.glob("*/rounds.jsonl")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in error
    assert "Traceback" not in error
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [p.name() for p in alive] == []
    assert modes == {0o700}
    assert not [path for path, content in written.items() if RATE.encode() in content]
    states = [content for path, content in written.items() if path.name.startswith("experiment_state")]
    assert [content for content in states if cell.parent.name.encode() in content]
    assert left(temporary) == []


def test_trials_with_actors_of_their_own_give_the_same_bits(table: tuple[Path, Path, str], tmp_path: Path) -> None:
    whole, artifacts, _ = table
    done = script(
        "table1.py", f"--out={tmp_path / 'out'}", f"--artifacts={artifacts}", "--settings=real", "--alphas=0.1",
        "--federation.executor=ray_actors", "--federation.actors=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (ours,) = (tmp_path / "out").glob("*/rounds.jsonl")
    assert ours.read_bytes() == (whole / ours.parent.name / "rounds.jsonl").read_bytes()


def test_a_request_that_cannot_be_placed_is_refused_at_once(tmp_path: Path) -> None:
    done = script(
        "table1.py", f"--out={tmp_path / 'out'}", "--settings=real", "--federation.executor=ray_actors",
        "--federation.actors=500", "--federation.blocks=500",
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs 500 CPU" in done.stderr


def test_tune_sweeps_fields_reusing_generators(table: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, artifacts, _ = table
    out = tmp_path / "out"
    done = script(
        "tune.py", f"--out={out}", f"--artifacts={artifacts}", "--sharing=shuffled_synthetic",
        "--space=alpha=0.01,0.1", "--space=p=uniform(0,0.5)",
        "--space=lr=loguniform(0.01,0.1)", "--samples=2", "--metric=best_accuracy", "--scheduler=asha",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "none had to be trained" in done.stdout
    cells = json.loads((out / "summary.json").read_text())["cells"]
    assert len(cells) == 4
    assert len({c["sharing.p"] for c in cells}) == 2
    # ASHA may stop some half-way, but those that played all rounds are finished and summarised
    assert {c["status"] for c in cells if c["rounds"] == 3} == {"finished"}
    again = script(
        "tune.py", f"--out={out}", f"--artifacts={artifacts}", "--sharing=shuffled_synthetic",
        "--space=alpha=0.01,0.1", "--space=p=uniform(0,0.5)",
        "--space=lr=loguniform(0.01,0.1)", "--samples=2", "--metric=best_accuracy", "--scheduler=asha", "--resume",
    )  # fmt: skip
    # those that ASHA gave up are not run again; it compares runs of one alpha with each other
    assert again.stdout.count("2 of 2 cells are done already") == 2
    for alpha in (0.01, 0.1):
        found = [(c["status"] != "finished", -c["best_accuracy"]) for c in cells if c["partition.alpha"] == alpha]
        assert found == sorted(found)
    for name in ("tune.md", "tune.csv", "tune.png"):
        assert (out / name).stat().st_size > 0


def test_a_run_that_fails_takes_no_other_with_it_and_is_named_in_one_line(tmp_path: Path) -> None:
    """With a learning rate of 1e30 every client diverges, and a round without a reply stops the run."""
    out, options = tmp_path / "out", ("--space=lr=0.1,1e30", "--sharing.setting=real", "--federation.rounds=1")

    def sweep(*more: str) -> None:
        done = script("tune.py", "--out=out", *options, *more, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        (cell,) = [c for c in json.loads((out / "summary.json").read_text())["cells"] if c["status"] == "finished"]
        assert cell["client.lr"] == 0.1
        (said,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
        name, _, why = said.removeprefix("failed: ").partition(": ")
        assert why.startswith("round 1, FedAvg: every reply was rejected; client 0: delta has values that are not")
        assert why.endswith(f"(traceback: out/{name}/error.txt)")
        assert "Traceback" in (out / name / "error.txt").read_text()
        assert "Traceback" not in done.stdout + done.stderr

    sweep()
    (summary,) = out.glob("*/summary.json")
    summary.unlink()  # as if it had been killed when no round was left to play
    sweep("--resume")


def test_replies_that_trials_rejected_are_told_by_the_sweep(tmp_path: Path) -> None:
    options = ("--settings=real", "--alphas=0.1", "--algorithms=fedavg", "--federation.max_norm=1.6")
    done = script("table1.py", "--out=out", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = (tmp_path / "out").glob("*/summary.json")
    name, rejected = summary.parent.name, json.loads(summary.read_text())["rejected"]
    said = f"{name}: {told(rejected)}"
    assert rejected
    assert f"{said}, see rejected in out/{name}/summary.json\n" in done.stdout
    assert f"{said}.\n" in (tmp_path / "out" / "table1.md").read_text()
    assert f"{told(rejected)}, see rejected in " in (summary.parent / "messages.log").read_text()
