"""FLUTE's benchmark LR_MNIST: seconds of whole commands of fedcommons, Flower, pfl and a bare loop.

python benchmarks/lr_mnist.py --data-dir DIR [--environments DIR] [--repeats 3]

Softmax regression on all of MNIST: 1,000 clients with two labels each (partition labels_lognormal), 10 clients per
round, 100 rounds, one epoch of SGD, batch size 10, learning rate 0.03, averages weighted by numbers of examples.
Published for this benchmark (FLUTE's README): Flower 30:14 min, FLUTE 3:20 min on a CPU, about 81 %.

All systems have the same client data, initial weights and clients in each round. Only fedcommons shuffles a client's
images. Ours is the command ``sweeps/run.py`` with the record of the run, W&B files, checkpoints and an evaluation every
tenth round. The other systems train, and evaluate once after the timed part. One system runs at a time. Rounds are
timed from the start of the first to the end of the last round. Start-up is the remaining time of the command.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from round_time import machine
from safetensors.torch import save_file
from torch import Tensor

from fedcommons.config.dotted import choose
from fedcommons.errors import UserError
from fedcommons.federation.client_sampling import participants
from fedcommons.runs import build
from fedcommons.runs.build import module_of

HERE = Path(__file__).parent
SETTINGS = {
    "data.name": "mnist", "data.validation": 0.0, "partition.name": "labels_lognormal", "partition.n_clients": 1000,
    "federation.participation": 0.01, "federation.rounds": 100, "federation.weighting": "samples", "seed": 0,
    "model.name": "linear", "client.lr": 0.03, "client.epochs": 1, "client.batch_size": 10, "evaluate.every": 10,
}  # fmt: skip
RIVALS = {
    "bare loop": ("", "lr_mnist_bare.py"),
    "pfl, 1 process": ("venv-pfl", "lr_mnist_pfl.py"),
    "Flower, 2 actors": ("venv-flwr", "lr_mnist_flower.py"),
}
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Took:
    """Seconds of a whole command and of its 100 rounds, and the accuracy on test images in [0, 1]."""

    command: float
    rounds: float
    accuracy: float


def write_work(file: Path) -> str:
    """Write the rivals' input: clients' images, clients of each round, initial weights; return the partition's hash."""
    config = choose(SETTINGS)
    prepared = build.build(config)
    dataset, rows = prepared.dataset, prepared.partition.rows

    def images(x: Tensor) -> Tensor:
        return ((x.flatten(1).float() / 255) - dataset.mean[0]) / dataset.std[0]

    joins = [participants(len(rows), config.federation.participation, config.seed, r) for r in range(1, 101)]
    last = dict(module_of(config)(dataset).named_parameters())
    weight, bias = (next(p.detach() for name, p in last.items() if name.endswith(end)) for end in ("weight", "bias"))
    every = torch.cat([torch.from_numpy(r) for r in rows])
    save_file(
        {
            "x": images(prepared.train.x[every]), "y": prepared.train.y[every],
            "ends": torch.tensor([len(r) for r in rows]).cumsum(0), "joining": torch.tensor(joins),
            "test_x": images(dataset.test.x), "test_y": dataset.test.y,
            "weight": weight.contiguous(), "bias": bias.contiguous(),
        },
        file,
    )  # fmt: skip
    return prepared.partition.fingerprint


def ours(folder: Path, partition: str) -> Took:
    """Run ``sweeps/run.py`` and return its times; partition: hash that its partition must have."""
    options = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, HERE.parent / "sweeps" / "run.py", *options, "--data.limit", "null", "--out", folder]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S, check=False)
    whole = time.time() - began
    if done.returncode:
        raise SystemExit(f"sweeps/run.py: {done.stderr.strip()[-300:]}")
    lines = [json.loads(line) for line in (folder / "timing.jsonl").read_text(encoding="utf-8").splitlines()]
    rounds = sum(line["train"] + line["observe"] for line in lines if line["round"])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["partition"] == partition, "the rivals' clients have other images"
    return Took(whole, rounds, summary["last_accuracy"])


def rival(python: Path, script: str, work: Path, folder: Path) -> Took:
    """Run a script of peers/ with this Python and return its times; work: the file of ``write_work``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"LR_MNIST": str(work), "PYTHONPATH": str(HERE / "peers"), "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # Ray listens on all interfaces: require a token
    command = [python, HERE / "peers" / script]
    began = time.time()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        env=variables,
        cwd=folder,
        check=False,
    )
    lines = [line.removeprefix("PEERBENCH ") for line in done.stdout.splitlines() if line.startswith("PEERBENCH ")]
    if not lines:
        raise SystemExit(f"{script}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    report = json.loads(lines[-1])
    return Took(report["done"] - began, report["ended"] - report["began"], report["accuracy"])


def compare(environments: Path | None, repeats: int) -> None:
    """Run all systems in turns and print medians; environments: folder of the rivals' virtual environments."""
    pythons: dict[str, Path] = {}
    for name, (environment, _) in RIVALS.items():
        python = (environments or HERE).absolute() / environment / "bin" / "python" if environment else sys.executable
        if Path(python).exists():
            pythons[name] = Path(python)
        else:
            print(f"Not there: {python}; against_peers.py says what pip installs there")
    took: dict[str, list[Took]] = {name: [] for name in ["fedcommons", *pythons]}
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), Path(name) / "work.safetensors"
        partition = write_work(work)
        for repeat in range(repeats):
            took["fedcommons"].append(ours(folder / f"run-{repeat}", partition))
            for system, python in pythons.items():
                took[system].append(rival(python, RIVALS[system][1], work, folder))
    print("| system | command, s | its start-up, s | 100 rounds, s | accuracy, % |\n" + 5 * "|---" + "|")
    for system, runs in took.items():
        command, rounds = (statistics.median(t) for t in ([r.command for r in runs], [r.rounds for r in runs]))
        accuracy = statistics.median(r.accuracy for r in runs)
        print(f"| {system} | {command:.3g} | {command - rounds:.3g} | {rounds:.3g} | {100 * accuracy:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="folder of MNIST; default: FEDCOMMONS_DATA")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="folder of venv-pfl and venv-flwr")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1 is needed")
    if options.data_dir:
        os.environ["FEDCOMMONS_DATA"] = str(Path(options.data_dir).absolute())
    torch.set_num_threads(1)
    print(machine())
    try:
        compare(options.environments, options.repeats)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
