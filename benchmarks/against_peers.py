"""Seconds per round of fedcommons and of other simulators, compared with one bare PyTorch loop in the same run.

python benchmarks/against_peers.py [W1 W2 W3 LR] [--peers DIR] [--environments DIR] [--repeats 3] [--memory] [--json]

The workloads W1 to W3 are those of round_time.py; LR is lr_mnist.py, whole commands on MNIST (FEDCOMMONS_DATA). A rival
(another simulator) runs as a process in a separate virtual environment, which should have the same torch version as
ours. Its script is in DIR of ``--peers``; fluke's script is in peers/ here. A rival without an environment is skipped
and reported. All rivals take half an hour on two idle cores. BlazeFL is not measured, as the package registry does not
have it. Fairness:

- Systems run in turns. Before and after every run of a rival, a block of measurements runs: some rounds each of the
  bare loop and of fedcommons, in one process and in two. A rival's ratio is its seconds divided by the mean seconds of
  the bare loop in two processes in the blocks before and after. The ratios of fedcommons are taken within a block. So a
  slow period of the machine slows both numbers of a ratio.
- Only steady rounds count. A rival's first round (in which Flower starts its actors) and our first block are left out.
  A rival's seconds are the median of its rounds, ours are the mean, so that a delayed round favours the rivals. The
  table has the median over runs of the seconds, and the median of the ratios.
- All systems do the same work: models, numbers of examples, steps, one torch thread per process (FedJAX: XLA's
  threads), at most two processes. fluke, FedLab's serial trainer and FedJAX have one process. Only FedJAX shuffles.
  Evaluation, tracking and start-up are not timed. Our processes sleep while a rival runs, except for a twentieth of a
  core that Ray always uses, also while the bare loop runs.

With ``--memory``, each system runs once more, without a clock, in processes of its own. The largest sum of the
proportional set sizes (PSS: memory shared by n processes counts as 1/n for each) of all of its processes is reported.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lr_mnist
import torch
from round_time import WORKLOADS, Bare, Ours, machine

REFERENCE = "bare, 2 processes"
OURS: dict[str, Callable[[str], Bare | Ours]] = {
    REFERENCE: lambda workload: Bare(workload, 2),
    "fedcommons, 2 actors": lambda workload: Ours(workload, 2),
    "bare, 1 process": lambda workload: Bare(workload, 1),
    "fedcommons, serial": lambda workload: Ours(workload, None),
    "fedcommons, 2 actors, batched": lambda workload: Ours(workload, 2, batched=True),
    "fedcommons, serial, batched": lambda workload: Ours(workload, None, batched=True),
}
TIMEOUT_S = 300
PEERS = Path(__file__).parents[2] / "shared" / "peerbench"
FOLDER = Path(__file__).parent / "peers"

ENVIRONMENTS = {
    "venv-pfl": '"pfl[pytorch]==0.6.0" safetensors',
    "venv-flwr": '"flwr[simulation]==1.41.0" torch safetensors',
    "venv-fedlab": "--no-deps fedlab==1.3.0 munch tqdm, then torch pynvml pandas scikit-learn pillow",
    "venv-fluke": "fluke-fl==0.8.1 torch",
    "venv-fedjax": 'fedjax==0.0.17 "jax[cpu]==0.10.2" torch',
}
"""What pip installs into each virtual environment."""


@dataclass(frozen=True)
class Rival:
    """Another simulator; command: the name of its script in ``--peers`` or peers/, and the script's arguments."""

    name: str
    environment: str
    command: str
    workloads: tuple[str, ...] = ("W1", "W2", "W3")


RIVALS = (
    Rival("pfl, 1 process", "venv-pfl", "pfl_bench.py {workload} 1"),
    Rival("pfl, 2 processes", "venv-pfl", "pfl_two.py {workload}"),
    Rival("Flower, 2 actors", "venv-flwr", "flower_bench.py {workload} msg"),
    Rival("FedLab", "venv-fedlab", "fedlab_bench.py {workload}"),
    Rival("fluke", "venv-fluke", "fluke_bench.py {workload}"),
    Rival("FedJAX", "venv-fedjax", "fedjax_bench.py {workload}", ("W1", "W3")),
)


class RivalError(Exception):
    """Reason why a run of a rival gave no seconds."""


