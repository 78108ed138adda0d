"""Mutation testing on a random sample: which changes of the source do the tests detect?

    python benchmarks/mutation.py sample --seed 0 --each 26 --out sample.json
    python benchmarks/mutation.py checkout /tmp/P /tmp/A /tmp/B
    python benchmarks/mutation.py reach sample.json --checkout /tmp/P --out reach.json
    python benchmarks/mutation.py run sample.json --reach reach.json --checkouts /tmp/A /tmp/B --out results.jsonl
    python benchmarks/mutation.py table before.jsonl after.jsonl

A mutant is a small change of the source. ``reach`` inserts a probe before each mutant's statement into a checkout and
runs the tests once, to record which test executes which mutant, also in subprocesses. ``run`` runs each mutant against
the tests that reach the mutant for at most ``SECONDS``: first short tests that reach few mutants. A mutant that no test
reaches survives. ``mutants.py`` draws the mutants.
"""

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

from mutants import PACKAGES, mutated, probed, sample

MARKERS = "not ray and not cluster and not browser and not slow"
SECONDS = 60
"""Largest CPU seconds of the tests of one mutant, independent of other load of the machine."""
CHECKOUT = "{checkout}"
MOST_TESTS = 400
"""Largest number of tests that run against one mutant."""

LIBRARIES = ("torchvision", "pytorch_lightning", "sklearn.linear_model", "scipy.stats", "opacus", "pandas", "pytest")

PROBE = """
import os
FOLDER = {folder!r}
_reached = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (test, number) not in _reached:
        _reached.add((test, number))
        with open(os.path.join(FOLDER, f"{{os.getpid()}}.reach"), "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ:
        with open(os.path.join(FOLDER, f"{{os.getpid()}}.seconds"), "a", encoding="utf-8") as file:
            file.write(f"{{report.duration}}\\t{{report.nodeid}}\\n")
"""


def checkout(path: Path) -> None:
    """Create a git worktree of HEAD, with a virtual environment of our libraries and the worktree's sources."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--force", "--detach", path], check=True)
    venv.create(path / ".venv", symlinks=True)
    inner, here = (next((root / "lib").glob("python*/site-packages")) for root in (path / ".venv", Path(sys.prefix)))
    (inner / "paths.pth").write_text("\n".join(map(str, (path, path / "platform", here))), "utf-8")
    for script in ("ray", "wandb"):
        _, _, text = (Path(sys.prefix) / "bin" / script).read_text("utf-8").partition("\n")
        (path / ".venv/bin" / script).write_text(f"#!{path}/.venv/bin/python\n{text}", "utf-8")
        (path / ".venv/bin" / script).chmod(0o755)


def reach(mutants: Sequence[Mapping[str, Any]], checkout: Path, markers: str) -> dict[str, Any]:
    """Run the tests once with probes; return the tests that reach each mutant, and the seconds of each test."""
    files = {str(mutant["file"]): (checkout / mutant["file"]).read_text("utf-8") for mutant in mutants}
    module = checkout / "platform" / "mutation_probe.py"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # tests may drop privileges
        try:
            module.write_text(PROBE.format(folder=folder), "utf-8")
            for file, source in files.items():
                (checkout / file).write_text(probed(source, [m for m in mutants if m["file"] == file]), "utf-8")
            command = [checkout / ".venv/bin/python", "-m", "pytest", "-q", "-n", "2", "-p", "mutation_probe"]
            subprocess.run([*command, "-m", markers], cwd=checkout, check=False)
        finally:
            module.unlink()
            for file, source in files.items():
                (checkout / file).write_text(source, "utf-8")
        reached, seconds = defaultdict[str, set[str]](set), defaultdict[str, float](float)
        for path in Path(folder).glob("*.reach"):
            for line in path.read_text("utf-8").splitlines():
                number, test = line.split("\t")
                if "::" in test:  # a test that limits the size of files may write a truncated name
                    reached[number].add(test)
        for path in Path(folder).glob("*.seconds"):
            for line in path.read_text("utf-8").splitlines():
                duration, test = line.split("\t")
                seconds[test] += float(duration)
    text = json.dumps({"reach": {number: sorted(tests) for number, tests in reached.items()}, "seconds": seconds})
    return json.loads(text.replace(str(checkout), CHECKOUT))  # the names of some cases are paths


def serve() -> None:
    """Run pytest in forks of this process, which has imported the libraries.

    Each line of stdin is a JSON list of pytest's arguments; each line of stdout has the exit code and the last output.
    """
    for library in LIBRARIES:
        __import__(library)
    sys.path.insert(0, "")
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            started, code = time.monotonic(), None
            if not (process := os.fork()):
                _test(json.loads(line), output.fileno())
            while code is None and time.monotonic() - started < 10 * SECONDS:
                ended, status = os.waitpid(process, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            if code is None:
                os.waitpid(process, 0)
            output.seek(0)
            code = None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
            print(json.dumps({"code": code, "text": output.read()[-4000:]}), flush=True)


def _test(words: list[str], output: int) -> None:
    import pytest

    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = int(pytest.main(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


class Server:
    """A subprocess that runs ``serve`` in a checkout."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        command = [str(checkout / ".venv/bin/python"), __file__, "serve"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, words: Sequence[str]) -> dict[str, Any]:
        """Run pytest with these arguments; return exit code (None: out of time) and the end of its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def verdict(mutant: Mapping[str, Any], server: Server, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests against a mutant in the server's checkout; return the mutant with verdict, reason and seconds."""
    if not tests:
        return {**mutant, "verdict": "alive", "tests": 0, "why": "no test reaches it"}
    path, started = server.checkout / mutant["file"], time.monotonic()
    source = path.read_text("utf-8")
    path.write_text(mutated(source, mutant), "utf-8")
    words, meets = (
        ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", MARKERS],
        [t.replace(CHECKOUT, str(server.checkout)) for t in tests[:MOST_TESTS]],
    )
    try:
        code, text = (ran := server([*words, *meets]))["code"], ran["text"]
        while code == 4 and (gone := [t for t in meets if f"not found: {server.checkout / t}\n" in text]):
            meets = [t for t in meets if t not in gone]  # the mutant has renamed a test case
            code, text = (ran := server([*words, *meets]))["code"], ran["text"]
    finally:
        path.write_text(source, "utf-8")
    if code == 70 or (code == 4 and "ERROR collecting" not in text and "conftest" not in text):
        raise RuntimeError(text)
    why = "time" if code is None else next((x for x in text.splitlines() if x.startswith(("FAILED", "ERROR"))), "")
    result = "alive" if code in (0, 5, None) else "killed"
    seconds = round(time.monotonic() - started, 1)
    return {
        **mutant,
        "verdict": result,
        "tests": len(tests),
        "why": why[:200] or f"exit code {code}",
        "seconds": seconds,
    }


