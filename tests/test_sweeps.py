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

SMALL = ["--preset=smoke", "--data.limit=100", "--client.epochs=1", "--federation.rounds=2"]
QUICK = "--generator.epochs=1"
REAL = ["table1.py", *SMALL, "--algorithms=scaffold", "--settings=real"]  # an algorithm with memory
TABLE1 = [*REAL, "--settings=real,shuffled_synthetic", QUICK]  # options that stand later decide
RATE = "0.0719283"
Table = tuple[Path, Path, str]


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweeps" / name), *options]


@pytest.fixture(scope="module", autouse=True)
def temporary() -> Iterator[Path]:
    """Where sweeps with a Ray of their own have their temporary files; the name is short because sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def left(temporary: Path) -> list[Path]:
    """Return what lies there, without a cache of torch's, which is empty as nothing is compiled."""
    return [
        path for path in temporary.iterdir() if not (path.name.startswith("torchinductor") and not [*path.iterdir()])
    ]


def results(out: Path) -> dict[str, bytes]:
    """Return all that must be equal between a sweep that was killed and one that was not."""
    rounds = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.glob("*/rounds.jsonl")}
    summary = json.loads((out / "summary.json").read_text())
    return rounds | {"summary": json.dumps(summary["cells"]).encode()}


def wait_for(process: subprocess.Popen[str], out: Path, pattern: str, number: int) -> list[psutil.Process]:
    """Wait until so many files are there; the processes of the sweep."""
    deadline = time.monotonic() + 300
    while len(list(out.glob(pattern))) < number and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, shared_ray: dict[str, str]) -> Table:
    """A finished table 1: its folder, its artifacts, what it printed."""
    folder = tmp_path_factory.mktemp("table1")
    # relative folders, as a user would name them: a trial works in a folder of its own and must find them all the same
    words = command(*TABLE1, "--out=out", "--artifacts=artifacts")
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, cwd=folder, env=shared_ray)
    assert done.returncode == 0, done.stderr
    return folder / "out", folder / "artifacts", done.stdout


def sweep(shared_ray: dict[str, str], folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a sweep in this folder on the tests' Ray."""
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=400, cwd=folder, env=shared_ray)
    assert done.returncode == code, done.stderr
    return done


def test_table1_leaves_what_it_promises(table: Table) -> None:
    out, _, printed = table
    summary = json.loads((out / "summary.json").read_text())
    assert {(c["alpha"], c["setting"]) for c in summary["cells"]} == {
        (alpha, setting) for alpha in (0.01, 0.1) for setting in ("real", "shuffled_synthetic")
    }
    for cell in summary["cells"]:
        assert (out / cell["run_dir"] / "rounds.jsonl").exists()
        assert list((out / cell["run_dir"]).glob("wandb/offline-run-*/*.wandb"))
    for alpha in (0.01, 0.1):
        assert len({c["partition"] for c in summary["cells"] if c["alpha"] == alpha}) == 1
    assert (out / "table1.md").read_text() in printed
    parts = ["scaffold  alpha 0.01  N 4  C 1  real ", "scaffold  alpha 0.1  N 4  C 1  real ", "| data set"]
    assert all(printed.count(part) == 1 for part in parts)
    assert max(map(printed.index, parts[:2])) < printed.index(parts[2])  # rows as they end, before the table
    assert "failed" not in printed
    assert (out / "table1.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "table1.csv").read_text().splitlines()) == 5
    assert "8 generators trained" in printed
    assert re.search(r"Time: \d+ s \(generators \d+ s, cells \d+ s", printed)


def test_another_learning_rate_and_another_p_train_no_generator(
    table: Table, shared_ray: dict[str, str], tmp_path: Path
) -> None:
    """And trials with actors of their own give the same bits."""
    whole, artifacts, _ = table
    more = ["--client.lr=0.07", "--sharing.p=0.3", "--settings=shuffled_synthetic", "--alphas=0.1"]
    done = sweep(shared_ray, tmp_path, *TABLE1, "--out=out", f"--artifacts={artifacts}", *more)
    assert "none had to be trained" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["cells"][0]["p"] == pytest.approx(0.3, abs=0.01)
    actors = ["--alphas=0.1", "--federation.executor=ray_actors", "--federation.actors=2"]
    sweep(shared_ray, tmp_path, *REAL, "--out=actors", f"--artifacts={artifacts}", *actors)
    (ours,) = (tmp_path / "actors").glob("*/rounds.jsonl")
    assert ours.read_bytes() == (whole / ours.parent.name / "rounds.jsonl").read_bytes()


def test_a_sweep_is_not_overwritten_resume_runs_nothing_twice_and_a_dry_run_runs_nothing(
    table: Table, shared_ray: dict[str, str], tmp_path: Path
) -> None:
    out, artifacts, _ = table
    before, words = results(out), [*TABLE1, f"--artifacts={artifacts}"]
    assert "--resume" in sweep(shared_ray, tmp_path, *words, f"--out={out}", code=2).stderr
    assert "4 of 4 cells are done already" in sweep(shared_ray, tmp_path, *words, f"--out={out}", "--resume").stdout
    assert results(out) == before
    dry = sweep(shared_ray, tmp_path, *words, "--out=new", "--dry-run").stdout
    assert "4 cells, 0 generators to make. In all about " in dry
    assert dry.count("4 of 4 clients' synthetic images exist") == 2
    too_many = ["--federation.executor=ray_actors", "--federation.actors=500", "--federation.blocks=500"]
    refused = sweep(shared_ray, tmp_path, *REAL, "--out=new", *too_many, code=2)
    assert "needs 500 CPU" in refused.stderr
    assert not (tmp_path / "new").exists() or not [*(tmp_path / "new").glob("*/rounds.jsonl")]


def test_a_sweep_killed_half_way_and_resumed_equals_one_that_was_not(
    table: Table, tmp_path: Path, temporary: Path
) -> None:
    """With a Ray of its own each time, which leaves nothing behind in the end."""
    whole, artifacts, _ = table
    out, env = tmp_path / "out", {**os.environ, "TMPDIR": str(temporary)}
    words = command(*TABLE1, f"--out={out}", f"--artifacts={artifacts}")
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True
    )
    family = wait_for(process, out, "*/summary.json", 1)
    process.kill()
    process.wait()
    for child in family:  # what Ray leaves behind of a killed driver, by pid
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=30)
    assert len([*out.glob("*/summary.json")]) < 4, "it ended before it could be killed"
    assert left(temporary)
    done = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    assert results(out) == results(whole)
    assert left(temporary) == []


