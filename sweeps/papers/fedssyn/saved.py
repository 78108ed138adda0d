"""Table A.2 of Fedssyn, saved communication: its lines and notes, from a CSV of rounds or from runs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from fedcommons.core import communication
from fedcommons.core.communication import UntilTarget
from fedcommons.errors import unknown
from fedcommons.federation.client_sampling import joining
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import IDENTIFYING, until_target
from fedcommons.reports.frames import load_runs
from fedcommons.reports.series import value
from papers.fedssyn.published import fedssyn_table1, fedssyn_table_a2, rounds_csv

MB, MIB = 10**6, 2**20
TRAIN, SHAPE, CLASSES = 50_000, (3, 32, 32), {"cifar10": 10, "cifar100": 100}
CONTROL = {"fedavg": (), "fedprox": (), "feddyn": (), "scaffold": ("",), "fedpvr": ("head.", "last.")}
"""Prefixes of the parameters whose control variates are sent with the model, up and down, by algorithm."""


NOTES = (
    "Saved: 100 (1 - bytes until the target with the pool / bytes without it). >: lower bound, as the target was "
    "missed without the pool; <: upper bound, as it was missed with the pool; -: no statement is possible.",
    "Paper's formula, for one client with participation C = 1: 2 Ms + 2 R Mc against 2 R0 Mc. Ms: bytes of its "
    "synthetic images; Mc: bytes that it gets or sends in a round; R, R0: rounds to the target with and without the "
    "pool. All N clients: 2 N Ms + 2 R C N Mc against 2 R0 C N Mc. MB: 10^6 bytes, all clients.",
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
    "Bytes until the target: once + (down + up) R / rounds of the run, as every round of a model-averaging method "
    "sends the same bytes, except for stragglers; in the paper's formula once / N and (down + up) / (C N).",
    "Means over the seeds that ran with and without the pool; a seed that missed the target counts with all rounds.",
)


def line(
    head: Mapping[str, str], n: int, c: float, pool: Sequence[UntilTarget], vanilla: Sequence[UntilTarget],
    rounds: Sequence[str], model_unit: int,
) -> dict[str, object]:  # fmt: skip
    """Return a line of the table, for n clients at participation c; pool, vanilla: runs with and without the pool."""
    totals = [communication.sent(runs, MB, MB) if runs else None for runs in (pool, vanilla)]
    pool_mb, vanilla_mb = (f"{'>' * total[1]}{total[0]:.1f}" if total else "-" for total in totals)
    return {
        **head, "rounds with pool": rounds[0], "rounds without": rounds[1],
        "saved % (paper's formula)": communication.saved_percent(pool, vanilla, n * MB, joining(n, c) * model_unit),
        "MB with pool": pool_mb, "MB without": vanilla_mb,
        "saved % (all clients)": communication.saved_percent(pool, vanilla, MB, MB),
    }  # fmt: skip


def from_rounds(path: Path) -> list[dict[str, object]]:
    """Return the table's lines for a CSV of rounds; lines with the paper's rounds also quote Table A.2."""
    papers, printed, lines = fedssyn_table1(), fedssyn_table_a2(), []
    for where, key, rounds in rounds_csv.rows(path):
        dataset, n, c, _, algorithm = key
        for name, actual, allowed in (("dataset", dataset, CLASSES), ("algorithm", algorithm, CONTROL)):
            if actual not in allowed:
                raise unknown(f"{name} ({where})", actual, allowed)
        once = 2 * n * communication.images_nbytes(TRAIN // n, SHAPE)
        model, control = (vgg11_nbytes(CLASSES[dataset], names) for names in (("",), CONTROL[algorithm]))
        per_round = 2 * joining(n, c) * (model + control)
        sides = []
        for written, exchanged in zip(rounds.values(), (once, 0), strict=True):
            reached = [rounds_csv.number(written.removeprefix(">"), f"{where}: rounds")] if written else []
            sides.append([UntilTarget(exchanged, per_round, r, written.startswith(">")) for r in reached])
        same = all(papers.get((*key, setting), (0, None))[1] == written for setting, written in rounds.items())
        # ``key`` lacks the sharing strategy, which is the last column, so the lengths differ.
        head = dict(zip(IDENTIFYING.values(), map(columns.text, key), strict=False))
        texts = [written or "-" for written in rounds.values()]
        result = line(head, n, c, sides[0], sides[1], texts, MIB)
        lines.append(result | {"table A.2 prints": printed.get(key, "") if same else ""})
    return lines


def from_sweep(folder: Path) -> list[dict[str, object]]:
    """Return the lines for the finished runs in ``folder``; a seed counts if it has runs with and without the pool."""
    runs = load_runs(folder)
    runs = runs if runs.empty else runs.loc[runs["status"] == "finished", :]
    if runs.empty:
        return []
    cells, lines = tables.compared(runs.sort_values([name for name in IDENTIFYING if name in runs])), []
    heads, facts = columns.identified(cells)
    for cell, real, identity in zip(cells, columns.without_sharing(cells), facts, strict=True):
        if real is None or value(cell, "sharing.setting") != "shuffled_synthetic":
            continue
        seeds = sorted({*cell.values("seed")} & {*real.values("seed")})
        pool, vanilla = (frame.loc[frame["seed"].isin(seeds), :] for frame in (cell.runs, real.runs))
        if seeds:
            head = {name: fact for name, fact in zip(heads, identity, strict=True) if name != "setting"}
            _, n, c, *_ = columns.key(cell)
            rounds = [tables.rounds(pool), tables.rounds(vanilla)]
            result = line(head, n, c, until_target(pool), until_target(vanilla), rounds, MB)
            lines.append(result | {"seeds": len(seeds)})
    return lines


@lru_cache
def vgg11_nbytes(n_classes: int, beginnings: tuple[str, ...] = ("",)) -> int:
    """Return the bytes of those parameters of VGG-11 whose names start with one of ``beginnings``."""
    import torch

    from fedcommons.flat_tensors import nbytes
    from lightning_modules.networks import VGG11

    with torch.device("meta"):  # The network has shapes, but no weights in memory.
        network = VGG11(SHAPE, n_classes)
    return nbytes({name: p for name, p in network.named_parameters() if name.startswith(beginnings)})
