"""Seconds that a checkpoint costs: its file, the wait of the run for an upload, and the upload into a storage.

python benchmarks/checkpoints.py [--mb 10,100,1000] [--repeats 3] [--csv FILE]

The storages are a folder on the same disk, and an S3 that moto emulates in another process on this machine, without a
network. A run waits until the file is written and has a hard link; the upload runs in a thread during the next rounds.
The times are medians.
"""

import argparse
import csv
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedcommons.storage.atomic_files import write_tensors
from fedcommons.tracking.remote_run import RunMirror

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@contextmanager
def bucket() -> Iterator[str]:
    """Yield the URL of a bucket in an emulated S3, which ends with the context."""
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        variables = {"ENDPOINT_URL": server.stdout.readline().strip(), "ACCESS_KEY_ID": "none",
                     "SECRET_ACCESS_KEY": "none", "DEFAULT_REGION": "us-east-1"}  # fmt: skip
        os.environ.update({f"AWS_{name}": value for name, value in variables.items()})
        import boto3

        boto3.client("s3").create_bucket(Bucket=(name := f"lab-{secrets.token_hex(4)}"))
        yield f"s3://{name}"
        server.communicate()


def seconds(mb: int, folder: Path, storage: str) -> list[float]:
    """Return the seconds of a new checkpoint of ``mb`` million bytes: file, wait for the copy, upload."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (run / name).write_text(json.dumps({"seed": 0}), encoding="utf-8")
    mirror = RunMirror(storage, f"run-{secrets.token_hex(4)}", run)
    tensors = {"model": torch.rand(mb * 250_000)}
    times = [time.perf_counter()]
    write_tensors(run / "checkpoints" / "round-000001.safetensors", tensors, {"round": 1})
    times.append(time.perf_counter())
    mirror.begin_upload()
    times.append(time.perf_counter())
    mirror.wait()
    times.append(time.perf_counter())
    if mirror.upload_error:
        raise SystemExit(mirror.upload_error)
    for file in mirror.snapshots.entries.values():  # so that ten checkpoints do not fill disk or memory
        mirror.snapshots.storage.remove(f"{mirror.snapshots.name}/objects/{file.object}")
    return [later - earlier for earlier, later in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", default="10,100,1000", help="sizes in million bytes")
    parser.add_argument("--repeats", type=int, default=3, help="checkpoints of each size and storage")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file too")
    options = parser.parse_args()
    from round_time import machine

    print(machine())
    rows = [
        ["checkpoint, MB", "storage", "write the file, s", "run waits for the upload, s", "upload beside the run, s"]
    ]
    with TemporaryDirectory() as base, bucket() as s3:
        for mb in map(int, options.mb.split(",")):
            for name, storage in (("folder", f"{base}/storage"), ("emulated S3", s3)):
                times = []
                for _ in range(options.repeats):
                    with TemporaryDirectory(dir=base) as folder:
                        times.append(seconds(mb, Path(folder), storage))
                print(mb, name, times, file=sys.stderr)
                medians = (statistics.median(each) for each in zip(*times, strict=True))
                rows.append([str(mb), name, *(f"{value:.2g}" for value in medians)])
    print("\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * 5, *rows[1:]]))
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
