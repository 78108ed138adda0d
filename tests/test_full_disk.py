"""A full disk, a file too large, a closed pipe: one sentence, exit code 1, and what is resumed ends as if it never was.

Each run is a fork that goes the way of the script; pipes are closed on real scripts too.
"""

import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli

ROOT = Path(__file__).parent.parent
OPTIONS = [
    "--preset=smoke", "--algorithm=scaffold", "--data.limit=60", "--client.epochs=1", "--measure.every=0",
    "--federation.rounds=6", "--federation.checkpoint_every=2", "--tracking.wandb=off", "--model.channels=[2,7]",
    "--federation.memory_mb=0.001",
]  # fmt: skip


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Callable[[Sequence[str]], int]:
    return sweeps("run").run


Play = Callable[..., tuple[int, str]]


@pytest.fixture
def play(script: Callable[[Sequence[str]], int], tmp_path: Path) -> Play:
    """Runs the script in a fork, in ``out``: its exit code and what stands on stderr."""

    def do(out: Path, *more: str, first: Callable[[], object] = lambda: None, stdout: int | None = None):
        errors = tmp_path / "stderr"
        if not (process := os.fork()):
            code: object = 70
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY) if stdout is None else stdout, 1)
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
                sys.argv = ["run.py", *OPTIONS, f"--out={out}", *more]
                first()
                cli.main(script)
            except SystemExit as end:
                code = end.code
                with suppress(OSError):
                    code = 120  # an interpreter flushes at its end, and complains
                    sys.stdout.flush()
                    code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code if isinstance(code, int) else 70)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return code, errors.read_text()

    return do


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ."""
    return {p.name: p.read_bytes() for p in (folder / "rounds.jsonl", folder / "summary.json", *folder.glob("*/[!.]*"))}


@pytest.fixture(scope="module")
def whole(script: Callable[[Sequence[str]], int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run that nothing happens to leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert script([*OPTIONS, f"--out={folder}"]) == 0
    return outputs(folder)


def require_one_sentence(said: str, part: str) -> None:
    (line,) = said.splitlines()
    assert line.startswith("error: ")
    assert part in line


def at_most(size: int) -> Callable[[], None]:
    """No file may grow beyond so many bytes: what is written further is refused, as by a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    ("size", "of"),
    [(500, "config.yaml"), (20_500, "round-000000"), (22_500, None)],
)
@pytest.mark.long
def test_a_file_too_large_ends_a_run_in_one_sentence(
    size: int, of: str | None, play: Play, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The least of the sizes stops it at its first files, the greatest nowhere."""
    code, said = play(tmp_path / "run", first=at_most(size))
    if of is None:
        assert (code, said) == (0, "")
        return
    if of == "config.yaml":  # before any work
        assert code == 2
        require_one_sentence(said, "cannot be written (File too large)")
    else:
        assert code == 1
        require_one_sentence(said, "File too large")
        assert of in said
    code, said = play(tmp_path / "run", "--resume")
    assert code == 0, said
    assert outputs(tmp_path / "run") == whole


@pytest.mark.long
def test_a_record_that_grows_too_large_ends_a_run_and_half_a_line_is_written_again(play: Play, tmp_path: Path) -> None:
    """rounds.jsonl alone is appended to."""
    more = ["--algorithm=fedavg", "--federation.rounds=80", "--federation.checkpoint_every=20", "--data.limit=20"]
    more += ["--client.batch_size=20"]
    assert play(tmp_path / "whole", *more)[0] == 0
    code, said = play(tmp_path / "run", *more, first=at_most(20_500))
    assert code == 1
    require_one_sentence(said, "File too large")
    assert not (tmp_path / "run" / "rounds.jsonl").read_bytes().endswith(b"\n")
    assert play(tmp_path / "run", *more, "--resume")[0] == 0
    assert outputs(tmp_path / "run") == outputs(tmp_path / "whole")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A small disk, which another call makes larger or smaller; its size in KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def mount(size: int) -> Path:
        nonlocal mounted
        how = f"{'remount,' if mounted else ''}size={size}k"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode and not mounted:
            pytest.skip(
                f"no disk can be mounted here ({done.stderr.strip()}); the file sizes above are limited anywhere"
            )
        assert done.returncode == 0, done.stderr
        mounted = True
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("size", [4, 16, 32, 56, 96, 120])
@pytest.mark.long
def test_a_full_disk_ends_a_run_in_one_sentence_and_more_room_ends_it_well(
    size: int, play: Play, whole: dict[str, bytes], disk: Callable[[int], Path]
) -> None:
    folder = disk(size)
    code, said = play(folder / "run")
    assert code == (2 if size == 4 else 1)  # with no room for a config.yaml it is refused
    require_one_sentence(said, "No space left on device")
    disk(4000)
    code, said = play(folder / "run", "--resume")
    assert code == 0, said
    assert outputs(folder / "run") == whole


@pytest.mark.long
def test_a_closed_pipe_ends_a_run_in_one_sentence(play: Play, whole: dict[str, bytes], tmp_path: Path) -> None:
    """As ``| head -1`` does."""
    reads, writes = os.pipe()
    os.close(reads)
    code, said = play(tmp_path / "run", stdout=writes)
    os.close(writes)
    assert code == 1
    require_one_sentence(said, "nobody reads the output any more")
    assert play(tmp_path / "run", "--resume")[0] == 0
    assert outputs(tmp_path / "run") == whole


def test_output_that_has_no_room_ends_a_run_in_one_sentence(play: Play, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    code, said = play(tmp_path / "run", stdout=full)
    os.close(full)
    assert code == 1
    require_one_sentence(said, "No space left on device")


TABLE = "communication_saved.py --from sweeps/papers/fedssyn/published/fedssyn_table1_rounds.csv"
SWEEP = "table1.py --preset=smoke --settings=real --algorithms=fedavg --alphas=0.1,0.2 --wandb=off"


def shell(command: str) -> tuple[int, str]:
    """Exit code of the script and what stands on stderr."""
    command = f"{sys.executable} sweeps/{command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (f"{TABLE} | true", "nobody reads the output"), (f"{TABLE} > /dev/full", "No space left"),
        (f"{TABLE} 2>&1 | true", ""),
    ],
)  # fmt: skip
@pytest.mark.ray  # it needs none, but many seconds
def test_a_script_whose_output_cannot_be_written_leaves_one_sentence(command: str, part: str) -> None:
    """What the interpreter writes at its end counts too: it would say ``Exception ignored`` and exit with 120."""
    code, said = shell(command)
    assert code == 1
    if part:
        require_one_sentence(said, part)


@pytest.mark.ray
def test_a_sweep_whose_output_nobody_reads_ends_in_one_sentence_and_goes_on(tmp_path: Path) -> None:
    code, said = shell(f"{SWEEP} --out={tmp_path}/out | head -1")
    assert code == 1
    require_one_sentence(said, "nobody reads the output any more")
    assert shell(f"{SWEEP} --out={tmp_path}/out --resume > /dev/null") == (0, "")
    assert len(list((tmp_path / "out").glob("*/summary.json"))) == 2


@pytest.mark.ray
def test_a_sweep_on_a_full_disk_says_so_of_each_run_and_goes_on(disk: Callable[[int], Path], tmp_path: Path) -> None:
    folder = disk(150)
    assert shell(f"{SWEEP} --out={folder}/out > {tmp_path}/said") == (1, "")
    failed = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    assert all("No space left on device" in line for line in failed)
    disk(10_000)
    assert shell(f"{SWEEP} --out={folder}/out --resume > /dev/null") == (0, "")
    assert len(list((folder / "out").glob("*/summary.json"))) == 2