@dataclass(frozen=True)
class Sample:
    """Seconds per round, and their ratio to the seconds of the bare loop in two processes at about the same time."""

    seconds: float
    ratio: float


def interpreter(environments: Path, name: str) -> Path:
    """Return the path of a virtual environment's Python, which need not exist."""
    return environments / name / "bin" / "python"


def pss(mark: str) -> int:
    """Return the summed proportional set sizes, in bytes, of all processes with ``mark`` in their environment.

    Ray's processes leave the process group of the command that starts them, but they inherit its environment.
    """
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended, or belongs to another user
            if mark.encode() in (process / "environ").read_bytes():
                sizes = (process / "smaps_rollup").read_text(encoding="utf-8")
                total += 1024 * next(int(line.split()[1]) for line in sizes.splitlines() if line.startswith("Pss:"))
    return total


def largest_pss(command: list[str | Path], peers: Path) -> int:
    """Run a command and return the largest summed proportional set size of its processes, in bytes.

    Raises:
        RivalError: the command failed or exceeded ``TIMEOUT_S``.
    """
    largest = 0

    def sample(mark: str) -> None:
        nonlocal largest
        largest = max(largest, pss(mark))

    output(command, peers, sample)
    return largest


def command_of(rival: Rival, workload: str, peers: Path, environments: Path) -> list[str | Path]:
    """Return the command line that runs a rival on a workload."""
    script, *arguments = rival.command.format(workload=workload).split()
    folder_of_script = FOLDER if (FOLDER / script).exists() else peers
    return [interpreter(environments, rival.environment), folder_of_script / script, *arguments]


def command_of_ours(system: str, workload: str) -> list[str | Path]:
    """Return a command line that runs one of ``OURS`` for as many rounds as the rivals run."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        f"import against_peers as a\nside = a.OURS[{system!r}]({workload!r})\n"
        f"side.stretch(a.WORKLOADS[{workload!r}].timed); side.close()"
    )
    return [sys.executable, "-c", code]


def run(rival: Rival, workload: str, peers: Path, environments: Path) -> float:
    """Run a rival and return its median seconds per round, without the first round.

    Raises:
        RivalError: the rival failed, exceeded ``TIMEOUT_S`` or ran only one round.
    """
    lines = output(command_of(rival, workload, peers, environments), peers)
    reports = [line.removeprefix("PEERBENCH ") for line in lines if line.startswith("PEERBENCH ")]
    if not reports:
        raise RivalError(f"no report: {lines[-1][:200] if lines else 'no output'}")
    steady = json.loads(reports[-1])["round_times"][1:]
    if not steady:
        raise RivalError("one round only, and the first does not count")
    return statistics.median(steady)


def output(command: list[str | Path], peers: Path, sample: Callable[[str], None] | None = None) -> list[str]:
    """Run a command and return the lines that it printed.

    Args:
        command: program and arguments.
        peers: folder of the rivals' scripts, from which they import.
        sample: called every 0.3 s, with a text that is in the environment of the command's processes only.

    Raises:
        RivalError: the command failed or exceeded ``TIMEOUT_S``.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }  # these are for our Ray
    variables |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }  # write no files into the folders of scripts
    # scripts in peers/ import work.py, too, and our actors import round_time.py
    variables |= {"PYTHONPATH": os.pathsep.join([str(peers), str(Path(__file__).parent)])}
    # Ray listens on all interfaces; the token protects it in rivals whose Ray supports tokens
    token = secrets.token_hex(32)
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if sample is None:
                process.wait(TIMEOUT_S)
            else:
                end = time.monotonic() + TIMEOUT_S
                while process.poll() is None:
                    if time.monotonic() > end:
                        raise subprocess.TimeoutExpired(process.args, TIMEOUT_S)
                    sample(token)
                    time.sleep(0.3)
        except BaseException as error:  # also after an interrupt, as the rival's processes would continue
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RivalError(f"not done in {TIMEOUT_S} s") from None
            raise
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if process.returncode:
        raise RivalError(f"exit code {process.returncode}: {lines[-1][:200] if lines else 'no output'}")
    return lines


