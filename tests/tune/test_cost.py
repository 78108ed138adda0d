"""What ``--dry-run`` counts is what a run does, by spies on the engine and by components that note their own work."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel

from fedcommons.algorithms import feddm_matching
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.convergence import estimators
from fedcommons.core import evaluation
from fedcommons.core.algorithm import Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.work_units import Timed, pieces_of, prices, smaller_of
from fedcommons.errors import UserError
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import nbytes
from fedcommons.generators.image_cache import missing
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.runs import assemble, build, experiment
from fedcommons.runs.assemble import Assembled
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import shorter_of
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cost, dry_run
from fedcommons.tune.cost import Prices
from fedcommons.tune.work_counts import Counts, count_work, generator_work, local_steps
from lightning_modules import Classifier
from lightning_modules.ddpm import DDPM

TINY: dict[str, Any] = {
    "data.limit": 60, "partition.n_clients": 3, "federation.rounds": 3, "client.epochs": 3, "client.batch_size": 8,
    "measure.every": 2, "tracking.wandb": "off", "generator.epochs": 2, "generator.batch_size": 8,
    "generator.channels": (8, 8), "generator.sampling_steps": 3,
}  # fmt: skip
POOL = {"sharing.setting": "shuffled_synthetic"}
UNEQUAL = {"federation.participation": 0.7, "partition.name": "dirichlet_niid", "straggler.q": 0.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "pool": POOL, "pool, no equal work": {**POOL, "client.equal_work": False, "sharing.p": 0.25},
    "batches larger than the data": {"client.batch_size": 50, "client.drop_last": True},
    "dp": {"dp.local": True, "measure.every": 0}, "two models are evaluated": {"algorithm": "feddyn"},
    "some clients, unequal": {**UNEQUAL, "federation.rounds": 5},
    "some examples are measured": {**POOL, "measure.samples": 16, "partition.n_clients": 5, "federation.rounds": 1},
}  # fmt: skip


def _config(folder: Path, values: dict[str, Any]) -> Experiment:
    return choose({**presets.preset("smoke", "digits"), **TINY, "artifacts": str(folder / "artifacts"), **values})


def ready(folder: Path, values: dict[str, Any]) -> Assembled:
    prepared = build.build(_config(folder, values))
    return assemble.assemble(prepared, [cost.stand_in(need) for need in prepared.requests])


def spy(patch: pytest.MonkeyPatch, place: Any, name: str, note: Callable[..., None]) -> None:
    """Let a function of the engine call ``note`` with its arguments before it runs."""
    run = getattr(place, name)

    def noting(*given: Any, **named: Any) -> Any:
        note(*given, **named)
        return run(*given, **named)

    patch.setattr(place, name, noting)


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.long
def test_counted_work_is_the_work_of_a_run(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, values)
    b, dp = config.client.batch_size, config.dp.local

    def generators() -> list[tuple[int, int]]:
        return [generator_work(job) for job in missing(Store(Path(config.artifacts)), build.build(config).requests)]

    counts, work = count_work(ready(tmp_path, values)), generators()
    seen: Counter[str] = Counter()

    def trained(self: LocalSGD, work: Work, *given: Any, run: Any = LocalSGD.run, **named: Any):
        def loss(batch: Any, number: int) -> torch.Tensor:
            seen["full" if len(batch[1]) == b else "rest"] += 1
            seen["rest_examples"] += len(batch[1]) % b
            return work.module.training_step(batch, number)  # pyright: ignore[reportReturnType]

        found = run(self, work, *given, **(named if dp else {**named, "loss": loss}))
        seen.update(trainings=1, full=int(found.metrics["steps"]) if dp else 0)
        return found

    def chunk(worker: Any, task: Any, job: tuple[str, int]) -> None:
        seen["evaluated"] += len(worker.data.sets[job[0]].y[job[1] :][: evaluation.CHUNK])

    monkeypatch.setattr(LocalSGD, "run", trained)
    spy(monkeypatch, evaluation, "evaluate_chunk", chunk)
    spy(monkeypatch, estimators, "gradients", lambda *_: seen.update(gradients=1))
    spy(monkeypatch, DDPM, "training_step", lambda *_: seen.update(steps=1))
    spy(monkeypatch, UNet2DModel, "forward", lambda unet, x, *_, **__: seen.update(drawn=len(x) * (not unet.training)))
    experiment.run(config, tmp_path / "run", say=lambda _: None)
    for name in ("full", "rest", "rest_examples", "evaluated", "gradients", "trainings"):
        assert getattr(counts, name) == seen[name], name
    assert seen["full"] + seen["rest"] > 0
    assert [sum(numbers) for numbers in zip(*work, strict=True)] in ([], [seen["steps"], seen["drawn"]])
    assert bool(work) == ("sharing.setting" in values) == (seen["steps"] > 0)
    assert generators() == []  # what is in the store costs nothing


def test_counts_in_closed_form(tmp_path: Path) -> None:
    """Of more than 1,000 rounds the first 1,000 are drawn and scaled up."""
    rounds = {"federation.rounds": 2345, "federation.checkpoint_every": 1000, "measure.every": 500,
              "measure.smoothness": True, "evaluate.every": 1000}  # fmt: skip
    counts, data = count_work(ready(tmp_path, rounds)), build.load(_config(tmp_path, rounds).data)
    assert counts.trainings == pytest.approx(3 * 2345)
    assert (counts.rounds, counts.checkpoints) == (2345, 3)
    assert counts.products == 40 * counts.gradients == 40 * 6 * 3  # rounds 0, 500 ... 2000, 2345; a batch per client
    assert counts.evaluated == 4 * (len(data.test) + len(data.validation))  # rounds 0, 1000, 2000, 2345


@pytest.mark.parametrize("q", [0.0, 0.9])
def test_clients_are_counted_until_they_have_sent_what_they_send_once(q: float, tmp_path: Path) -> None:
    tiny = {"federation.rounds": 6, "measure.every": 0, "straggler.q": q, "seed": 1}
    values = {"algorithm": "fedcvae", "fedcvae.channels": (2,), "fedcvae.samples": 10, **tiny}
    trained, asked = 0.0, 0.0

    def note(round: int, metrics: Mapping[str, float | None]) -> None:
        nonlocal trained, asked
        joined = metrics.get("clients") or 0.0
        trained, asked = trained + joined - (metrics.get("stragglers") or 0.0), asked + joined

    experiment.run(_config(tmp_path, values), tmp_path / "run", say=lambda _: None, on_round=note)
    assert count_work(ready(tmp_path, values)).trainings == trained > 0
    assert (asked > 3) == (q > 0)  # some were asked again


def test_counted_pieces_of_feddm_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"algorithm": "feddm", "feddm.ipc": 2, "feddm.least": 3, "feddm.iterations": 3, "feddm.server_epochs": 2,
              "measure.every": 0, "data.limit": 120, **UNEQUAL}  # fmt: skip
    counts, seen = count_work(ready(tmp_path, values)), Counter[str]()

    def features(module: Any, head: Any, x: torch.Tensor) -> None:
        seen["synthetic" if torch.is_grad_enabled() else "real"] += len(x)

    def server_step(module: Any, batch: Any, *_: Any) -> None:
        seen.update(server_steps=1, server_images=len(batch[1]))

    spy(monkeypatch, feddm_matching, "around", lambda *_: seen.update(steps=1))
    spy(monkeypatch, feddm_matching, "features", features)
    spy(monkeypatch, Classifier, "training_step", server_step)
    experiment.run(_config(tmp_path, values), tmp_path / "run", say=lambda _: None)
    assert seen == counts.pieces
    assert min(seen.values()) > 0
    assert (counts.full, counts.rest) == (0, 0)


def test_local_steps_in_closed_form() -> None:
    loop = LocalSGD(epochs=10, batch_size=32)
    assert local_steps(loop, 100, 100) == (30, 10)
    assert local_steps(loop, 96, 96) == (30, 0)
    assert local_steps(loop, 200, 100) == (30, 5)  # E' = 5
    assert local_steps(loop, 20, 20) == (0, 10)
    assert local_steps(LocalSGD(10, 32, drop_last=True), 100, 100) == (30, 0)
    assert local_steps(LocalSGD(10, 32, drop_last=True), 20, 20) == (0, 10)
    assert local_steps(LocalSGD(10, 32, equal_work=False), 200, 100) == (60, 10)
    assert local_steps(LocalSGD(10, 32, dp=DPSGD(1, 1)), 100, 100) == (40, 0)


PRICES = Prices(step=2.0, half=1.5, training=5, round=7, checkpoint=11, example=0.1, gradient=13, product=17,
                memory=0, state=0, memory_bytes=0)  # fmt: skip


def test_prices_times_counts() -> None:
    for name, price in (("full", 2.0), ("trainings", 5), ("checkpoints", 11), ("evaluated", 0.1), ("gradients", 13)):
        work: dict[str, Any] = {name: 10}
        assert PRICES.seconds(Counts(0, **work), 8) == pytest.approx(10 * price)
    assert PRICES.seconds(Counts(10), 8) == 70
    assert PRICES.seconds(Counts(0, products=2), 8) == 34
    for size, price in ((4, 1.5), (8, 2.0), (6, 1.75), (2, 1.25)):  # on the line through B/2 and B
        assert PRICES.seconds(Counts(0, rest=3, rest_examples=3 * size), 8) == pytest.approx(3 * price)
    assert PRICES.seconds(Counts(0, full=3), 1) == 6
    assert replace(PRICES, pieces={"a": 0.5, "b": 2}).seconds(Counts(0, pieces={"a": 4, "b": 3}), 8) == 8
    with pytest.raises(UserError, match="no price of b"):
        replace(PRICES, pieces={"a": 0.5}).seconds(Counts(0, pieces={"b": 3}), 8)


def test_local_steps_of_rounds_with_other_clients_are_no_pieces() -> None:
    """Rounds of 1 and of 32 examples differ in their local steps, too: only those of as many are compared."""
    rounds = [Timed(1, {"a": 1}, 3.0), Timed(1, {"a": 5}, 11.0), Timed(32, {"a": 5}, 70.0)]
    assert prices("Mine", rounds) == pytest.approx({"a": 2.0})
    with pytest.raises(UserError, match=r"Mine\.smaller does not tell the prices of a apart"):
        prices("Mine", rounds[1:])


def test_places_are_filled_in_order_and_durations_and_sizes_in_words() -> None:
    assert dry_run.makespan([3, 1, 2], 1) == 6
    assert dry_run.makespan([3, 1, 2], 3) == dry_run.makespan([3, 1, 2], 9) == 3
    assert dry_run.makespan([3, 2, 2], 2) == dry_run.makespan([1] * 7, 2) == 4
    assert dry_run.makespan([], 2) == 0
    durations = [dry_run.duration(s) for s in (0.26, 9.4, 90, 130, 3599, 7200, 86400 * 3.5)]
    assert durations == ["0.3 s", "9.4 s", "90 s", "2.2 min", "60 min", "2 h", "3.5 days"]
    assert [dry_run.amount(n) for n in (12, 1500, 12e6, 3.14e9)] == ["12 B", "1.5 kB", "12 MB", "3.1 GB"]


def test_shapes_are_shared_by_what_does_not_change_a_step(tmp_path: Path) -> None:
    one = cost.shape_of(ready(tmp_path, {}))
    same = {"seed": 3, "partition.alpha": 0.5, "client.lr": 0.3, "federation.rounds": 9, **POOL}
    assert cost.shape_of(ready(tmp_path, same)) == one
    for other in ({"algorithm": "fedprox"}, {"client.batch_size": 9}, {"model.hidden": 9}, {"dp.local": True}):
        assert cost.shape_of(ready(tmp_path, other)) != one


def test_a_measurement_leaves_nothing_and_finds_prices_even_where_training_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"algorithm": "scaffold", "measure.smoothness": True, "client.lr": 1e10, "client.momentum": 0.0}
    found = cost.measure(one := ready(tmp_path, values))
    assert list(tmp_path.iterdir()) == []
    assert all(value > 0 for value in (found.checkpoint, found.example, found.gradient, found.product, found.memory))
    assert found.step + found.training + found.round > 0
    start = one.start(ClientMemory())
    assert (found.state, found.memory_bytes) == (nbytes(start.state), nbytes({"control": start.model}))


@pytest.mark.usefixtures("untimed")
def test_a_dry_run_writes_nothing_and_a_finished_run_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sweeps: Callable[[str], ModuleType]
) -> None:
    run = sweeps("run").run
    words = ["--preset=smoke", "--data.limit=60", "--federation.rounds=1", "--wandb=off", f"--out={tmp_path}/one"]
    for printed in ("one: ", "one: done"):
        assert run([*words, "--dry-run"]) == 0
        assert printed in capsys.readouterr().out
        assert bool([*tmp_path.iterdir()]) == (printed == "one: done")
        run([*words, "--resume"])


STEPS: list[int] = []
SECONDS = [0.0]
"""A clock that only the method moves."""


@dataclass(frozen=True)
class Polish(FedAvg):
    """FedAvg whose server takes steps, more for more replies, and none without a reply."""

    epochs: int = 50

    def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
        reply = super().client(work, message, memory, data, round, seed)
        SECONDS[0] += 1.0 + 0.5 * reply.metrics["steps"] + 0.01 * work.loop.epochs * len(data)
        return reply

    def merge(self, executor: Any, state: Any, total: Any, replies: Any, round: int, seed: int) -> Any:
        state = super().merge(executor, state, total, replies, round, seed)
        steps = self.epochs * (1 + len(replies)) if replies else 0
        STEPS.append(steps)
        SECONDS[0] += 2.0 * steps
        return state

    def pieces(self, facts: Any, loop: Any, round: int, clients: Any) -> dict[str, float]:
        return {"server_steps": self.epochs * (1 + len(clients)) if len(clients) else 0}

    def smaller(self, times: int) -> list[tuple["Polish", int]]:
        return [(replace(self, epochs=e), n) for e, n in ((1, 4), (1 + times, 4), (1 + times, 16))]


def test_a_prediction_is_exact_by_a_clock_that_only_the_method_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds: 2 of a step of the server, 1 of a training of a client, 0.5 + 0.01 B of a local step of B examples."""
    own = {"algorithm": f"{__file__}:Polish", "measure.every": 0, "federation.rounds": 6, **UNEQUAL, "straggler.q": 0.7}
    mine, average = ready(tmp_path, own), ready(tmp_path, {**own, "algorithm": "fedavg"})
    module: Any = sys.modules[type(mine.algorithm).__module__]
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: module.SECONDS[0]))
    assert cost.shape_of(ready(tmp_path, {**own, "polish.epochs": 7})) == cost.shape_of(mine)
    found, counts = cost.measure(mine), count_work(mine)
    assert max(module.STEPS) < 2 * 2 * (1 + cost.MORE)  # the 50 epochs were not run
    assert found.pieces == {"server_steps": pytest.approx(2.0)}
    values = (found.step, found.half, found.training, found.round, found.checkpoint)
    assert values == pytest.approx((0.58, 0.54, 1.0, 0.0, 0.0))
    assert replace(counts, pieces={}) == count_work(average)
    module.STEPS.clear()
    before = module.SECONDS[0]
    experiment.run(_config(tmp_path, own), tmp_path / "run", say=lambda _: None)
    assert counts.pieces == {"server_steps": sum(module.STEPS)}
    assert found.seconds(counts, 8) == pytest.approx(module.SECONDS[0] - before)


