"""The comparison of ways to a commons: rounds that count, rates, undefined rows, what images show, a small run."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fedcommons
from fedcommons.algorithms.coboosting import CoBoosting
from fedcommons.algorithms.dense import DENSE
from fedcommons.core.pieces import smaller_of
from fedcommons.errors import UserError
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.sweep import Trial

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def commons(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("commons")


def course(clients: Sequence[int], accuracies: Sequence[float]) -> list[dict[str, Any]]:
    """Lines of round 0 and of each round with so many clients."""
    found: list[dict[str, Any]] = [{"round": 0, "test/accuracy": 0.0, "validation/accuracy": 0.0}]
    for number, (n, accuracy) in enumerate(zip(clients, accuracies, strict=True), 1):
        line = {"round": number, "clients": n, "test/accuracy": accuracy, "validation/accuracy": 1 - accuracy}
        found.append(line)
    return found


@pytest.mark.parametrize(
    ("clients", "accuracies", "expected"),
    [
        ([4, 4, 4], [0.1, 0.9, 0.95], 2),
        ([4, 0, 0], [0.1, 0.5, 0.9], 1),  # one communication round, then the server alone
        ([0, 0, 0], [0.1, 0.5, 0.9], 0),  # the exchange before round 1 alone
        ([2, 2, 0, 0], [0.1, 0.2, 0.3, 0.85], 2),  # warm-up
        ([4, 4], [0.1, 0.2], None),
    ],
)
def test_rounds_are_those_in_which_clients_took_part(
    commons: ModuleType, clients: Sequence[int], accuracies: Sequence[float], expected: int | None
) -> None:
    from papers.commons.measured import rounds_to_target

    assert rounds_to_target(0.8, course(clients, accuracies)) == expected


def test_best_is_chosen_by_validation(commons: ModuleType) -> None:
    """Validation data prefer round 1 here, and the first of equals."""
    from papers.commons.measured import best_of

    assert best_of(course([1, 1, 1], [0.3, 0.6, 0.3])) == (0.7, 0.3)
    lines = [{"round": r, "validation/accuracy": 0.5, "test/accuracy": r / 10} for r in range(3)]
    assert best_of(lines) == (0.5, 0)


# --- rows

QUICK = ["--preset", "smoke", "--tracking.wandb", "off", "--federation.rounds", "2", "--data.limit", "120"]


def entries(commons: ModuleType, *argv: str) -> list[Any]:
    return commons.entries(commons.arguments([*QUICK, *argv]))


def test_a_row_that_cannot_be_played_says_why_and_stops_nobody(commons: ModuleType) -> None:
    """With BatchNorm, which the servers of one-shot Fedssyn do not take; and FedDM where a class has too few images."""
    found = entries(commons, "--ways", "real,one-shot Fedssyn (DDPM)", "--model.batch_norm", "true", "--lrs", "0.1,0.2")
    assert [type(e.cell) for e in found] == [Trial, Trial, str]
    assert "not defined for a model with BatchNorm" in found[-1].cell
    with pytest.raises(UserError, match="none of the rows can be played; one-shot"):
        entries(commons, "--ways", "one-shot Fedssyn (DDPM)", "--model.batch_norm", "true")


def test_each_row_tries_its_own_rates(commons: ModuleType) -> None:
    """One changed at a time, the others as by default."""
    found = entries(commons, "--ways", "real,FedDM", "--lrs", "0.1,0.2", "--seeds", "0,1")
    pixels = [(0.01, 0.05), (0.003, 0.05), (0.03, 0.05), (0.01, 0.02), (0.01, 0.1)]
    assert [(e.way, tuple(value for _, value in e.rates), e.seed) for e in found] == [
        *[("real", (rate,), seed) for rate in (0.2, 0.1) for seed in (0, 1)],
        *[("FedDM", pair, seed) for pair in pixels for seed in (0, 1)],
    ]
    assert all(e.cell.config.flat[name] == value for e in found for name, value in e.rates)
    (alone,) = entries(commons, "--ways", "FedDM", "--lrs", "0.3")
    assert alone.rates == (("feddm.image_lr", 0.01), ("feddm.server_lr", 0.05))
    (alone,) = entries(commons, "--ways", "DENSE", "--lrs", "0.3")
    assert (alone.cell.config.client.lr, alone.cell.config.flat["dense.server_lr"]) == (0.3, 0.005)


def test_rates_are_tried_with_the_first_seed_alone(commons: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best by validation there, of equals the first, goes to all seeds; what test data or seed 1 say does not."""
    import pandas as pd

    from papers.commons import measured

    found = entries(commons, "--ways", "real,FedDM", "--lrs", "0.2,0.1,0.4", "--seeds", "3,1,2")
    assert len(found) == 3 * (3 + 5)
    expected = [(cell.config.algorithm, cell.config.seed) for cell in commons.expected(found)]
    tries = [("fedavg", 3)] * 3 + [("feddm", 3)] * 5
    assert sorted(expected) == sorted(tries + [(a, seed) for a in ("fedavg", "feddm") for seed in (1, 2)])
    rate = {e.rates: e.rates[0][1] for e in found}
    validation = {(0.1, 3): 0.8, (0.2, 3): 0.8, (0.4, 3): 0.7, (0.4, 1): 0.99}
    courses = {
        str(Path(e.cell.name)): [{"round": 0, "validation/accuracy": score, "test/accuracy": rate[e.rates]}]
        for e in found
        if (score := validation.get((rate[e.rates], e.seed))) is not None
    }
    monkeypatch.setattr(measured, "read_rounds", lambda folder: courses[str(folder)])
    rates = measured.best_rates(found, pd.DataFrame({"run": list(courses)}), Path())
    assert rates == {("real", 0.1): (("client.lr", 0.1),)}  # the middle one was tried first; FedDM has no run
    at_best = measured.at_rates(found, rates)
    assert [(e.way, e.rates, e.seed) for e in at_best] == [("real", (("client.lr", 0.1),), seed) for seed in (3, 1, 2)]
    assert measured.best_rates(found, pd.DataFrame(), Path()) == {}


