"""The record of each client: the server model on its own training images, round by round."""

from pathlib import Path

import pytest
import torch
from report_runs import copies, quiet
from torch.nn import functional as F

from fedcommons import experiment, run
from fedcommons.federation.evaluation import CLIENTS
from fedcommons.reports.frames import load_clients, load_runs
from fedcommons.runs import build
from fedcommons.tracking.run_folder import read_clients, read_rounds

FIELDS = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "measure.clients": True, "data.limit": 200, "partition.n_clients": 6, "alpha": 0.1,
}  # fmt: skip
MANY = {"partition": "iid", "partition.n_clients": CLIENTS + 2, "federation.rounds": 1, "alpha": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(experiment("smoke", values=FIELDS), path, say=quiet)
    return path


@pytest.mark.parametrize("fields", [{}, MANY], ids=["one job", "two jobs"])
@pytest.mark.long
def test_each_clients_line_is_the_server_model_on_its_own_images(fields: dict[str, object], tmp_path: Path) -> None:
    values = {name: value for name, value in {**FIELDS, **fields}.items() if value is not None}
    wanted = experiment("smoke", values=values)
    result = run(wanted, tmp_path, say=quiet)
    own, rounds = build.prepare(wanted).dealt.own, values["federation.rounds"]
    last = load_clients(tmp_path).query(f"round == {rounds}")
    assert last["client"].tolist() == list(range(len(own)))
    for client, n, accuracy, loss in last[["client", "n", "accuracy", "loss"]].itertuples(index=False):
        data = own[client]
        with torch.no_grad():
            logits = result.model(data.x)
        assert n == len(data)
        assert accuracy == pytest.approx((logits.argmax(1) == data.y).float().mean().item(), abs=1e-6)
        assert loss == pytest.approx(F.cross_entropy(logits, data.y).item(), rel=1e-5)


@pytest.mark.long
def test_the_worst_client_stands_in_the_rounds_and_a_resumed_run_writes_the_same_lines(
    folder: Path, tmp_path: Path
) -> None:
    lines, clients = read_rounds(folder), read_clients(folder)
    assert [line["round"] for line in clients] == [line["round"] for line in lines] == [0, 1, 2, 3]
    for line, of_clients in zip(lines, clients, strict=True):
        assert line["clients/worst_accuracy"] == min(of_clients["accuracy"])
        assert of_clients["accuracy"][line["clients/worst"]] == line["clients/worst_accuracy"]
    assert load_runs(folder)["clients/worst_accuracy"].tolist() == [lines[-1]["clients/worst_accuracy"]]
    whole = (folder / "clients.jsonl").read_text()
    for number, kept in enumerate((whole[:-20], "".join(whole.splitlines(keepends=True)[:3]), "")):
        (path,) = copies(folder, tmp_path, str(number))
        (path / "summary.json").unlink()
        (path / "clients.jsonl").write_text(kept)
        run(experiment("smoke", values=FIELDS), path, say=quiet)
        for name in ("clients.jsonl", "rounds.jsonl", "summary.json"):
            assert (path / name).read_bytes() == (folder / name).read_bytes()
    run(experiment("smoke", values={**FIELDS, "measure.clients": False}), tmp_path / "without", say=quiet)
    assert not (tmp_path / "without" / "clients.jsonl").exists()
    assert load_clients(tmp_path / "without").empty