def run(cases: Sequence[Mapping[str, Any]], contexts: Mapping[str, Any], checkouts: Sequence[Path], out: Path) -> None:
    """Run all mutants without a result in ``out``, one at a time in each checkout; append the results to ``out``.

    contexts: the result of ``reach``.
    """
    done = {json.loads(line)["number"] for line in out.read_text("utf-8").splitlines()} if out.exists() else set()
    reaches = Counter(test for tests in contexts["reach"].values() for test in tests)

    def cost(test: str) -> float:
        return reaches[test] * (0.02 + contexts["seconds"].get(test, 0.0))

    free: Queue[Server] = Queue()
    for checkout in checkouts:
        free.put(Server(checkout))

    def play(mutant: Mapping[str, Any]) -> None:
        tests = sorted(contexts["reach"].get(str(mutant["number"]), ()), key=cost)
        server = free.get()
        try:
            result = verdict(mutant, server, tests)
        finally:
            free.put(server)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")

    with ThreadPoolExecutor(len(checkouts)) as threads:
        list(threads.map(play, [mutant for mutant in cases if mutant["number"] not in done]))


def table(columns: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table of killed mutants by package, with a column per file of results.

    The last row is the share of killed mutants with its 95 % interval; packages are weighted by numbers of mutants.
    """
    by = [defaultdict[str, list[Mapping[str, Any]]](list) for _ in columns]
    for packages, results in zip(by, columns, strict=True):
        for result in results:
            packages[result["package"]].append(result)
    lines = [f"| package | mutants | tried |{' killed |' * len(by)}", f"|---|---|---|{'---|' * len(by)}"]
    weight = sum(cell[0]["of"] for cell in by[0].values())
    total, variance = [0.0] * len(by), [0.0] * len(by)
    for package in filter(by[0].get, PACKAGES):
        n, killed = len(by[0][package]), [sum(r["verdict"] == "killed" for r in each[package]) for each in by]
        share = by[0][package][0]["of"] / weight
        for column, k in enumerate(killed):
            total[column] += share * k / n
            variance[column] += share**2 * (k / n) * (1 - k / n) / max(1, n - 1)
        lines.append(f"| {package} | {by[0][package][0]['of']} | {n} | {' | '.join(map(str, killed))} |")
    shares = [f"{100 * t:.1f} % ± {196 * math.sqrt(v):.1f}" for t, v in zip(total, variance, strict=True)]
    return "\n".join([*lines, f"| all, weighted | {weight} | {len(columns[0])} | {' | '.join(shares)} |"])


def main() -> None:
    """Run a command of the module's docstring: sample, checkout, reach, run or table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("sample")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--each", type=int, default=26)
    drawing.add_argument("--root", type=Path, default=Path())
    reaching = commands.add_parser("reach")
    reaching.add_argument("--checkout", type=Path, required=True)
    reaching.add_argument("--markers", default=MARKERS, help="which tests to run")
    running = commands.add_parser("run")
    running.add_argument("--reach", type=Path, required=True)
    running.add_argument("--checkouts", type=Path, nargs="+", required=True)
    for each in (reaching, running):
        each.add_argument("sample", type=Path)
    for each in (drawing, reaching, running):
        each.add_argument("--out", type=Path, required=True)
    commands.add_parser("checkout").add_argument("paths", type=Path, nargs="+")
    commands.add_parser("table").add_argument("results", type=Path, nargs="+")
    commands.add_parser("serve")
    options = parser.parse_args()

    def read(path: Path) -> Any:
        return json.loads(path.read_text("utf-8"))

    if options.command == "sample":
        options.out.write_text(json.dumps(sample(options.root, options.seed, options.each), indent=0), "utf-8")
    elif options.command == "reach":
        contexts = reach(read(options.sample), options.checkout.resolve(), options.markers)
        options.out.write_text(json.dumps(contexts), "utf-8")
    elif options.command == "run":
        checkouts = [checkout.resolve() for checkout in options.checkouts]
        run(read(options.sample), read(options.reach), checkouts, options.out)
    elif options.command == "checkout":
        for path in options.paths:
            checkout(path.resolve())
    elif options.command == "table":
        print(table([[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in options.results]))
    else:
        serve()


if __name__ == "__main__":
    main()
