"""``evaluate.every`` and ``evaluate.clients``: which rounds have metrics, and metrics on clients' own rows."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits
from torch.nn import functional as F

from fedcommons import Clients, Message, Reply, Result, State, experiment, load_clients, load_runs, run
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core import evaluation
from fedcommons.core.client_worker import module_with
from fedcommons.core.evaluation import spread
from fedcommons.core.returned import require_reply
from fedcommons.errors import ClientError, UserError
from fedcommons.federation import checkpoint, personal_evaluation, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, Flat, Payload
from fedcommons.reports import metrics
from fedcommons.runs import assemble, build, evaluate
from fedcommons.runs.assemble import Assembled
from fedcommons.tracking.run_folder import read_clients, read_rounds
from fedcommons.tune import work_counts

FIELDS: Mapping[str, Any] = {
    "wandb": "off", "federation.rounds": 5, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "evaluate.clients": True, "data.limit": 120, "partition.n_clients": 6, "alpha": 0.1,
}  # fmt: skip


def played(folder: Path, **fields: Any) -> Result:
    values = {**FIELDS, **{name.replace("__", "."): value for name, value in fields.items()}}
    return run(experiment("smoke", values=values), folder, say=lambda text: None)


def test_means_and_spreads_over_clients() -> None:
    for metric, values, sizes, (mean, weighted, worst) in (
        ("accuracy", [0.2, 0.4, 0.9], [1, 1, 2], (0.5, 0.6, 0.2)),
        ("top2_accuracy", [0.1 * i for i in range(11)], [1] * 11, (0.5, 0.5, 0.05)),  # the two worst of eleven
        ("loss", [1.0, 2.0, 3.0], [2, 1, 1], (2.0, 1.75, 3.0)),
        ("accuracy", [0.5, float("nan")], [4, 0], (0.5, 0.5, 0.5)),  # who has no rows counts nowhere
    ):
        result = spread(metric, values, sizes)
        std = pstdev([v for v, n in zip(values, sizes, strict=True) if n])
        assert (result["mean"], result["weighted_mean"], result["std"]) == pytest.approx((mean, weighted, std))
        assert result["worst_decile"] == pytest.approx(worst)
    for bad, n in (([0.5, float("nan")], [1, 1]), ([float("nan")], [0]), ([1e308], [0])):
        assert all(np.isnan(value) for value in spread("loss", bad, n).values())


def prepare(**fields: Any) -> Assembled:
    """Return a federation whose client i has i + 1 test rows, and client 2 none."""
    ready = assemble.assemble(build.build(experiment("smoke", values={**FIELDS, **fields})))
    rows = [np.arange(7 * i, 7 * i + i + 1) for i in range(6)]
    rows[2] = rows[2][:0]
    return ready.on(replace(ready.data, tests=Clients(ready.data.sets["test"], rows)))


def end(ready: Assembled) -> Standing:
    *_, (now, _) = rounds.run(ready.algorithm, ready.executor(), ready.plan, ready.start(ClientMemory()))
    return now


@pytest.mark.parametrize("algorithm", ["ditto", "fedper"])
def test_each_models_metrics_on_each_clients_own_test_rows_are_those_of_the_plain_loop(algorithm: str) -> None:
    ready = prepare(algorithm=algorithm, **{"federation.participation": 0.5})
    now, tests = end(ready), ready.data.tests
    assert tests is not None
    each, numbers = evaluate.of_clients(ready, ready.executor(), now)
    assert each["n"] == [1, 2, 0, 4, 5, 6]
    module = ready.executor().worker.work.module  # pyright: ignore[reportAttributeAccessIssue]
    models: dict[str, list[Flat]] = {} if algorithm == "fedper" else {"": [now.model] * 6}
    personal = (personal_evaluation.personal_model(ready.algorithm, now, i, keep_buffers=False) for i in range(6))
    models["personal/"] = [model for model, _ in personal]
    assert {name.rpartition("/")[0] for name in each} == {name.rstrip("/") for name in models} | {""}
    for prefix, of_clients in models.items():
        values = []
        for client, model in enumerate(of_clients):
            module_with(module, model, EMPTY).eval()
            if not len(rows := tests[client]):
                assert np.isnan(each[f"{prefix}accuracy"][client])
                continue
            with torch.no_grad():
                logits = module(rows.x)
            values.append((logits.argmax(1) == rows.y).float().mean().item())
            assert each[f"{prefix}accuracy"][client] == pytest.approx(values[-1], abs=1e-6)
            assert each[f"{prefix}loss"][client] == pytest.approx(F.cross_entropy(logits, rows.y).item(), rel=1e-4)
        which = prefix.rstrip("/") or "clients"
        assert numbers[f"{which}/accuracy_mean"] == pytest.approx(np.mean(values), abs=1e-6)
        assert numbers[f"{which}/accuracy_worst_decile"] == pytest.approx(min(values), abs=1e-6)
    assert not any("train" in name for name in (*each, *numbers))
    n = sum(len(ready.data.sets[name]) for name in ("test", "validation") if "" in models)
    assert work_counts.count_work(ready).evaluated == 6 * (n + 18 * len(models))  # as a dry run says


@pytest.mark.long
def test_rounds_between_evaluations_have_a_line_without_accuracies(tmp_path: Path) -> None:
    """And what is there is what a run says that evaluates in every round."""
    some = played(tmp_path / "some", algorithm="ditto", target=0.1, evaluate__every=2)
    every = played(tmp_path / "every", algorithm="ditto", target=0.1)
    due, records, of_all = {0, 2, 4, 5}, read_rounds(some.folder), read_rounds(every.folder)
    assert [line["round"] for line in records] == list(range(6))
    judged = ("test/", "validation/", "clients/", "personal/")
    for line, whole in zip(records, of_all, strict=True):
        others = {name: value for name, value in whole.items() if not name.startswith(judged)}
        assert line == (whole if line["round"] in due else others)
    for name in ("last_accuracy", "validation_accuracy", "personal/train_accuracy_mean", "rounds"):
        assert some.summary[name] == every.summary[name]
    seen = [r for r in sorted(due - {0}) if of_all[r]["test/accuracy"] >= 0.1]
    assert some.summary["rounds_to_target"] == seen[0]
    frame = load_clients(some.folder)
    assert frame["round"].unique().tolist() == sorted(due)
    last = frame.query("round == 5")
    assert records[5]["personal/train_accuracy_mean"] == pytest.approx(last["personal/train_accuracy"].mean())
    assert records[5]["clients/train_accuracy_std"] == pytest.approx(last["train_accuracy"].std(ddof=0))
    again = tmp_path / "again"  # with memory in files, and as if it had been killed within a line of round 4
    shutil.copytree(some.folder, again)
    (again / "summary.json").unlink()
    for name in ("rounds.jsonl", "clients.jsonl"):
        lines = (again / name).read_text().splitlines(keepends=True)
        (again / name).write_text("".join(lines[:4]) + lines[4][:9])
    assert load_runs(again)["validation_accuracy"].tolist() == [records[2]["validation/accuracy"]]
    played(again, algorithm="ditto", target=0.1, evaluate__every=2, federation__memory_mb=1e-3)
    assert list((again / "memory").glob("*.safetensors"))
    for name in ("clients.jsonl", "rounds.jsonl"):
        assert (again / name).read_bytes() == (some.folder / name).read_bytes()


def test_a_method_without_a_server_model_has_none_in_its_summary(tmp_path: Path) -> None:
    result = played(tmp_path / "run", algorithm="fedproto")
    assert {result.summary[n] for n in ("last_accuracy", "best_accuracy", "validation_accuracy")} == {None}
    assert result.summary["rounds_to_target"] is None
    assert 0 < result.summary["personal/train_accuracy_mean"] <= 1
    assert not any(name.startswith(("test/", "clients/")) for line in read_rounds(result.folder) for name in line)
    end = checkpoint.load_latest(result.folder / "checkpoints")
    assert end is not None
    assert (end.round, end.has_model) == (5, False)
    with pytest.raises(UserError, match="no server model"):
        _ = result.model


def test_a_clients_own_model_is_taken_out_of_a_run(tmp_path: Path) -> None:
    result = played(tmp_path / "run", algorithm="fedper")
    clients = build.build(result.experiment).client_data.clients
    for client, loss in enumerate(read_clients(result.folder)[-1]["personal/train_loss"]):
        with torch.no_grad():
            logits = result.personal(client)(clients[client].x)
        assert F.cross_entropy(logits, clients[client].y).item() == pytest.approx(loss, rel=1e-5)
    with pytest.raises(UserError, match=r"client must lie in \[0, 5\]"):
        result.personal(6)


def test_a_model_that_clients_still_train_at_evaluation_is_given_with_a_warning(tmp_path: Path) -> None:
    result = played(tmp_path / "run", algorithm="perfedavg")
    with pytest.warns(UserWarning, match="perfedavg.*after training"):
        module = result.personal(0)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), result.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("returned", "message"),
    [({"model": torch.zeros(3)}, "'model', a Flat of all weights"), ({"model": EMPTY}, "names or shapes")],
)
def test_what_is_no_model_is_refused_with_client_and_round(returned: Any, message: str, digits: Digits) -> None:
    class Odd(FedAvg):
        def personal(self, state: State, memory: Payload, message: Message) -> Payload:
            return returned

    federation, odd = digits(), Odd()
    plan, executor = federation.plan(1), federation.serial(odd)
    at, start = evaluation.ModelTask(federation.model), federation.start(odd, plan)
    with pytest.raises(ClientError, match=rf"Odd.personal, client 0, round 0: .*{message}"):
        personal_evaluation.evaluate_personal(odd, executor, at, start, plan, on_tests=False)


def test_runs_can_be_judged_by_clients() -> None:
    asked, not_asked = (experiment("smoke", values={**FIELDS, "evaluate.clients": on}) for on in (True, False))
    for metric, mode, sees_test in (
        ("personal/accuracy_mean", "max", True), ("clients/accuracy_worst_decile", "max", True),
        ("clients/accuracy_std", "min", True), ("personal/train_accuracy_mean", "max", False),
    ):  # fmt: skip
        assert (metrics.mode(metric), metrics.sees_test_data(metric)) == (mode, sees_test)
        metrics.require(metric, [asked])
        with pytest.raises(UserError, match=r"needs --evaluate\.clients true"):
            metrics.require(metric, [asked, not_asked])


def test_a_tensor_in_both_sums_and_each_is_counted_once_in_a_replys_bytes(digits: Digits) -> None:
    """Under one name in ``sums`` and ``each``; what the first is not the second times the weight is refused."""
    x = digits().model
    alone = Reply({"delta": x}, {"other": torch.zeros(2)})
    both = Reply({"delta": Flat(x.layout, 3.0 * x.buffer)}, {"delta": x, "other": torch.zeros(2)}, weight=3.0)
    require_reply(both)
    assert both.nbytes == alone.nbytes == x.buffer.nbytes + 8
    with pytest.raises(ValueError, match=r"'delta' is in Reply\.sums and Reply\.each"):
        require_reply(replace(both, weight=2.0))