def measure(
    workload: str, rivals: list[Rival], repeats: int, peers: Path, environments: Path
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Return the median sample of every system on a workload, and the error of each rival that failed.

    A rival that fails is not run again.
    """
    timed = WORKLOADS[workload].timed
    sides = {name: make(workload) for name, make in OURS.items()}
    samples: dict[str, list[Sample]] = defaultdict(list)
    failed: dict[str, str] = {}

    def block() -> float:
        """Time the bare loop and fedcommons once in each variant; return the seconds per round of ``REFERENCE``."""
        seconds = {}
        for name, side in sides.items():
            start = time.perf_counter()
            side.stretch(timed)
            seconds[name] = (time.perf_counter() - start) / timed
        for name in sides:
            samples[name].append(Sample(seconds[name], seconds[name] / seconds[REFERENCE]))
        return seconds[REFERENCE]

    block()
    samples.clear()  # the first block only warms up
    for _ in range(repeats):
        before = block()
        for rival in rivals:
            if workload not in rival.workloads or rival.name in failed:
                continue
            try:
                seconds = run(rival, workload, peers, environments)
            except RivalError as error:
                failed[rival.name] = str(error)
                before = block()
                continue
            after = block()
            samples[rival.name].append(Sample(seconds, 2 * seconds / (before + after)))
            before = after
    for side in sides.values():
        side.close()
    medians = {
        system: Sample(statistics.median(s.seconds for s in values), statistics.median(s.ratio for s in values))
        for system, values in samples.items()
    }
    return medians, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[*WORKLOADS, "LR"], metavar="W", help="W1, W2, W3, LR")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="DIR", help="folder of the rivals' scripts")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="folder of venv-pfl, ...; default: --peers")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each rival")
    parser.add_argument("--memory", action="store_true", help="also report the largest memory (PSS) of each system")
    parser.add_argument("--json", action="store_true", help="print seconds and ratios as JSON, as the last line")
    options = parser.parse_args()
    if unknown := set(options.workloads) - {*WORKLOADS, "LR"}:
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}, LR")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1 is needed")
    peers = options.peers.absolute()  # rivals run in another current folder
    environments = (options.environments or peers).absolute()
    for option, folder in (("--peers", peers), ("--environments", environments)):
        if not folder.is_dir():
            parser.error(f"{option}: there is no folder {folder}")
    torch.set_num_threads(1)
    print(machine())
    rivals = [r for r in RIVALS if interpreter(environments, r.environment).exists()]
    for name, packages in ENVIRONMENTS.items():
        if not interpreter(environments, name).exists():
            print(f"Not there: {environments / name}; python -m venv makes it, pip install {packages} fills it")
    systems = [*OURS, *(r.name for r in rivals)]
    print(f"| workload | {' | '.join(systems)} |\n" + (1 + len(systems)) * "|---" + "|")
    table: dict[str, dict[str, dict[str, float]]] = {}
    failures: list[str] = []
    for workload in (w for w in options.workloads if w in WORKLOADS):
        medians, failed = measure(workload, rivals, options.repeats, peers, environments)
        cells = [f"{m.seconds:.3g} s, {m.ratio:.3g}" if (m := medians.get(s)) else "-" for s in systems]
        print(f"| {workload} | {' | '.join(cells)} |", flush=True)
        table[workload] = {s: {"seconds": round(m.seconds, 5), "ratio": round(m.ratio, 3)} for s, m in medians.items()}
        if options.memory:
            commands = {name: command_of_ours(name, workload) for name in OURS if name.startswith("fedcommons")}
            for r in rivals:
                if workload in r.workloads and r.name not in failed:
                    commands[r.name] = command_of(r, workload, peers, environments)
            for system, command in commands.items():
                try:
                    table[workload][system]["pss_mb"] = round(largest_pss(command, peers) / 1e6)
                except RivalError as error:
                    failed[system] = f"memory: {error}"
            sizes = [f"{m['pss_mb']} MB" if "pss_mb" in (m := table[workload].get(s, {})) else "-" for s in systems]
            print(f"| {workload}, PSS | {' | '.join(sizes)} |", flush=True)
        failures += [f"{name} on {workload}: {why}" for name, why in failed.items()]
    for failure in failures:
        print(failure)
    if "LR" in options.workloads:
        lr_mnist.compare(environments, options.repeats)
    if options.json:
        print(json.dumps(table))


if __name__ == "__main__":
    sys.exit(main())
