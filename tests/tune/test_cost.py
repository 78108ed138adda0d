"""What ``--dry-run`` counts is what a run does, by spies on the engine and by components that note their own work."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel

from fedcommons import Clients, Examples, Experiment, LocalSGD, RunData, UserError, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.convergence import estimators
from fedcommons.core import evaluation
from fedcommons.core.algorithm import repeats_of
from fedcommons.core.capabilities import Capabilities, capabilities_of
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import nbytes
from fedcommons.generators.image_cache import missing
from fedcommons.runs import assemble, build, experiment
from fedcommons.runs.assemble import Assembled
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import shorter_of
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cost, dry_run, small_rounds
from fedcommons.tune.work_counts import Amounts, batches_measured, count_work, generator_work
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
    "two models are evaluated": {"algorithm": "feddyn"},
    "some clients, unequal": {**UNEQUAL, "federation.rounds": 5},
    "stragglers reply with a part": {"algorithm": "fedprox", "straggler.rule": "slow"},
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

    def noting(*arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return run(*arguments, **named)

    patch.setattr(place, name, noting)


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.long
def test_counted_work_is_the_work_of_a_run(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path, values)

    def generators() -> list[tuple[int, int]]:
        return [generator_work(job) for job in missing(Store(Path(config.artifacts)), build.build(config).requests)]

    counts, work = count_work(ready(tmp_path, values)), generators()
    seen: Counter[str] = Counter()

    def trained(self: LocalSGD, work: Work, *arguments: Any, run: Any = LocalSGD.run, **named: Any):
        def loss(batch: Any, number: int) -> torch.Tensor:
            seen.update(examples=len(batch[1]))
            return work.module.training_step(batch, number)  # pyright: ignore[reportReturnType]

        return run(self, work, *arguments, **{**named, "loss": loss})

    def chunk(worker: Any, task: Any, job: tuple[str, int]) -> None:
        seen["evaluated"] += len(worker.data.sets[job[0]].y[job[1] :][: evaluation.CHUNK])

    monkeypatch.setattr(LocalSGD, "run", trained)
    spy(monkeypatch, evaluation, "evaluate_chunk", chunk)
    measured = Counter[str]()
    spy(monkeypatch, estimators, "gradients", lambda *_: measured.update(batches=1))
    spy(monkeypatch, DDPM, "training_step", lambda *_: seen.update(steps=1))
    spy(monkeypatch, UNet2DModel, "forward", lambda unet, x, *_, **__: seen.update(drawn=len(x) * (not unet.training)))
    experiment.run(config, tmp_path / "run", say=lambda _: None)
    assert counts.examples == seen["examples"] > 0
    assert counts.evaluated == seen["evaluated"] > 0
    assert counts.untrained + counts.measured == measured["batches"] or config.measure.samples
    assert [sum(numbers) for numbers in zip(*work, strict=True)] in ([], [seen["steps"], seen["drawn"]])
    assert bool(work) == ("sharing.setting" in values) == (seen["steps"] > 0)
    assert generators() == []  # what is in the store costs nothing


def test_counts_in_closed_form(tmp_path: Path) -> None:
    """Of more than 1,000 rounds the first 1,000 are drawn and scaled up."""
    rounds = {"federation.rounds": 2345, "federation.checkpoint_every": 1000, "measure.every": 500,
              "measure.smoothness": True, "evaluate.every": 1000}  # fmt: skip
    counts, data = count_work(ready(tmp_path, rounds)), build.load(_config(tmp_path, rounds).data)
    assert counts.examples == pytest.approx(3 * 2345 * len(data.train))  # three epochs
    assert counts.trainings == pytest.approx(3 * 2345)
    assert (counts.rounds, counts.alone, counts.once, counts.checkpoints) == (2345, 0, 0, 3)
    assert (counts.untrained, counts.measured) == (3, 5 * 3)  # rounds 0, 500 ... 2000, 2345; a batch per client
    assert counts.evaluated == 4 * (len(data.test) + len(data.validation))  # rounds 0, 1000, 2000, 2345


@pytest.mark.parametrize("q", [0.0, 0.9])
def test_rounds_are_counted_until_the_clients_have_sent_what_they_send_once(q: float, tmp_path: Path) -> None:
    tiny = {"federation.rounds": 6, "measure.every": 0, "straggler.q": q, "seed": 1}
    values = {
        "algorithm": "fedcvae", "fedcvae.channels": (2,), "fedcvae.samples": 10, "fedcvae.local_epochs": 4, **tiny,
    }  # fmt: skip
    seen = Counter[str]()

    def note(round: int, metrics: Mapping[str, float | None]) -> None:
        joined = metrics.get("clients") or 0.0
        seen.update(replies=joined > (metrics.get("stragglers") or 0.0), alone=round > 0 and not joined)

    experiment.run(_config(tmp_path, values), tmp_path / "run", say=lambda _: None, on_round=note)
    counts = count_work(ready(tmp_path, values))
    assert (counts.rounds, counts.once, counts.alone) == (seen["replies"], 1, seen["alone"])
    assert seen["replies"] + seen["alone"] < 6 or not q  # without a reply, clients are asked again
    n = len(build.load(_config(tmp_path, values).data).train)
    assert counts.examples == 4 * n * (counts.trainings / 3) > 0 or q


def test_the_last_training_before_an_ensemble_may_have_other_epochs(tmp_path: Path) -> None:
    values = {"algorithm": "dense", "dense.warmup_rounds": 2, "dense.client_epochs": 7, "federation.rounds": 6}
    counts, n = count_work(ready(tmp_path, values)), len(build.load(_config(tmp_path, values).data).train)
    assert (counts.rounds, counts.alone, counts.trainings) == (3, 3, 9)
    assert counts.examples == (3 + 3 + 7) * n


def test_measured_batches_in_closed_form() -> None:
    store = Examples(torch.zeros(100, 1), torch.zeros(100, dtype=torch.int64))
    real = Clients(store, [np.arange(100), np.arange(40), np.arange(10)])
    assert batches_measured(RunData(real, real), None) == 4 + 2 + 1
    assert batches_measured(RunData(real, Clients(store, real.rows), pool=real), None) == 3 * 7
    assert batches_measured(RunData(real, real), 64) == 2 + 2 + 1
    assert batches_measured(RunData(real, real), 8) == 7  # too few for disjoint samples: all examples are measured


def test_seconds_are_amounts_times_prices() -> None:
    prices = Amounts(7, 5, 2, 0.1, 0.01, 13, 19, 11, 17)
    assert Amounts(1, 1, 1, 1, 1, 1, 1, 1, 1).seconds(prices) == pytest.approx(74.11)
    assert Amounts(trainings=20, checkpoints=3).seconds(prices) == pytest.approx(53)


def test_places_are_filled_in_order_and_durations_and_sizes_in_words() -> None:
    assert dry_run.makespan([3, 1, 2], 1) == 6
    assert dry_run.makespan([3, 1, 2], 3) == dry_run.makespan([3, 1, 2], 9) == 3
    assert dry_run.makespan([3, 2, 2], 2) == dry_run.makespan([1] * 7, 2) == 4
    assert dry_run.makespan([], 2) == 0
    durations = [dry_run.duration(s) for s in (0.26, 9.4, 90, 130, 3599, 7200, 86400 * 3.5)]
    assert durations == ["0.3 s", "9.4 s", "90 s", "2.2 min", "60 min", "2 h", "3.5 days"]
    assert [dry_run.amount(n) for n in (12, 1500, 12e6, 3.14e9)] == ["12 B", "1.5 kB", "12 MB", "3.1 GB"]


def test_shapes_are_shared_by_what_does_not_change_a_step(tmp_path: Path) -> None:
    shape = cost.shape_of(ready(tmp_path, {}))
    same = {"seed": 3, "client.lr": 0.3, "federation.rounds": 9, "evaluate.every": 2}
    assert cost.shape_of(ready(tmp_path, same)) == shape
    for other in ({"algorithm": "fedprox"}, {"client.batch_size": 9}, {"model.hidden": 9}, {"dp.local": True}):
        assert cost.shape_of(ready(tmp_path, other)) != shape


@pytest.mark.usefixtures("untimed")
def test_runs_that_differ_in_seed_and_learning_rates_are_timed_once_and_other_runs_again(tmp_path: Path) -> None:
    bill = dry_run.Bill()
    rates = {"fedcvae.local_lr": 0.01, "fedcvae.server_lr": 0.1, "client.lr": 0.3, "seed": 5}
    for more, n_timed in (({}, 1), (rates, 1), ({"fedcvae.beta": 2.0}, 2)):
        values = {"algorithm": "fedcvae", "fedcvae.channels": (2,), "fedcvae.samples": 10, "measure.every": 0, **more}
        dry_run.add_trial(build.build(_config(tmp_path, values)), bill)
        assert len(bill.trials) == len(bill.prices) == n_timed
    assert len(bill.phases["cells"]) == 3


def test_a_measurement_leaves_nothing_and_finds_prices_even_where_training_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"algorithm": "scaffold", "measure.smoothness": True, "client.lr": 1e10, "client.momentum": 0.0, **POOL}
    prices = cost.measure(setup := ready(tmp_path, values))
    assert list(tmp_path.iterdir()) == []
    seconds = prices.seconds
    assert all(
        value > 0
        for value in (seconds.checkpoints, seconds.evaluated, seconds.untrained, seconds.measured, prices.memory)
    )
    assert seconds.examples + seconds.trainings + seconds.rounds > 0
    start = setup.start(ClientMemory())
    assert (prices.state, prices.memory_bytes) == (nbytes(start.state), nbytes({"control": start.model}))


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


SECONDS = [0.0]
"""A clock that only the method moves."""


@dataclass(frozen=True)
class Polishing:
    epochs: int
    nbytes: int = 0


def polish(worker: Any, task: Polishing, seed: int) -> int:
    SECONDS[0] += 7.0 + 2.0 * task.epochs
    return 0


@dataclass(frozen=True)
class Polish(FedAvg):
    """FedAvg whose server repeats some work in a job."""

    capabilities = Capabilities(repeats={"polish": "epochs"})
    epochs: int = 50

    def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
        SECONDS[0] += 0.5 + 0.01 * work.loop.epochs * len(data)
        return super().client(work, message, memory, data, round, seed)

    def merge(self, executor: Any, state: Any, total: Any, replies: Any, round: int, seed: int) -> Any:
        SECONDS[0] += 0.5 * len(replies)
        executor.map(polish, Polishing(self.epochs), [seed])
        return super().merge(executor, state, total, replies, round, seed)


def test_a_prediction_is_exact_by_a_clock_that_only_the_method_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"algorithm": f"{__file__}:Polish", "measure.every": 0, "federation.rounds": 6, "client.epochs": 9,
           "partition.n_clients": 5, "federation.participation": 0.7, "partition.name": "dirichlet_niid"}  # fmt: skip
    setup = ready(tmp_path, fields)
    module: Any = sys.modules[type(setup.algorithm).__module__]
    for place in (cost, small_rounds):
        monkeypatch.setattr(place, "time", SimpleNamespace(perf_counter=lambda: module.SECONDS[0]))
    seconds = cost.measure(setup).seconds
    assert module.SECONDS[0] < 9 * (2 * 13 + 30)  # the 50 epochs were not run
    assert (seconds.rounds, seconds.checkpoints) == pytest.approx((1.5 + 107.0, 0.0))
    assert (seconds.trainings, seconds.examples) == pytest.approx((0.5, 0.01))
    before = module.SECONDS[0]
    experiment.run(_config(tmp_path, fields), tmp_path / "run", say=lambda _: None)
    assert count_work(setup).seconds(seconds) == pytest.approx(module.SECONDS[0] - before)


METHODS: dict[str, dict[str, Any]] = {
    "feddm": {}, "fedlap": {}, "dense": {"dense.generator_steps": 2}, "coboosting": {"coboosting.generator_steps": 2},
    "fedcvae": {"fedcvae.channels": (2,), "fedcvae.samples": 10}, "one_shot": {"sharing.setting": "server_synthetic"},
    "fedddpm": {"sharing.setting": "server_synthetic", "model.name": "ddpm"}, "feddf": {"data.public": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_the_named_jobs_repeat_their_work(name: str, tmp_path: Path) -> None:
    values = {"algorithm": name, "measure.every": 0, "federation.rounds": 3, **METHODS[name]}
    setup = ready(tmp_path, values)
    small = small_rounds.SmallRounds(setup, 1, None, 3)
    capabilities = capabilities_of(small.method)
    now, seconds = small.play()
    assert {job for _, job in seconds} >= set(capabilities.repeats)
    assert all(getattr(small.method, constant) == 1 for constant in capabilities.repeats.values())
    state: Any = now.state
    grown = [state[entry].shape[dimension] for entry, dimension in capabilities.grows.items()]
    assert all(n > 2 * small.method.generated for n in grown)


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
    """FedAvg with this as its shorter stage."""

    answer: Any = None

    def shorter(self) -> Any:
        return self.answer


SHORTER = [None, Wrong(), (Wrong(), 0), (Wrong(), float("nan")), (Wrong(), -1.0), (Real(), 2.0)]


@pytest.mark.parametrize("wrong", SHORTER, ids=str)
def test_wrong_shorter_stages_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"Wrong\.shorter must return a Wrong .* above 0.*got "):
        shorter_of(Wrong(wrong))  # pyright: ignore[reportArgumentType]


REPEATS: list[Any] = [5, ("polish",), {"polish": "steps"}, {"polish": "answer"}, {"polish": 3}]


@pytest.mark.parametrize("wrong", REPEATS, ids=str)
def test_wrong_repeated_work_is_refused(wrong: Any) -> None:
    class RepeatsWrongly(Wrong):
        capabilities = Capabilities(repeats=wrong)

    with pytest.raises(UserError, match=r"RepeatsWrongly: the capability repeats must map .* got "):
        repeats_of(RepeatsWrongly("many"))
