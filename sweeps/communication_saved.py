"""Table A.2 of Fedssyn: communication that the shuffled synthetic pool saves until a target accuracy, in percent.

python sweeps/communication_saved.py --from platform/fedcommons/reports/published/fedssyn_table1_rounds.csv
python sweeps/communication_saved.py --from runs/table1-small-digits --out DIR      # a Table 1 sweep of ours
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedcommons.accounting import communication
from fedcommons.accounting.communication import UntilTarget
from fedcommons.config import cli
from fedcommons.errors import UserError, shown, unknown
from fedcommons.files import write_text
from fedcommons.reports import tables
from fedcommons.reports.published import fedssyn_table1, fedssyn_table_a2, rounds_csv
from fedcommons.sweeping import folders

MB, MIB = 10**6, 2**20
TRAIN, SHAPE, CLASSES = 50_000, (3, 32, 32), {"cifar10": 10, "cifar100": 100}  # the paper's data sets
CONTROL = {"fedavg": (), "fedprox": (), "feddyn": (), "scaffold": ("",), "fedpvr": ("head.", "last.")}
"""How the names of those parameters begin whose control variate travels beside the model, both ways."""
POSITIVE = ("alpha", "n_clients", "participation", "rounds", "bytes_down", "bytes_up", "learning_rate")
TEXTS = ("dataset", "algorithm", "setting", "partition")
NEEDED = (*tables.COLUMNS, *POSITIVE, "bytes_once", "rounds_to_target", "seed", "partition", "validation_accuracy")
NOTES = (
    "Saved: 100 (1 - sent until the target with the pool / without it). > is a lower bound (without the pool the "
    "target was not reached), < an upper bound (with it); -: nothing can be said.",
    "Paper's formula: one client, as if C = 1: 2 Ms + 2 R Mc against 2 R0 Mc; Ms: its synthetic images, Mc: what it "
    "gets or sends in a round. All clients: 2 N Ms + 2 R C N Mc against 2 R0 C N Mc. MB: 10^6 bytes, all clients.",
)
ROUNDS_NOTES = (
    "Ms: 50000/N images of 3x32x32 bytes, each with a byte of label; Mc: VGG-11 in float32, with SCAFFOLD twice that, "
    "with FedPVR also the control variate of its three linear layers.",
    "The paper's formula stands in the paper's units, Ms in MB and Mc in MiB (37.2 MiB = 39.0 MB, printed as 37.2 MB). "
    "In one unit throughout, MB or MiB, the paper's rounds give less than 0.1 more: for C = 1 what the column of all "
    "clients says.",
    "Table A.2 prints Ms ten times too small for N = 40 and 100 (0.39 and 0.16 MB instead of 3.84 and 1.54), and some "
    "of its cells differ by up to 3 points from what the paper's own rounds give.",
)
SWEEP_NOTES = (
    "Sent until the target: once + (down + up) R / rounds played, as every round of a model-averaging method costs the "
    "same, stragglers aside; in the paper's formula once / N and (down + up) / (C N). Bytes: what the runs counted.",
    "Means over the seeds that both settings have; a seed that never reached the target counts with all rounds played.",
)


def line(
    key: tuple, pool: Sequence[UntilTarget], vanilla: Sequence[UntilTarget], rounds: Sequence[str], model_unit: int
) -> dict[str, object]:
    """A line of the table; ``model_unit``: that of models in the paper's formula, beside images in MB."""
    dataset, n, c, alpha, algorithm = key
    totals = [communication.sent(runs, MB, MB) if runs else None for runs in (pool, vanilla)]
    pool_mb, vanilla_mb = (f"{'>' * total[1]}{total[0]:.1f}" if total else "-" for total in totals)
    return {
        "data set": dataset, "N": n, "C": f"{c:g}", "alpha": f"{alpha:g}", "algorithm": algorithm,
        "rounds with pool": rounds[0], "rounds without": rounds[1],
        "saved % (paper's formula)": communication.saved_percent(pool, vanilla, n * MB, joining(n, c) * model_unit),
        "MB with pool": pool_mb, "MB without": vanilla_mb,
        "saved % (all clients)": communication.saved_percent(pool, vanilla, MB, MB),
    }  # fmt: skip