@dataclass(frozen=True)
class Mixes(Real):
    """A stage that trains for a number of epochs."""

    epochs: int = 500

    def shorter(self) -> tuple["Mixes", float]:
        return replace(self, epochs=2), self.epochs / 2


def test_a_stage_that_takes_long_is_priced_by_a_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=count(0.0, 3.0).__next__))  # all takes 3 seconds
    for epochs in (500, 2):
        prepared = build.build(_config(tmp_path, {"sharing.setting": f"{__file__}:Mixes", "sharing.epochs": epochs}))
        assert cost.contribute(prepared, [])[1] == 3 * epochs / 2
    assert shorter_of(Real()) == (Real(), 1.0)


@dataclass(frozen=True)
class Wrong(FedAvg):
    """FedAvg with this as its pieces, variants and shorter stage."""

    answer: Any = None

    def pieces(self, *given: Any) -> Any:
        return self.answer

    def smaller(self, times: int) -> Any:
        return self.answer

    def shorter(self) -> Any:
        return self.answer


PIECES = [None, {"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": "many"}, {1: 2.0}]
VARIANTS = [None, [], [Wrong()], [(Wrong(), 0)], [(Wrong(), 1.5)], [(FedAvg(), 4)]]
SHORTER = [None, Wrong(), (Wrong(), 0), (Wrong(), float("nan")), (Wrong(), -1.0), (Real(), 2.0)]


def test_wrong_pieces_variants_and_shorter_stages_are_refused() -> None:
    for wrong in PIECES:
        with pytest.raises(UserError, match=r"Wrong\.pieces must give numbers of at least 0.*got "):
            pieces_of(Wrong(wrong), Facts(1, [1.0], 1), LocalSGD(1, 8), 1, [0])
    for wrong in VARIANTS:
        with pytest.raises(UserError, match=r"Wrong\.smaller must give pairs.*at least 1, got "):
            smaller_of(Wrong(wrong), 2)  # pyright: ignore[reportArgumentType]
    for wrong in SHORTER:
        with pytest.raises(UserError, match=r"Wrong\.shorter must return a Wrong .* above 0.*got "):
            shorter_of(Wrong(wrong))  # pyright: ignore[reportArgumentType]
