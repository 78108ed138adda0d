"""The sweeps as a user runs them: a real Ray, Ray Tune; small numbers, the same code."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import ray
from sweep_runs import sweep_output

from fedcommons.core.rejections import rejection_summary
from fedcommons.runs.experiment import run

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_core")]

SMALL = ["--preset=smoke", "--data.limit=100", "--client.epochs=1", "--federation.rounds=2"]
OFF = "--wandb=off"
QUICK = "--generator.epochs=1"
REAL = [*SMALL, "--algorithms=scaffold", "--alphas=0.1", "--settings=real"]  # an algorithm with memory
TABLE1 = [*REAL, "--settings=real,shuffled_synthetic", QUICK]  # options that stand later decide
RATE = "0.0719283"
Table = tuple[Path, Path, str]


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "sweeps" / name), *options]


def wait_for_rounds(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until a run of the sweep has begun."""
    deadline = time.monotonic() + 300
    while not list(out.glob("*/rounds.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def table(
    tmp_path_factory: pytest.TempPathFactory, shared_ray: dict[str, str], sweeps: Callable[[str], ModuleType]
) -> Table:
    """A table 1 that was killed half-way and resumed: its folder, its artifacts, what it printed in the end."""
    folder = tmp_path_factory.mktemp("table1")
    # relative folders, as a user would name them: a trial works in a folder of its own and must find them all the same
    words = [*TABLE1, "--out=out", "--artifacts=artifacts"]
    process = subprocess.Popen(
        command("table1.py", *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, cwd=folder,
        env=shared_ray,
    )  # fmt: skip
    wait_for_rounds(process, folder / "out")
    process.kill()
    process.wait()
    assert len([*folder.glob("out/*/summary.json")]) < 2, "it ended before it could be killed"
    deadline = time.monotonic() + 180
    while ray.available_resources().get("CPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)  # Ray ends the killed sweep's processes
    return folder / "out", folder / "artifacts", sweep_output(sweeps("table1").table1, folder, *words, "--resume")


def test_a_sweep_killed_half_way_and_resumed_leaves_what_it_promises(
    table: Table, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Each of its runs has the bits of one process."""
    out, artifacts, printed = table
    script = sweeps("table1")
    rows = script.entries(script.arguments([*TABLE1, OFF, f"--out={tmp_path}", f"--artifacts={artifacts}"]))
    for cell in (cells := [entry.cell for entry in rows]):
        assert list((out / cell.name).glob("wandb/offline-run-*/*.wandb"))
        run(cell.config, tmp_path / cell.name, say=lambda _: None)
        assert (tmp_path / cell.name / "rounds.jsonl").read_bytes() == (out / cell.name / "rounds.jsonl").read_bytes()
    summary = json.loads((out / "summary.json").read_text())
    assert {(c["alpha"], c["setting"]) for c in summary["cells"]} == {
        (0.1, "real"), (0.1, "shuffled_synthetic"), (0.1, "server_synthetic")
    }  # fmt: skip
    assert (out / "table1.md").read_text() in printed
    assert "failed" not in printed
    assert (out / "table1.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "table1.csv").read_text().splitlines()) == 1 + len(cells) + 1  # the central model


def test_ctrl_c_stops_ray_and_says_how_to_go_on(tmp_path: Path) -> None:
    """While the sweep runs no other user can enter its temporary folders, and no file in them has a run's config."""
    out, written = tmp_path / "out", dict[Path, bytes]()
    words = command("table1.py", *REAL, "--federation.rounds=2000", f"--client.lr={RATE}", OFF, f"--out={out}")
    with tempfile.TemporaryDirectory(prefix="t-") as name:  # short because sockets lie there
        temporary = Path(name)

        def list_files() -> list[Path]:
            """Return the files, without a cache of torch's, which is empty as nothing is compiled."""
            return [p for p in temporary.iterdir() if not (p.name.startswith("torchinductor") and not [*p.iterdir()])]

        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": name}
        )
        wait_for_rounds(process, out)
        family = psutil.Process(process.pid).children(recursive=True)
        modes = {stat.S_IMODE(folder.stat().st_mode) for folder in list_files()}
        for path in temporary.rglob("*"):
            with suppress(OSError):  # some vanish meanwhile, and others are folders or sockets
                written[path] = path.read_bytes()
        (cell, *_) = out.glob("*/rounds.jsonl")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
        assert process.returncode == 130
        assert "--resume" in error
        assert "Traceback" not in error
        _, alive = psutil.wait_procs(family, timeout=120)
        assert [p.name() for p in alive] == []
        assert list_files() == []
    assert modes == {0o700}
    assert not [path for path, content in written.items() if RATE.encode() in content]
    states = [content for path, content in written.items() if path.name.startswith("experiment_state")]
    assert [content for content in states if cell.parent.name.encode() in content]


def test_tune_sweeps_fields_reusing_generators(
    table: Table, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    _, artifacts, _ = table
    words = [
        *SMALL, OFF, QUICK, "--out=out", f"--artifacts={artifacts}", "--sharing=shuffled_synthetic",
        "--space=alpha=0.1", "--space=p=uniform(0,0.5)", "--space=lr=loguniform(0.01,0.1)", "--samples=2",
        "--metric=best_accuracy", "--scheduler=asha",
    ]  # fmt: skip
    assert "none had to be trained" in sweep_output(sweeps("tune").tune, tmp_path, *words)
    cells = json.loads((tmp_path / "out" / "summary.json").read_text())["cells"]
    assert len(cells) == len({c["sharing.p"] for c in cells}) == 2
    # ASHA may stop some half-way, but those that ran all rounds are finished and summarised
    assert {c["status"] for c in cells if c["rounds"] == 2} == {"finished"}
    order = [(c["status"] != "finished", -c["best_accuracy"]) for c in cells]
    assert order == sorted(order)
    assert all((tmp_path / "out" / name).stat().st_size > 0 for name in ("tune.md", "tune.csv", "tune.png"))


def test_a_sweep_whose_time_is_over_ends_cleanly_and_goes_on(
    ray_session: None, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """The first run takes longer than the budget, and the second does not start beside it."""
    out = tmp_path / "out"
    words = [*SMALL, OFF, "--out=out", "--sharing=real", "--space=lr=0.1,0.2", "--jobs=1", "--scheduler=median"]
    printed = sweep_output(sweeps("tune").tune, tmp_path, *words, "--rounds=100000", "--time-budget=30")
    assert "time budget" in printed
    assert "2 of 2 runs" in printed
    assert len([*out.glob("*/config.yaml")]) <= 1
    assert not [*out.glob("*/summary.json"), *out.glob("*/stopped-by-scheduler")]
    again = sweep_output(sweeps("tune").tune, tmp_path, *words, "--rounds=2", "--resume", "--time-budget=1h")
    assert "time budget" not in again
    assert len([*out.glob("*/summary.json")]) == 2


def test_a_run_that_fails_takes_no_other_with_it_and_rejected_replies_are_reported(
    ray_session: None, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """With a learning rate of 1e30 every client diverges, and a round without a reply stops the run."""
    out = tmp_path / "out"
    words = [*SMALL, OFF, "--out=out", "--space=lr=0.1,1e30", "--federation.rounds=1", "--data.limit=200"]
    more = ["--sharing.setting=real", "--client.epochs=2", "--federation.max_norm=0.85"]
    printed = sweep_output(sweeps("tune").tune, tmp_path, *words, *more, code=1)
    (cell,) = [c for c in json.loads((out / "summary.json").read_text())["cells"] if c["status"] == "finished"]
    assert cell["client.lr"] == 0.1
    (line,) = [line for line in printed.splitlines() if line.startswith("failed: ")]
    name, _, why = line.removeprefix("failed: ").partition(": ")
    assert "every reply was rejected; client 0: " in why
    assert f"out/{name}/error.txt" in why
    assert "Traceback" in (out / name / "error.txt").read_text()
    assert "Traceback" not in printed
    (summary,) = out.glob("*/summary.json")
    rejected = json.loads(summary.read_text())["rejected"]
    assert rejected
    assert f"{summary.parent.name}: {rejection_summary(rejected)}, see rejected in " in printed
    assert f"{rejection_summary(rejected)}, see rejected in " in (summary.parent / "messages.log").read_text()