def from_rounds(path: Path) -> list[dict[str, object]]:
    """Lines for a CSV of rounds; the printed value stands only beside rounds that are the paper's."""
    papers, printed, lines = fedssyn_table1(), fedssyn_table_a2(), []
    for row in rounds_csv.rows(path):
        for name, value, allowed in (("dataset", row.dataset, CLASSES), ("algorithm", row.algorithm, CONTROL)):
            if value not in allowed:
                raise unknown(f"{name} ({row.where})", value, allowed)
        key = (row.dataset, row.n_clients, row.participation, row.alpha, row.algorithm)
        once = communication.pool_nbytes(row.n_clients, communication.images_nbytes(TRAIN // row.n_clients, SHAPE))
        model, control = (vgg11_nbytes(CLASSES[row.dataset], names) for names in (("",), CONTROL[row.algorithm]))
        per_round = communication.round_nbytes(joining(row.n_clients, row.participation), model, control)
        rounds = {"shuffled_synthetic": row.rounds_fedssyn, "real": row.rounds_vanilla}
        sides = []
        for text, exchanged in zip(rounds.values(), (once, 0), strict=True):
            known = [rounds_csv.number(text.removeprefix(">"), f"{row.where}: rounds")] if text else []
            sides.append([UntilTarget(exchanged, per_round, r, text.startswith(">")) for r in known])
        same = all(papers.get((*key, setting), (0, None))[1] == text for setting, text in rounds.items())
        found = line(key, *sides, rounds=[text or "-" for text in rounds.values()], model_unit=MIB)
        lines.append(found | {"table A.2 prints": printed.get(key, "") if same else ""})
    return lines


def from_sweep(folder: Path) -> list[dict[str, object]]:
    """Lines for the folder of a Table 1 sweep, over the seeds that both settings have."""
    try:
        entries = tables.entries(tables.choose_learning_rate(_runs(folder / "summary.json")))
    except ValueError as error:
        raise UserError(f"{folder}: {error}.") from None
    pools = {e.key[:-1]: e for e in entries if e.setting == "shuffled_synthetic"}
    lines = []
    for real in (e for e in entries if e.setting == "real" and e.key[:-1] in pools):
        pair, key = (pools[real.key[:-1]], real), real.key[:-1]
        seeds = set.intersection(*({r["seed"] for r in e.runs} for e in pair))
        if seeds:
            pair = [tables.Entry(e.key, tuple(r for r in e.runs if r["seed"] in seeds)) for e in pair]
            sides = [[_until_target(r) for r in e.runs] for e in pair]
            found = line(key, *sides, rounds=[e.rounds for e in pair], model_unit=MB)
            lines.append(found | {"seeds": len(seeds)})
    return lines


def _runs(path: Path) -> list[dict[str, Any]]:
    """The runs of a sweep, their numbers checked."""
    if not path.exists():
        raise UserError(f"{path.parent} has no summary.json: it is not the folder of a sweep.")
    try:
        summary = json.loads(rounds_csv.read(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}).") from None
    cells = summary.get("cells") if isinstance(summary, dict) else None
    runs = []
    for i, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        where = f"{path}, cell {i}"
        if lacking := [name for name in NEEDED if not isinstance(cell, dict) or name not in cell]:
            raise UserError(f"{where} has no {lacking[0]}: it is not of a Table 1 sweep.")
        if wrong := [name for name in TEXTS if not isinstance(cell[name], str)]:
            raise UserError(f"{where}: {wrong[0]} must be text, got {shown(cell[wrong[0]])}.")
        if not isinstance(cell["seed"], int):
            raise UserError(f"{where}: seed must be a whole number, got {shown(cell['seed'])}.")
        optional = () if cell["rounds_to_target"] is None else ("rounds_to_target",)
        numbers = {name: rounds_csv.number(cell[name], f"{where}: {name}") for name in (*POSITIVE, *optional)}
        numbers["bytes_once"] = rounds_csv.number(cell["bytes_once"], f"{where}: bytes_once", zero=True)
        if cell["validation_accuracy"] is not None:
            accuracy = rounds_csv.number(cell["validation_accuracy"], f"{where}: validation_accuracy", zero=True)
            numbers["validation_accuracy"] = accuracy
        rounds_csv.check_federation(numbers["n_clients"], numbers["participation"], where)
        runs.append({**cell, **numbers})
    return runs


def _until_target(run: tables.Summary) -> UntilTarget:
    reached, per_round = run["rounds_to_target"], (run["bytes_down"] + run["bytes_up"]) / run["rounds"]
    return UntilTarget(run["bytes_once"], per_round, run["rounds"] if reached is None else reached, reached is None)


@lru_cache
def vgg11_nbytes(n_classes: int, beginnings: tuple[str, ...] = ("",)) -> int:
    """Bytes of the parameters of VGG-11 whose names begin so."""
    import torch

    from fedcommons.tensors import nbytes
    from lightning_modules.networks import VGG11

    with torch.device("meta"):  # shapes alone: no weights are drawn
        network = VGG11(SHAPE, n_classes)
    return nbytes({name: p for name, p in network.named_parameters() if name.startswith(beginnings)})


def joining(n: int, c: float) -> int:
    """Clients in a round, as the engine draws them."""
    from fedcommons.federation.participation import participants

    return len(participants(n, c, seed=0, round=0))


def communication_saved(argv: Sequence[str]) -> int:
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], exit_on_error=False)
    parser.add_argument("--from", type=str | None, help="a CSV of rounds, or the folder of a Table 1 sweep")
    parser.add_argument("--out", type=str | None, help="folder for communication_saved.md and .csv")
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = cli.parse(parser, argv)
    if options["from"] is None:
        raise UserError("--from is missing: name a CSV of rounds or the folder of a Table 1 sweep.")
    source = Path(options["from"])
    lines = from_sweep(source) if source.is_dir() else from_rounds(source)
    if not lines:
        wanted = "pair of runs with the settings real and shuffled_synthetic" if source.is_dir() else "rows"
        raise UserError(f"{source} has no {wanted}.")
    if options.dry_run:
        print(f"{source}: {len(lines)} lines to print")
        return 0
    notes = (*NOTES, *(SWEEP_NOTES if source.is_dir() else ROUNDS_NOTES))
    table = tables.markdown(list(lines[0]), [list(found.values()) for found in lines])
    table += "".join(f"\n{i}. {note}" for i, note in enumerate(notes, 1)) + "\n"
    if options.out:
        out = Path(options.out)
        with folders.open_folder(out):
            write_text(out / "communication_saved.md", table)
            write_text(out / "communication_saved.csv", tables.to_csv(lines))
    print(table, end="")
    return 0


if __name__ == "__main__":
    cli.main(communication_saved)