def test_ctrl_c_stops_ray_and_says_how_to_go_on(table: Table, tmp_path: Path, temporary: Path) -> None:
    """While the sweep runs no other user can enter its temporary folders, and no file in them has a run's config."""
    out, env = tmp_path / "out", {**os.environ, "TMPDIR": str(temporary)}
    words = command(*REAL, "--federation.rounds=2000", f"--client.lr={RATE}")
    process = subprocess.Popen(
        [*words, f"--out={out}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    )
    family = wait_for(process, out, "*/rounds.jsonl", 1)
    modes = {stat.S_IMODE(folder.stat().st_mode) for folder in left(temporary)}
    written: dict[Path, bytes] = {}
    for where, _, names in os.walk(temporary):
        for path in (Path(where) / name for name in names):
            with suppress(OSError):  # some vanish meanwhile
                written[path] = path.read_bytes()
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


def test_tune_sweeps_fields_reusing_generators(table: Table, shared_ray: dict[str, str], tmp_path: Path) -> None:
    _, artifacts, _ = table
    words = [
        "tune.py", *SMALL, QUICK, "--out=out", f"--artifacts={artifacts}", "--sharing=shuffled_synthetic",
        "--space=alpha=0.01,0.1", "--space=p=uniform(0,0.5)", "--space=lr=loguniform(0.01,0.1)", "--samples=2",
        "--metric=best_accuracy", "--scheduler=asha",
    ]  # fmt: skip
    assert "none had to be trained" in sweep(shared_ray, tmp_path, *words).stdout
    cells = json.loads((tmp_path / "out" / "summary.json").read_text())["cells"]
    assert len(cells) == 4
    assert len({c["sharing.p"] for c in cells}) == 2
    # ASHA may stop some half-way, but those that ran all rounds are finished and summarised
    assert {c["status"] for c in cells if c["rounds"] == 2} == {"finished"}
    # those that ASHA gave up are not run again; it compares runs of one alpha with each other
    assert sweep(shared_ray, tmp_path, *words, "--resume").stdout.count("2 of 2 cells are done already") == 2
    for alpha in (0.01, 0.1):
        order = [(c["status"] != "finished", -c["best_accuracy"]) for c in cells if c["partition.alpha"] == alpha]
        assert order == sorted(order)
    for name in ("tune.md", "tune.csv", "tune.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_a_run_that_fails_takes_no_other_with_it_and_is_named_in_one_line(
    shared_ray: dict[str, str], tmp_path: Path
) -> None:
    """With a learning rate of 1e30 every client diverges, and a round without a reply stops the run."""
    out = tmp_path / "out"
    words = ["tune.py", *SMALL, "--out=out", "--space=lr=0.1,1e30", "--sharing.setting=real", "--federation.rounds=1"]

    def tune(*more: str) -> None:
        done = sweep(shared_ray, tmp_path, *words, *more, code=1)
        (cell,) = [c for c in json.loads((out / "summary.json").read_text())["cells"] if c["status"] == "finished"]
        assert cell["client.lr"] == 0.1
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
        name, _, why = line.removeprefix("failed: ").partition(": ")
        assert "every reply was rejected; client 0: " in why
        assert f"out/{name}/error.txt" in why
        assert "Traceback" in (out / name / "error.txt").read_text()
        assert "Traceback" not in done.stdout + done.stderr

    tune()
    (summary,) = out.glob("*/summary.json")
    summary.unlink()  # as if it had been killed when no round was left
    tune("--resume")


def test_replies_that_trials_rejected_are_reported_by_the_sweep(shared_ray: dict[str, str], tmp_path: Path) -> None:
    words = [
        "--data.limit=200",
        "--alphas=0.1",
        "--algorithms=fedavg",
        "--client.epochs=2",
        "--federation.max_norm=0.85",
    ]
    done = sweep(shared_ray, tmp_path, *REAL, "--out=out", *words)
    (summary,) = (tmp_path / "out").glob("*/summary.json")
    rejected = json.loads(summary.read_text())["rejected"]
    assert rejected
    assert f"{summary.parent.name}: {told(rejected)}, see rejected in " in done.stdout
    assert f"{summary.parent.name}: {told(rejected)}." in (tmp_path / "out" / "table1.md").read_text()
    assert f"{told(rejected)}, see rejected in " in (summary.parent / "messages.log").read_text()
