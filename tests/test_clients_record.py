"""What is recorded of each client: the server model on its own training images, round by round."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fedcommons import experiment, run
from fedcommons.federation.evaluation import CLIENTS
from fedcommons.federation.memory import ClientMemory
from fedcommons.reports.frames import load_clients, load_runs
from fedcommons.runs import build, measures
from fedcommons.tracking.run_folder import read_clients, read_rounds

FIELDS = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "measure.clients": True, "data.limit": 200, "partition.n_clients": 6, "alpha": 0.1,
}  # fmt: skip


def quiet(text: str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(experiment("smoke", values=FIELDS), path, say=quiet)
    return path


def test_each_clients_line_is_the_server_model_on_its_own_images(folder: Path) -> None:
    wanted = experiment("smoke", values=FIELDS)
    result = run(wanted, folder, say=quiet)
    own = build.prepare(wanted).dealt.own
    last = load_clients(folder).query("round == 3")
    assert last["client"].tolist() == list(range(6))
    for client, n, accuracy, loss in last[["client", "n", "accuracy", "loss"]].itertuples(index=False):
        data = own[client]
        with torch.no_grad():
            logits = result.model(data.x)
        assert n == len(data)
        assert accuracy == pytest.approx((logits.argmax(1) == data.y).float().mean().item(), abs=1e-6)
        assert loss == pytest.approx(F.cross_entropy(logits, data.y).item(), rel=1e-5)


def test_the_worst_client_stands_in_the_rounds(folder: Path) -> None:
    lines, clients = read_rounds(folder), read_clients(folder)
    assert [line["round"] for line in clients] == [line["round"] for line in lines] == [0, 1, 2, 3]
    for line, of_clients in zip(lines, clients, strict=True):
        assert line["clients/worst_accuracy"] == min(of_clients["accuracy"])
        assert of_clients["accuracy"][line["clients/worst"]] == line["clients/worst_accuracy"]
    assert load_runs(folder)["clients/worst_accuracy"].tolist() == [lines[-1]["clients/worst_accuracy"]]


@pytest.mark.parametrize("damage", ["cut", "behind", "gone"])
def test_a_resumed_run_writes_the_same_lines(damage: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    file = tmp_path / "run" / "clients.jsonl"
    whole = file.read_text()
    kept = {"cut": whole[:-20], "behind": "".join(whole.splitlines(keepends=True)[:3]), "gone": ""}[damage]
    file.write_text(kept)
    run(experiment("smoke", values=FIELDS), tmp_path / "run", say=quiet)
    for name in ("clients.jsonl", "rounds.jsonl", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()


def test_how_clients_are_cut_into_jobs_changes_no_bit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert CLIENTS > 6
    monkeypatch.setattr("fedcommons.federation.evaluation.CLIENTS", 4)
    ready = build.assemble(build.prepare(experiment("smoke", values=FIELDS)))
    executor = ready.executor()
    try:
        found, _ = measures.of_clients(ready, executor, ready.start(ClientMemory()))
        first = json.loads((folder / "clients.jsonl").read_text().splitlines()[0])
        assert {"round": 0, **found} == first
    finally:
        executor.close()


def test_nobody_is_recorded_unless_asked(tmp_path: Path) -> None:
    run(experiment("smoke", values={**FIELDS, "measure.clients": False}), tmp_path / "run", say=quiet)
    assert not (tmp_path / "run" / "clients.jsonl").exists()
    assert load_clients(tmp_path).empty
