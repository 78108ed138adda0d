"""A process that has no memory left, or may start no thread, ends in one sentence and loses nothing."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fedcommons.config import cli
from fedcommons.errors import ClientError

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 51200000 bytes."
OF_MEMORY = [
    MemoryError(), MemoryError("Unable to allocate 8 GiB"), RuntimeError(ALLOCATOR),
    RuntimeError("can't start new thread"), RuntimeError("could not create a primitive"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]  # fmt: skip


@pytest.mark.parametrize("error", OF_MEMORY, ids=lambda e: f"{type(e).__name__} {e}"[:40])
def test_no_memory_is_told_in_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise error

    def fail_in_a_client(_: object) -> int:
        try:
            raise error
        except type(error) as caught:
            raise ClientError.of(caught, "client 3, round 1, fedavg") from caught

    for function, begun in ((fail, "error: out of memory: "), (fail_in_a_client, "error: client 3, round 1, fedavg: ")):
        assert cli._run(function) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(begun)
        assert "out of memory: " in said
        assert len(said) < 260


def test_other_errors_are_no_lack_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        cli._run(fail)


@pytest.mark.parametrize("megabytes", [175, 700])  # at less than 150 OpenBLAS ends a process by itself
@pytest.mark.long
def test_a_command_under_a_limit_of_memory_ends_in_a_sentence(tmp_path: Path, megabytes: int) -> None:
    script = Path(__file__).parents[1] / "sweeps/run.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--preset", "smoke"], cwd=tmp_path, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20)),
    )  # fmt: skip
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert ended.stderr.startswith("error: out of memory: ")


CODE = """
import os, resource, sys
from pathlib import Path
from fedcommons import experiment, run
from fedcommons.config import cli

values = {"data.limit": 40, "client.epochs": 1, "model.hidden": 8_000, "measure.every": 0, "wandb": "off"}
config = experiment("smoke", values={**values, "federation.rounds": 4})


def limited(number, metrics):
    if number == 2:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), resource.RLIM_INFINITY))


code = cli._run(lambda _: run(config, "broken", say=lambda _: None, on_round=limited) and 0)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
run(config, "broken", say=lambda _: None)
run(config, "whole", say=lambda _: None)
sys.exit(code)
"""


@pytest.mark.slow
def test_a_run_that_had_no_memory_left_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "out of memory: " in ended.stderr
    assert "Traceback" not in ended.stderr
    for name in ("rounds.jsonl", "summary.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
