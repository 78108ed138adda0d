"""What ``--dry-run`` counts is what a run does, by spies on the engine; prices and local steps in closed form."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d import UNet2DModel

from fedcommons.algorithms import matching
from fedcommons.algorithms.feddm import FedDM
from fedcommons.artifacts import Store
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose
from fedcommons.convergence import estimators
from fedcommons.core.algorithm import Facts
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.pieces import Timed, in_seconds, prices
from fedcommons.core.work import Work
from fedcommons.errors import UserError
from fedcommons.federation import evaluation
from fedcommons.runs import build, cost, experiment, inputs
from fedcommons.runs.cost import Prices
from fedcommons.runs.counting import Counts, counted, generator_work, local_steps
from fedcommons.sharing.synthetic_pool import missing
from fedcommons.sweeping import planned
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.sweep import Trial
from fedcommons.tensors import nbytes
from lightning_modules import Classifier
from lightning_modules.ddpm import DDPM

TINY: dict[str, Any] = {
    "data.limit": 60, "partition.n_clients": 3, "federation.rounds": 3, "client.epochs": 3, "client.batch_size": 8,
    "measure.every": 2, "tracking.wandb": "off", "generator.epochs": 2, "generator.batch_size": 8,
    "generator.channels": (8, 8), "generator.sampling_steps": 3,
}  # fmt: skip
POOL = {"sharing.setting": "shuffled_synthetic"}
SETTINGS: dict[str, dict[str, Any]] = {
    "real": {},
    "pool": POOL,
    "pool, no equal work": {**POOL, "client.equal_work": False, "sharing.p": 0.25},
    "incomplete batches left out": {"client.drop_last": True},
    "batches larger than the data": {"client.batch_size": 50, "client.drop_last": True},
    "dp": {"dp.local": True, "measure.every": 0},
    "some clients, unequal": {"federation.participation": 0.7, "partition.name": "dirichlet_niid", "straggler.q": 0.3,
                              "federation.rounds": 5},
    "a part is measured": {**POOL, "measure.samples": 16, "partition.n_clients": 5,
                           "federation.rounds": 1},  # 12 of their own cannot be cut
}  # fmt: skip


def _config(folder: Path, values: dict[str, Any]) -> Experiment:
    fields = {**presets.preset("smoke", "digits"), **TINY, "artifacts": str(folder / "artifacts"), **values}
    return choose(fields)


def _counted(config: Experiment) -> tuple[Counts, list[tuple[int, int]]]:
    prepared = build.prepare(config)
    work = [generator_work(job) for job in missing(Store(Path(config.artifacts)), prepared.needs)]
    return counted(build.assemble(prepared, [cost.stand_in(need) for need in prepared.needs])), work


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
    counts, work = _counted(config)
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
    assert _counted(config)[1] == []  # what is in the store costs nothing


def test_counts_in_closed_form(tmp_path: Path) -> None:
    """Of more than 1,000 rounds the first 1,000 are drawn and scaled up."""
    config = _config(tmp_path, {"federation.rounds": 2345, "federation.checkpoint_every": 1000, "measure.every": 500,
                                "measure.smoothness": True, "evaluate.every": 1000})  # fmt: skip
    counts = _counted(config)[0]
    assert counts.trainings == pytest.approx(3 * 2345)
    assert (counts.rounds, counts.checkpoints) == (2345, 3)
    assert counts.products == 40 * counts.gradients == 40 * 6 * 3  # rounds 0, 500 ... 2000, 2345; a batch per client
    data = inputs.load(config.data)
    assert counts.evaluated == 4 * (len(data.test) + len(data.validation))  # rounds 0, 1000, 2000, 2345


@pytest.mark.parametrize("q", [0.0, 0.9])
def test_clients_are_counted_until_they_have_sent_what_they_send_once(q: float, tmp_path: Path) -> None:
    tiny = {"federation.rounds": 6, "measure.every": 0, "straggler.q": q, "seed": 1}
    config = _config(tmp_path, {"algorithm": "fedcvae", "fedcvae.channels": (2,), "fedcvae.samples": 10, **tiny})
    counts, trained, asked = _counted(config)[0], 0.0, 0.0

    def note(round: int, metrics: Mapping[str, float | None]) -> None:
        nonlocal trained, asked
        joined = metrics.get("clients") or 0.0
        trained, asked = trained + joined - (metrics.get("stragglers") or 0.0), asked + joined

    experiment.run(config, tmp_path / "run", say=lambda _: None, on_round=note)
    assert counts.trainings == trained > 0
    assert (asked > 3) == (q > 0)  # some were asked again


FEDDM: dict[str, dict[str, Any]] = {
    "real images": {"feddm.iterations": 0},
    "some clients, unequal": SETTINGS["some clients, unequal"],
    "dp": {"dp.local": True, "feddm.init": "noise"},
}


@pytest.mark.parametrize("values", FEDDM.values(), ids=FEDDM)
def test_counted_pieces_of_feddm_are_those_of_a_run(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"algorithm": "feddm", "feddm.ipc": 2, "feddm.least": 3, "feddm.iterations": 3, "feddm.server_epochs": 2}
    config = _config(tmp_path, {"measure.every": 0, "data.limit": 120, **method, **values})
    counts = _counted(config)[0]
    seen: Counter[str] = Counter()

    def features(module: Any, head: Any, x: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            seen["real"] += len(x)
        elif not config.dp.local:
            seen["synthetic"] += len(x)

    def terms(images: torch.Tensor, *given: Any, find: Any = matching.terms):
        for term in find(images, *given):
            seen["synthetic"] += len(images)
            yield term

    monkeypatch.setattr(matching, "terms", terms)
    spy(monkeypatch, matching, "around", lambda *_: seen.update(steps=1))
    spy(monkeypatch, matching, "features", features)
    spy(monkeypatch, Classifier, "training_step",
        lambda _, batch, *__: seen.update(server_steps=1, server_images=len(batch[1])))  # fmt: skip
    spy(monkeypatch, FedDM, "client", lambda *_: seen.update(trainings=1))
    experiment.run(config, tmp_path / "run", say=lambda _: None)
    names = ("steps", "real", "synthetic", "server_steps", "server_images")
    assert {name: seen[name] for name in names} == counts.pieces
    assert (counts.trainings, counts.full, counts.rest) == (seen["trainings"], 0, 0)
    assert seen["server_images"] > seen["server_steps"] > 0
    assert (seen["real"] > seen["steps"] > 0) == (config.constants["iterations"] > 0)


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
                memory=0, state=0, kept=0)  # fmt: skip


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


@pytest.mark.parametrize("dp", [None, DPSGD(1, 1)])
@pytest.mark.parametrize("times", [2, 17])
def test_prices_of_feddm_are_found_again_in_rounds_that_cost_what_they_say(times: int, dp: DPSGD | None) -> None:
    """Exactly, where a round is linear in its pieces."""
    wanted = {"steps": 0.5, "real": 0.25, "synthetic": 2.0, "server_steps": 0.125, "server_images": 1.0}
    timed = []
    for variant, n in FedDM(iterations=1000).smaller(times):
        facts = Facts(1, [n], 1, counts=lambda n=n: torch.tensor([[n - n // 2, n // 2]]))
        pieces = variant.pieces(facts, LocalSGD(1, 8, dp=dp), 1, [0])
        timed.append(Timed(0, pieces, 9.0 + in_seconds(pieces, wanted)))
    assert prices("FedDM", timed) == pytest.approx(wanted)
    assert prices("FedDM", [replace(one, seconds=1.0) for one in timed]) == pytest.approx(dict.fromkeys(wanted, 0.0))


def test_local_steps_of_rounds_with_other_clients_are_no_pieces() -> None:
    """Rounds of 1 and of 32 examples differ in their local steps, too: only those of as many are compared."""
    rounds = [Timed(1, {"a": 1}, 3.0), Timed(1, {"a": 5}, 11.0), Timed(32, {"a": 5}, 70.0)]
    assert prices("Mine", rounds) == pytest.approx({"a": 2.0})
    with pytest.raises(UserError, match=r"Mine\.smaller does not tell the prices of a apart"):
        prices("Mine", rounds[1:])


def test_places_are_filled_in_order_and_durations_and_sizes_in_words() -> None:
    assert planned.makespan([3, 1, 2], 1) == 6
    assert planned.makespan([3, 1, 2], 3) == planned.makespan([3, 1, 2], 9) == 3
    assert planned.makespan([3, 2, 2], 2) == planned.makespan([1] * 7, 2) == 4
    assert planned.makespan([], 2) == 0
    durations = [planned.duration(s) for s in (0.26, 9.4, 90, 130, 3599, 7200, 86400 * 3.5)]
    assert durations == ["0.3 s", "9.4 s", "90 s", "2.2 min", "60 min", "2 h", "3.5 days"]
    assert [planned.amount(n) for n in (12, 1500, 12e6, 3.14e9)] == ["12 B", "1.5 kB", "12 MB", "3.1 GB"]


def test_shapes_are_shared_by_what_does_not_change_a_step(tmp_path: Path) -> None:
    def shape(values: dict[str, Any]) -> tuple:
        prepared = build.prepare(_config(tmp_path, values))
        return cost.shape_of(build.assemble(prepared, [cost.stand_in(need) for need in prepared.needs]))

    one = shape({})
    assert shape({"seed": 3, "partition.alpha": 0.5, "client.lr": 0.3, "federation.rounds": 9, **POOL}) == one
    for other in ({"algorithm": "fedprox"}, {"client.batch_size": 9}, {"model.hidden": 9}, {"dp.local": True}):
        assert shape({"measure.every": 2, **other}) != one


def test_a_measurement_leaves_nothing_and_finds_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"algorithm": "scaffold", "measure.smoothness": True}
    ready = build.assemble(build.prepare(_config(tmp_path, values)))
    threads = torch.get_num_threads()
    found = cost.measure(ready)
    assert torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []
    assert all(value > 0 for value in (found.checkpoint, found.example, found.gradient, found.product, found.memory))
    assert found.step + found.training + found.round > 0
    start = ready.start(experiment.ClientMemory())
    assert (found.state, found.kept) == (nbytes(start.state), nbytes({"control": start.model}))


def test_training_that_diverges_has_its_price(tmp_path: Path) -> None:
    values = {"algorithm": "scaffold", "client.lr": 1e10, "client.momentum": 0.0, "measure.every": 0}
    found = cost.measure(build.assemble(build.prepare(_config(tmp_path, values))))
    assert found.step + found.training + found.round > 0


def test_a_finished_run_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path, {"federation.rounds": 1})
    experiment.run(config, tmp_path / "one", say=lambda _: None)
    with Display() as display:
        planned.dry_run([Trial("one", config)], tmp_path, display)
    assert capsys.readouterr().out.splitlines()[1:] == ["one: done", "1 cells. All are done."]
