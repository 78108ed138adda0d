"""A full disk, a file too large, a closed pipe, no memory: one sentence, and the resumed run ends like any other."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from forked import Ended, Script, call, forked, warm_up
from interrupted import outputs

from fedcommons.config import cli
from fedcommons.errors import ClientError

ROOT = Path(__file__).parent.parent
OPTIONS = [
    "--preset=smoke", "--algorithm=scaffold", "--data.limit=60", "--client.epochs=1", "--measure.every=0",
    "--federation.rounds=4", "--federation.checkpoint_every=2", "--tracking.wandb=off", "--model.channels=[2,7]",
    "--federation.memory_mb=0.001",
]  # fmt: skip


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> Script:
    warm_up()
    return sweeps("run").run


@pytest.fixture(scope="module")
def whole(script: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert forked(lambda: call(script, *OPTIONS, "--out=run"), folder).code == 0
    return outputs(folder / "run")


def require_sentence(ended: Ended, *words: str, code: int = 1) -> None:
    assert ended.code == code, ended.err
    assert ended.err.splitlines() == [ended.sentence]
    assert all(word in ended.sentence for word in words), ended.sentence


def require_resumed(script: Script, folder: Path, whole: Mapping[str, bytes]) -> None:
    ended = forked(lambda: call(script, *OPTIONS, "--out=run", "--resume"), folder)
    assert ended.code == 0, ended.err
    assert outputs(folder / "run") == whole


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A small disk, which another call makes larger or smaller; its size in KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        is_mounted = folder.is_mount()
        how = f"{'remount,' if is_mounted else ''}size={size}k"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode and not is_mounted:
            pytest.skip(f"no disk can be mounted here ({done.stderr.strip()})")
        assert done.returncode == 0, done.stderr
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("size", "code", "word"),
    [(500, 2, "cannot be written (File too large)"), (20_500, 1, "round-000000"), (22_500, 0, "")],
)
@pytest.mark.long
def test_a_file_too_large_ends_a_run_in_one_sentence(
    size: int, code: int, word: str, script: Script, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The smallest of the sizes stops it at its first files, the largest not at all."""
    ended = forked(lambda: call(script, *OPTIONS, "--out=run"), tmp_path, file_size=size)
    if code:
        require_sentence(ended, "File too large", word, code=code)
    assert ended.code == code
    require_resumed(script, tmp_path, whole)


@pytest.mark.parametrize(("size", "code"), [(4, 2), (16, 1), (96, 1)])  # no room for config.yaml: refused
@pytest.mark.long
def test_a_full_disk_ends_a_run_in_one_sentence_and_more_room_ends_it_well(
    size: int, code: int, script: Script, whole: dict[str, bytes], disk: Callable[[int], Path]
) -> None:
    folder = disk(size)
    ended = forked(lambda: call(script, *OPTIONS, "--out=run"), folder)
    require_sentence(ended, "No space left on device", code=code)
    disk(4000)
    require_resumed(script, folder, whole)


def shell(command: str) -> tuple[int, str]:
    """Exit code of Python and its stderr."""
    command = f"{sys.executable} {command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


PRINTS = """
from fedcommons.config import cli
def script(_):
    while True:
        print("x" * 1000)
cli.main(script)
"""


@pytest.mark.parametrize(
    ("redirection", "word"), [("| true", "nobody reads"), ("> /dev/full", "No space left"), ("2>&1 | true", "")]
)
def test_a_script_whose_output_cannot_be_written_ends_with_one_sentence(redirection: str, word: str) -> None:
    """What the interpreter writes at its end counts too: it would say ``Exception ignored`` and exit with 120."""
    code, said = shell(f"-c '{PRINTS}' {redirection}")
    assert code == 1
    assert len(said.splitlines()) == bool(word)
    assert word in said


@pytest.mark.ray
def test_a_sweep_on_a_full_disk_says_so_of_each_run_and_goes_on(disk: Callable[[int], Path], tmp_path: Path) -> None:
    sweep = "sweeps/table1.py --preset=smoke --settings=real --algorithms=fedavg --alphas=0.1,0.2 --wandb=off"
    folder = disk(150)
    assert shell(f"{sweep} --out={folder}/out > {tmp_path}/said") == (1, "")
    failed = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    assert all("No space left on device" in line for line in failed)
    disk(10_000)
    assert shell(f"{sweep} --out={folder}/out --resume > /dev/null") == (0, "")
    assert len(list((folder / "out").glob("*/summary.json"))) == 2


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 51200000 bytes."
OF_MEMORY = [
    MemoryError(), MemoryError("Unable to allocate 8 GiB"), RuntimeError(ALLOCATOR),
    RuntimeError("can't start new thread"), RuntimeError("could not create a primitive"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]  # fmt: skip


@pytest.fixture
def same_signals() -> Iterator[None]:
    """A command changes what SIGTERM does."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_memory_is_one_sentence(same_signals: None, capsys: pytest.CaptureFixture[str]) -> None:
    raised: list[Exception] = []

    def fail(_: object) -> NoReturn:
        raise raised[-1]

    for error in OF_MEMORY:
        for begun in ("error: out of memory: ", "error: client 3, round 1, fedavg: "):
            raised.append(ClientError.of(error, "client 3, round 1, fedavg") if "client" in begun else error)
            with pytest.raises(SystemExit) as ended:
                cli.main(fail)
            assert ended.value.code == 1
            (said,) = capsys.readouterr().err.splitlines()
            assert said.startswith(begun)
            assert "out of memory: " in said
            assert len(said) < 260
    raised.append(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main(fail)


@pytest.mark.parametrize("megabytes", [175, 700])  # at less than 150 OpenBLAS ends a process by itself
@pytest.mark.long
def test_a_command_under_a_limit_of_memory_ends_in_a_sentence(tmp_path: Path, megabytes: int) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "sweeps" / "run.py"), "--preset", "smoke"],
        cwd=tmp_path, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20)),
    )  # fmt: skip
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert ended.stderr.startswith("error: out of memory: ")
