"""``evaluate.new_clients``: held-out examples never reach training; new clients adapt by SGD or the method's rule."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import quiet
from torch.nn import functional as F

from fedcommons import Clients, Examples, Experiment, Message, State, UserError, experiment, flat, put, run
from fedcommons.algorithms import partial_sharing
from fedcommons.algorithms.ditto import Ditto
from fedcommons.core.client_worker import module_with
from fedcommons.core.evaluation import spread
from fedcommons.data.new_clients import hold_out
from fedcommons.data.partition import Partitioned
from fedcommons.federation import rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.new_client_evaluation import require_received_model
from fedcommons.runs import assemble, build, evaluate
from fedcommons.tracking.run_folder import read_rounds
from fedcommons.tune import work_counts

X = torch.randint(0, 256, (240, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
X[:, 0, 0, 0] = torch.arange(240)  # the first pixel is the example's number
Y = torch.arange(240) % 4
FIELDS = {
    "tracking.wandb": "off", "data.client_test": 0.25, "data.limit": None, "data.validation": 0.0, "client.epochs": 1,
    "partition.n_clients": 6, "evaluate.new_clients": 0.4, "evaluate.clients": True, "measure.every": 1,
    "federation.rounds": 2, "federation.participation": 1.0,
}  # fmt: skip


def config(x: torch.Tensor = X, **fields: Any) -> Experiment:
    values = {**FIELDS, **{name.replace("__", "."): value for name, value in fields.items()}}
    data = {"train": {"x": x, "y": Y}, "test": {"x": X[:40], "y": Y[:40]}, "n_classes": 4}
    return experiment("smoke", data=data, values=values)


def numbers_in(x: torch.Tensor) -> set[int]:
    return set(x[:, 0, 0, 0].tolist())


@pytest.mark.long
@pytest.mark.parametrize("fields", [{"sharing": "shuffled_real", "sharing__p": 0.5}, {"algorithm": "fedmix"}], ids=str)
def test_changed_examples_of_new_clients_change_no_bit_of_training(fields: dict[str, Any], tmp_path: Path) -> None:
    """Neither by the shared data nor by the mean and standard deviation, which this data set does not state."""
    spec = build.build(config(**fields))
    new, tests = spec.new_clients, spec.tests
    assert new is not None
    assert tests is not None
    parts = [numbers_in(store.x) for store in (spec.train, tests.store, new.clients.store, new.tests.store)]
    assert [len(part) for part in parts] == [4 * 30, 4 * 10, 2 * 30, 2 * 10]
    assert set.union(*parts) == set(range(240))
    assert spec.dataset.mean[0] == pytest.approx(float(spec.train.x.float().mean() / 255), rel=1e-6)
    held_out, changed = sorted(parts[2] | parts[3]), X.clone()
    changed[held_out] = 255 - changed[held_out]
    first, other = (run(config(x, **fields), tmp_path / str(i), say=quiet) for i, x in enumerate((X, changed)))
    assert torch.equal(flat_of(first), flat_of(other))
    lines, others = read_rounds(first.folder), read_rounds(other.folder)
    news = {name for name in lines[-1] if name.startswith("new/")}
    assert news == {name for name in first.summary if name.startswith("new/")}
    assert not any(name.startswith("new/") for line in lines[:-1] for name in line)
    ends = [{n: v for n, v in each[-1].items() if n not in news} for each in (lines, others)]
    assert ends[0] == ends[1]
    assert lines[:-1] == others[:-1]
    assert all(lines[-1][f"new/{kind}loss_mean"] != others[-1][f"new/{kind}loss_mean"] for kind in ("", "adapted_"))


def flat_of(result: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize(
    "fields",
    [
        {"model__batch_norm": True, "client__momentum": 0.9, "client__lr_schedule": "cosine"},
        {"dp__local": True, "dp__noise_multiplier": 1.0},  # an adaptation sends nothing, so it has no noise
        {"algorithm": "fedper", "measure__every": 0},  # the head has its initial values
        {"algorithm": "perfedavg", "evaluate__adapt_epochs": 1},  # one step with alpha
        {"algorithm": "fedbabu", "evaluate__adapt_epochs": 1, "measure__every": 0, "client__lr_schedule": "cosine"},
    ],
    ids=str,
)
def test_adaptation_is_a_plain_loop_from_the_received_model(fields: dict[str, Any]) -> None:
    plain = {"evaluate__adapt_epochs": 3, "client__batch_size": 1000, "client__onednn": True}
    ready = assemble.assemble(build.build(config(**{**plain, **fields})))
    steps, lr = {"perfedavg": (1, 0.05), "fedbabu": (5, 0.1)}.get(fields.get("algorithm", ""), (3, 0.1))
    executor, start, new = ready.executor(), ready.start(ClientMemory()), ready.spec.new_clients
    assert new is not None
    *_, (now, _) = rounds.run(ready.algorithm, executor, ready.plan, start)
    result = evaluate.of_new_clients(ready, executor, now)
    expected: dict[str, list[float]] = {}
    for i in range(2):
        x = now.model if now.has_model else put(flat(now.state, "untrained"), flat(now.state, "shared"))
        module = module_with(ready.module(), x, now.buffers)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9 if "client__momentum" in fields else 0)
        for kind in ("", "adapted_"):
            for _ in range(steps if kind else 0):
                optimizer.zero_grad()
                F.cross_entropy(module.train()(new.clients[i].x), new.clients[i].y).backward()
                optimizer.step()
            with torch.no_grad():
                logits, y = module.eval()(new.tests[i].x), new.tests[i].y
            expected.setdefault(f"{kind}loss", []).append(F.cross_entropy(logits, y).item())
            expected.setdefault(f"{kind}accuracy", []).append(float((logits.argmax(1) == y).float().mean()))
    means = {f"new/{n}_{what}": v for n, values in expected.items() for what, v in spread(n, values, [10, 10]).items()}
    assert result == pytest.approx(means, abs=1e-6)
    assert result["new/loss_mean"] != result["new/adapted_loss_mean"]


@pytest.mark.long
def test_a_run_that_stops_early_evaluates_new_clients_once(tmp_path: Path) -> None:
    """And without adaptation only the received model is evaluated; ``partition.json`` lists the new clients."""
    early = {"federation.stop": "target", "target": "loss <= 9", "federation.rounds": 5, "evaluate.adapt_epochs": 0}
    result = run(config(**early), tmp_path, say=quiet)
    first, last = read_rounds(tmp_path)
    assert not any(name.startswith("new/") for name in first)
    statistics = ("mean", "weighted_mean", "std", "worst_decile")
    of_new = {f"new/{metric}_{what}" for metric in ("accuracy", "loss") for what in statistics}
    assert {name for name in last if name.startswith("new/")} == of_new
    assert result.summary["n_clients"] == 4
    listed = json.loads((tmp_path / "partition.json").read_text())
    assert (listed["sizes"], listed["new_clients"]["sizes"]) == ([30] * 4, [30] * 2)
    counts = [work_counts.count_work(assemble.assemble(build.build(config(evaluate__adapt_epochs=n)))) for n in (0, 2)]
    assert counts[1].examples - counts[0].examples == 2 * 60
    assert counts[1].evaluated - counts[0].evaluated == 20


def test_each_client_is_held_out_with_equal_probability_and_by_the_seed() -> None:
    examples = Examples(X, Y)
    partition = Partitioned(list(np.arange(240).reshape(12, 20)), None)
    tests = Clients(examples, list(np.arange(12).reshape(12, 1)))
    held_out = [hold_out(partition, examples, tests, 0.26, seed)[3].numbers for seed in (*range(400), 0)]
    assert held_out[0] == held_out[400]
    times = np.bincount(np.concatenate(held_out[:400]), minlength=12) / 400
    assert len(held_out[0]) == 3
    assert np.abs(times - 0.25).max() < 4.5 * (0.25 * 0.75 / 400) ** 0.5


class Indexed(Ditto):
    """A method without a server model whose server has a tensor for each client."""

    personal = partial_sharing.personal

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"shared": [state["shared"]][client]})


def test_a_method_without_a_model_for_an_unknown_client_is_refused() -> None:
    spec = build.build(config(algorithm="fedper", measure__every=0))
    state = assemble.assemble(spec).start(ClientMemory()).state
    require_received_model(spec.algorithm, "FedPer", state, spec.plan)
    with pytest.raises(UserError, match="Indexed has no model for a new client"):
        require_received_model(Indexed(), "Indexed", state, spec.plan)


def test_the_mean_and_deviation_of_the_remaining_clients_do_not_depend_on_a_shift() -> None:
    plain, shifted = (build.build(c).dataset for c in (config(), config(partition__shift="noise")))
    assert (plain.mean, plain.std) == (shifted.mean, shifted.std)
