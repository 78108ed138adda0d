"""The comparison of ways to a commons: rounds that count, rates, undefined rows, what images show, a small run."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import report_runs
from sweep_runs import rows_of, saved_figures

import fedcommons
from fedcommons.cli.display import Display
from fedcommons.tune.sweep import Outcome, Todo
from papers.commons import worst_case
from papers.commons.measured import best_of, rounds_to_target
from papers.commons.targets import Until, until
from papers.commons.ways import WAYS
from papers.fedssyn import central, central_trials
from papers.fedssyn.references import CENTRAL

commons = report_runs.script("commons")


def course(clients: Sequence[int], accuracies: Sequence[float]) -> list[dict[str, Any]]:
    """Lines of round 0 and of each round with this number of clients."""
    lines: list[dict[str, Any]] = [{"round": 0, "test/accuracy": 0.0, "validation/accuracy": 0.0}]
    for number, (n, a) in enumerate(zip(clients, accuracies, strict=True), 1):
        lines.append({"round": number, "clients": n, "test/accuracy": a, "validation/accuracy": 1 - a})
    return lines


def test_rounds_are_those_with_clients_and_best_is_chosen_by_validation() -> None:
    for clients, accuracies, expected in (
        ([4, 0, 0], [0.1, 0.5, 0.9], 1),  # one communication round, then the server alone
        ([0, 0, 0], [0.1, 0.5, 0.9], 0),  # the exchange before round 1 alone
        ([2, 2, 0, 0], [0.1, 0.2, 0.3, 0.85], 2),  # warm-up
        ([4, 4], [0.1, 0.2], None),
    ):
        assert rounds_to_target(0.8, course(clients, accuracies)) == expected
    lines = [{**line, "comm/total_bytes": 1e6 * min(line["round"], 2)} for line in course([4, 4, 0], [0.2, 0.3, 0.9])]
    assert until(0.3, lines) == until(0.8, lines) == Until(2, 1.0, 2.0, False)  # the server alone in round 3
    assert (until(0.2, lines), until(0.95, lines)) == (Until(1, 0.5, 1.0, False), Until(2, 1.0, 2.0, True))
    assert best_of(course([1, 1, 1], [0.3, 0.6, 0.3])) == (0.7, 0.3)  # validation data prefer round 1 here


QUICK = ["--preset", "smoke", "--tracking.wandb", "off", "--federation.rounds", "2", "--data.limit", "120"]


def entries(commons: ModuleType, *argv: str) -> list[Any]:
    return commons.entries(commons.arguments([*QUICK, *argv]))


def test_all_rows_have_one_protocol_and_one_that_is_not_defined_says_why(commons: ModuleType) -> None:
    """The same data, clients, rounds, epochs and model, but for the autoencoder around it."""
    protocol = (
        "data.name", "data.limit", "data.validation", "partition.name", "partition.n_clients", "partition.alpha",
        "federation.rounds", "federation.participation", "client.epochs", "client.batch_size", "client.momentum",
        "model.channels", "seed",
    )  # fmt: skip
    rows = entries(commons)
    flats = [e.cell.config.flat for e in rows]
    assert {e["way"] for e in rows} == WAYS.keys()
    assert len({tuple(flat[name] for name in protocol) for flat in flats}) == 1
    assert {e["way"] for e in rows if e.cell.config.model.name != "encoder"} == {"FedDPMS"}
    assert all(e.cell.config.flat[name] == value for e in rows for name, value in e["rates"])
    fedssyn, buffers = "one-shot Fedssyn (DDPM)", ("--model.batch_norm", "true")  # which its server does not take
    options = commons.arguments([*QUICK, "--ways", f"real,{fedssyn}", *buffers, "--lrs", "0.1,0.2"])
    assert [e.is_tuning for e in commons.entries(options)] == [True, True, False]
    assert "BatchNorm" in options.undefined[0.1, fedssyn]


def test_the_best_tuning_round_chooses(commons: ModuleType, recorded: Callable[..., None], tmp_path: Path) -> None:
    rows = entries(commons, "--ways", "real", "--lrs", "0.2,0.1,0.05,0.4", "--seeds", "3,1")
    for e in rows:
        metrics = {"validation/accuracy": {0.1: 0.9, 0.2: 0.8}.get(e.cell.config.client.lr, 0.5)}
        if e.is_tuning:
            recorded(tmp_path / e.cell.name, e.cell.config, None, metrics)
            file = tmp_path / e.cell.name / "rounds.jsonl"
            *others, last = file.read_text().splitlines()
            last = last.replace('"validation/accuracy": 0.9', '"validation/accuracy": 0')
            file.write_text("\n".join([*others, last]) + "\n")
    chosen = [e for e in commons.plan(rows, tmp_path) if not e.is_tuning]
    assert [(e["rates"], e.cell.config.seed) for e in chosen] == [((("client.lr", 0.1),), seed) for seed in (3, 1)]


@pytest.mark.long
def test_the_table_from_small_runs(commons: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ways = tmp_path / "out", ["real", "raw copies", "one-shot Fedssyn (DDPM)", "FedDM", "FedGEN"]
    argv = [*QUICK, "--ways", ",".join([*ways, "DENSE"]), "--seeds", "0,1", "--generator.epochs", "1",
            "--out", str(out), "--artifacts", str(tmp_path / "artifacts"), "--lrs", "0.1",
            "--targets", "0.001,1", "--worst-case", "12"]  # fmt: skip
    options = commons.arguments(argv)
    rows = commons.entries(options)
    finished = [e for e in rows if e["way"] in ways and e.cell.config.seed == 0]
    for e in finished:
        fedcommons.run(e.cell.config, out / e.cell.name)
    with Display() as display:
        worst_case.play(lambda *_: Outcome({}, 0, {}), rows, options, Todo(0, [], []), out, display)
        (file,) = out.glob("worst-case*")
        content = json.loads(file.read_text())
        assert content["worst-case"]["auc_interval"][0] <= content["worst-case"]["auc"]
        content["worst-case"]["auc"] = 0.875
        file.write_text(json.dumps(content))
        both = entries(commons, "--ways", f"Fedssyn (DDPM),{ways[2]}", "--generator.epochs", "1")  # equal generators
        worst_case.play(lambda *_: Outcome({}, 0, {}), both, options, Todo(0, [], []), out, display)
    assert [*out.glob("worst-case*")] == [file]
    model = central_trials.lines(rows, options)[0]
    assert model.epochs == 2 * model.config.client.epochs
    assert central.run(model, out / model.name)["seed"] == 0
    (out / "client_work.json").write_text(json.dumps({e.cell.name: 1.5 for e in finished}))
    figures = saved_figures(monkeypatch)
    with Display() as display:
        commons.commons.report(rows, options, out, display)
    plotted = {str(line.get_label()): line.get_xdata() for axes in figures[0].axes for line in axes.get_lines()}
    assert plotted[CENTRAL] == [100 * central.run(model, out / model.name)["last_accuracy"]] * 2
    with (out / "commons.csv").open() as file:
        lines = {line["way"]: line for line in csv.DictReader(file)}
    assert list(lines) == [*ways, CENTRAL]
    alone, copies, once, feddm, fedgen, of_central = lines.values()
    assert [float(row["rounds_with_clients"]) for row in (alone, copies, once, feddm)] == [2, 2, 0, 2]
    assert (of_central["bound"], of_central["seeds"], of_central["rates"]) == ("False", "1", "lr 0.1")
    assert float(of_central["best_accuracy_seed0"]) == float(of_central["last_accuracy"])  # a page reads each seed's
    assert float(once["mb_a_round"]) == 0
    assert float(once["mb"]) == float(once["mb_once"]) > 0
    assert float(alone["mb"]) == pytest.approx(2 * float(alone["mb_a_round"]))
    assert (alone["near_copies"], copies["near_copies"], copies["epsilon"]) == ("", "1.0", "none")
    assert (alone["epsilon"], fedgen["epsilon"]) == ("-", "none")  # FedGEN sends class counts
    assert 0.05 < float(copies["disclosed"]) < 0.15
    assert float(feddm["near_copies"]) > 0.5  # two steps on the pixels from real images
    assert float(once["worst_auc"]) == 0.875  # of the file, not attacked again
    assert once["worst_case"] == f"{0.875:.2f} [{float(once['worst_low']):.2f}, {float(once['worst_high']):.2f}]"
    assert {row["worst_auc"] for row in (alone, copies, feddm, of_central)} == {""}
    text = (out / "commons.md").read_text()
    head, _, *table = rows_of(text.partition("###")[0])
    assert len(head) <= 8
    assert [line[0] for line in table] == [*ways, CENTRAL]
    assert [line[-1] for line in table].count("not measured") == 5
    assert [float(line[1].split(" ")[0]) for line in table[:-1]] == [
        pytest.approx(100 * float(row["best_accuracy"]), abs=0.05) for row in (alone, copies, once, feddm, fedgen)
    ]
    assert "(" not in table[0][1]
    assert f"{100 * (float(copies['best_accuracy']) - float(alone['best_accuracy'])):+.1f}" in table[1][1]
    of_targets = {tuple(line[1:3]): line[3:] for line in rows_of(text.split("## Rounds")[1]) if line[0] == "0.1"}
    assert of_targets["real", "0.1 %"] == ["1", f"{float(alone['mb']) / 2:.3g}", "0.75"]  # of 1.5 s
    assert of_targets["real", "100 %"][0] == ">2"
    assert of_targets["one-shot Fedssyn (DDPM)", "0.1 %"][:2] == ["0", f"{float(once['mb']):.3g}"]
    assert of_targets["one-shot Fedssyn (DDPM)", "100 %"][0] == "not reached"
    assert "Target 0.1 % (alpha 0.1, one-shot Fedssyn (DDPM)): it is below" in text
    assert [part for part in ("DENSE, alpha 0.1: no row", "1 of 2 seeds") if part not in text] == []
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("commons.png", "commons_tree.png"))
