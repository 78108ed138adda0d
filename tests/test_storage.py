"""Runs and artifacts in a storage: a bucket of an S3 server on this machine, or a folder. Nothing lost, nothing wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from torch import Tensor, arange

from fedcommons.artifacts import key_of
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.files import remote
from fedcommons.files.snapshots import Snapshots
from fedcommons.runs import experiment

FACTS = {"seed": 3}
KEY = key_of(FACTS)
TENSORS: dict[str, Tensor] = {"images": arange(6.0)}
SMALL = {
    "federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 2, "client.epochs": 1, "data.limit": 80,
    "tracking.wandb": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """An S3 of moto's."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Credentials of nobody's, and this endpoint."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    given = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**given, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    remote._opened.cache_clear()
    return endpoint


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new storage of each kind."""
    if request.param == "folder":
        return str(tmp_path / "storage")
    request.getfixturevalue("aws")
    return bucket(tmp_path)


def bucket(folder: Path) -> str:
    """A new bucket, named after a test's folder."""
    import boto3

    name = f"b-{abs(hash(str(folder)))}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/lab"


def test_a_snapshot(place: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"1")
    (tmp_path / "a" / "empty").write_bytes(b"")
    one = Snapshots(remote.opened(place), "runs/a", "[a-z]+")
    assert one.look() == {}
    one.send(tmp_path / "a")
    two = Snapshots(remote.opened(place), "runs/a", "[a-z]+")
    assert set(two.look()) == {"x", "empty"}
    assert two.bring(tmp_path / "b") == []
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == {"x": b"1", "empty": b""}


def small(storage: str | None, folder: Path, **values: Any) -> Experiment:
    return presets.experiment(
        "smoke", "digits", {**SMALL, "artifacts": str(folder / "artifacts"), "storage": storage, **values}
    )


def test_a_run(place: str, tmp_path: Path) -> None:
    experiment.run(small(place, tmp_path), tmp_path / "one" / "run")
    experiment.run(small(place, tmp_path), tmp_path / "two" / "run", resume=True)