def test_a_row_whose_runs_all_failed_is_told(commons: ModuleType) -> None:
    from papers.commons.report import _not_finished

    found = entries(commons, "--ways", "real,FedDM", "--seeds", "3,1")
    why = "alpha 0.1: no row: at all rates the run with seed 3 has not ended, or a seed's failed"
    of = {way: f"\n{way}, {why}\n" for way in ("real", "FedDM")}
    assert _not_finished(found, []) == of["real"] + of["FedDM"]
    there: Any = SimpleNamespace(alpha=0.1, row=SimpleNamespace(way="real", best={3: 0.5, 1: 0.5}))
    assert _not_finished(found, [there]) == of["FedDM"]
    part: Any = SimpleNamespace(alpha=0.1, row=SimpleNamespace(way="FedDM", best={3: 0.5}))
    said = "\nFedDM, alpha 0.1: of 1 of 2 seeds; the other runs have not ended\n"
    assert _not_finished(found, [there, part]) == said


@pytest.mark.parametrize("left_over", ["error.txt", "summary.json"])
def test_rates_at_which_any_seed_diverged_are_passed_over(
    commons: ModuleType, left_over: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next best are played; what failed at rates that the table does not need is none of the failures."""
    from fedcommons.sweeping import grids, sweep
    from papers.commons import measured

    found = entries(commons, "--ways", "real", "--lrs", "0.2,0.1", "--seeds", "3,1")
    of = {(e.rates[0][1], e.seed): e.cell.name for e in found}
    validation = {of[0.1, 3]: 0.9, of[0.2, 3]: 0.8, of[0.1, 1]: 0.9, of[0.2, 1]: 0.8}

    def run(left: list[Trial], out: Path, display: Display) -> sweep.Outcome:
        for cell in left:
            (out / cell.name).mkdir(exist_ok=True)
            (out / cell.name / (left_over if cell.name == of[0.1, 1] else "summary.json")).touch()
        stopped = {c.name: "it diverged" for c in left if (out / c.name / "error.txt").exists()}
        return sweep.Outcome({}, 0, stopped)

    def ended(cells: Sequence[Trial], out: Path, say: object) -> Any:
        import pandas as pd

        return pd.DataFrame({"run": [str(out / c.name) for c in cells if (out / c.name / "summary.json").exists()]})

    monkeypatch.setattr(sweep, "todo", lambda cells, out, display: cells)
    monkeypatch.setattr(sweep, "is_done", lambda cell, out: (out / cell.name / "summary.json").exists())
    monkeypatch.setattr(sweep, "run_cells", run)
    monkeypatch.setattr(grids, "finished", ended)
    monkeypatch.setattr(measured, "read_rounds", lambda run: [
        {"round": 0, "validation/accuracy": validation[run.name], "test/accuracy": 0.5}
    ])  # fmt: skip
    with Display() as display:
        outcome = commons.play(found, None, tmp_path, display)
    played = {path.name for path in tmp_path.iterdir()}
    diverged = left_over == "error.txt"
    assert played == {of[0.1, 3], of[0.2, 3], of[0.1, 1]} | ({of[0.2, 1]} if diverged else set())
    assert not outcome.failures
    rates = measured.best_rates(found, ended([e.cell for e in found], tmp_path, None), tmp_path)
    assert rates == {("real", 0.1): (("client.lr", 0.2 if diverged else 0.1),)}


def test_every_row_tells_its_budget(commons: ModuleType) -> None:
    """With the numbers of its own fields, at each preset."""
    from papers.commons.ways import WAYS, budget

    said = {e.way: budget(WAYS[e.way], e.cell.config.flat) for e in entries(commons) if isinstance(e.cell, Trial)}
    assert said.keys() == WAYS.keys()
    assert not [text for text in said.values() if "None" in text or "{" in text]


@pytest.mark.parametrize("kind", [DENSE, CoBoosting])
def test_the_price_of_training_once_can_be_told(kind: type) -> None:
    """Two numbers of epochs on as many examples: rounds with other numbers of examples share no constant."""
    epochs: dict[int, set[int | None]] = {}
    for variant, n in smaller_of(kind(client_epochs=9), 2):
        assert isinstance(variant, DENSE | CoBoosting)
        epochs.setdefault(n, set()).add(variant.client_epochs)
    assert max(map(len, epochs.values())) == 2


def test_all_rows_have_one_protocol(commons: ModuleType) -> None:
    """What is played has the same data, clients, rounds, epochs and model, but for the autoencoder around it."""
    protocol = ("data.name", "data.limit", "partition.name", "partition.n_clients", "federation.rounds",
                "federation.participation", "client.epochs", "client.batch_size", "client.optimizer",
                "client.equal_work", "seed")  # fmt: skip
    cells = [e.cell.config.flat for e in entries(commons) if isinstance(e.cell, Trial)]
    assert len(cells) >= 12
    assert len({tuple(flat[name] for name in protocol) for flat in cells}) == 1
    assert {flat["model.name"] for flat in cells} == {"encoder", "vae"}
    assert all(flat["model.normalise"] for flat in cells if flat["model.name"] == "vae")


def test_images_that_were_fitted_to_noisy_sums_are_fitted_anew_once_a_pool(
    commons: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread, whatever method trains on them; in a run of another seed they are others."""
    from papers.commons import left

    fits: list[int] = []
    make = NDPDC.make

    def counted(self: NDPDC, *given: Any) -> Any:
        fits.append(torch.get_num_threads())
        return make(self, *given)

    monkeypatch.setattr(NDPDC, "make", counted)
    smoke = ["--preset", "smoke", "--lrs", "0.1"]
    shown = {
        (e.way, e.seed): left.shown_by({}, e.cell.config, Path("unused"))
        for e in entries(commons, *smoke, "--ways", "NDPDC,one-shot NDPDC", "--seeds", "0,1")
    }
    assert fits == [1, 1]
    assert shown["NDPDC", 0] == shown["one-shot NDPDC", 0] != shown["NDPDC", 1]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--ways", "reel"], "unknown way 'reel'; did you mean 'real'"),
        (["--lr", "0.1"], "--lrs"),
        (["--data.validation", "0"], "data.validation must be above 0"),
        (["--algorithms", "fedavg"], "--algorithms is not for commons"),
        (["--preset", "authors"], "--preset authors is of one paper"),
        (["--lrs", "0.04,-1"], r"--lrs must lie in \(0, 1e38\], got -1"),
        (["--lrs", "0.04,fast"], "--lrs takes finite float values separated by commas, got 'fast'"),
    ],
)
def test_bad_requests_are_refused(commons: ModuleType, argv: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        entries(commons, *argv)


@pytest.mark.long
def test_smoke(commons: ModuleType, tmp_path: Path) -> None:
    """Three ways from real runs: one table, CSV, picture, guide; a row of the server alone has no round."""
    options = commons.arguments(
        [*QUICK, "--ways", "real,raw copies,one-shot Fedssyn (DDPM),FedDM", "--out", str(tmp_path / "out"),
         "--artifacts", str(tmp_path / "artifacts"), "--generator.epochs", "1"]
    )  # fmt: skip
    found = commons.entries(options)
    for e in found:
        fedcommons.run(e.cell.config, tmp_path / "out" / e.cell.name)
    (tmp_path / "out" / "client_work.json").write_text(json.dumps({e.cell.name: 1.5 for e in found}))
    with Display() as display:
        commons.report(found, options, tmp_path / "out", display)
    with (tmp_path / "out" / "commons.csv").open() as file:
        rows = {line["way"]: line for line in csv.DictReader(file)}
    assert list(rows) == ["real", "raw copies", "one-shot Fedssyn (DDPM)", "FedDM"]
    alone, copies, once, feddm = rows.values()
    assert [float(one["rounds_with_clients"]) for one in rows.values()] == [2, 2, 0, 2]
    assert float(once["mb_a_round"]) == 0
    assert float(once["mb"]) == float(once["mb_once"]) > 0
    assert float(alone["mb"]) == pytest.approx(2 * float(alone["mb_a_round"]))
    assert (alone["near_copies"], copies["near_copies"], copies["epsilon"]) == ("", "1.0", "none")
    assert 0.05 < float(copies["disclosed"]) < 0.15
    assert float(feddm["near_copies"]) > 0.5  # two steps on the pixels from real images
    text = (tmp_path / "out" / "commons.md").read_text()
    assert text.startswith("**SMOKE")
    assert "have clients in one round at most: one-shot Fedssyn (DDPM)" in text
    assert (tmp_path / "out" / "commons.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_client_work_is_of_the_clients_alone(commons: ModuleType) -> None:
    """Of one-shot Fedssyn that of its generators; of FedAvg more with more epochs."""
    from papers.commons.work import client_seconds

    few, many = (
        client_seconds(entries(commons, "--ways", "real", "--client.epochs", epochs)[0].cell.config, {})
        for epochs in ("1", "50")
    )
    assert 0 < few < many
    once, other = (
        entries(commons, "--ways", way)[0].cell.config for way in ("one-shot Fedssyn (DDPM)", "Fedssyn (DDPM)")
    )
    prices: dict[tuple, Any] = {}
    seconds = client_seconds(once, prices)
    timed = dict(prices)
    assert len(timed) > 0
    assert client_seconds(once, prices) == seconds  # its clients make nothing but generators, timed before
    client_seconds(other, prices)
    assert prices == timed
