"""A full disk, a closed pipe, no memory, Ctrl-C: one sentence, and the resumed run ends like any other."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from forked import Script, call, forked, warm_up
from interrupted import outputs
from torch import Tensor

from fedcommons.cli import parse
from fedcommons.errors import ClientError

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
    folder = tmp_path_factory.mktemp("whole")
    assert forked(lambda: call(script, *OPTIONS, "--out=run"), folder).code == 0
    return outputs(folder / "run")


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


@pytest.mark.parametrize(("size", "code"), [(4, 2), (16, 1), (96, 1)])  # no room for config.yaml: refused
@pytest.mark.long
def test_a_full_disk_ends_a_run_in_one_sentence_and_more_room_ends_it_well(
    size: int, code: int, script: Script, whole: dict[str, bytes], disk: Callable[[int], Path]
) -> None:
    folder = disk(size)
    ended = forked(lambda: call(script, *OPTIONS, "--out=run"), folder)
    assert ended.code == code, ended.err
    assert ended.err.splitlines() == [ended.sentence]
    assert "No space left on device" in ended.sentence
    disk(4000)
    ended = forked(lambda: call(script, *OPTIONS, "--out=run", "--resume"), folder)
    assert ended.code == 0, ended.err
    assert outputs(folder / "run") == whole


PRINTS = """
from fedcommons.cli import parse
def script(argv):
    parse.parse(parse.Parser("x" * 1000000), argv)
    while True:
        print("x" * 1000)
parse.main(script)
"""


@pytest.mark.parametrize(
    ("redirection", "word"),
    [("| true", "--resume"), ("--help | true", ""), ("> /dev/full", "No space left"), ("2>&1 | true", "")],
)
def test_a_script_whose_output_cannot_be_written_ends_with_at_most_a_sentence(redirection: str, word: str) -> None:
    """What the interpreter writes at its end counts too: it would say ``Exception ignored`` and exit with 120."""
    command = f"{sys.executable} -c '{PRINTS}' {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, bool(word))
    assert word in done.stderr


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 51200000 bytes."
OF_MEMORY = [
    MemoryError(), MemoryError("Unable to allocate 8 GiB"), RuntimeError(ALLOCATOR),
    RuntimeError("can't start new thread"), RuntimeError("std::bad_alloc"),
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


def test_an_out_of_memory_error_is_reported_in_one_line(same_signals: None, capsys: pytest.CaptureFixture[str]) -> None:
    raised: list[Exception] = []

    def fail(_: object) -> NoReturn:
        raise raised[-1]

    for error in OF_MEMORY:
        for begun in ("error: out of memory: ", "error: client 3, round 1, x: "):
            raised.append(ClientError.from_exception(error, "client 3, round 1, x") if "client" in begun else error)
            with pytest.raises(SystemExit) as ended:
                parse.main(fail)
            assert ended.value.code == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(begun)
            assert "out of memory: " in line
            assert len(line) < 260
    raised.append(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        parse.main(fail)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_is_stopped_in_a_generator(number: signal.Signals, code: int, script: Script, tmp_path: Path) -> None:
    """The signal arrives in the third backward pass."""
    words = ["--preset=smoke", "--sharing.setting=shuffled_synthetic", "--data.limit=60", "--tracking.wandb=off"]
    backward, passes = Tensor.backward, []

    def interrupted(self: Tensor, *arguments: Any, **named: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            signal.raise_signal(number)
        backward(self, *arguments, **named)

    def action() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Tensor.backward = interrupted
        call(script, *words, "--generator.epochs=1000", "--out=run", "--artifacts=artifacts")

    ended = forked(action, tmp_path)
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert ("--resume goes on" in ended.err) == (number == signal.SIGINT)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
