"""Reference rows of Table 1: a server that trains on the pool without clients, and a central model on all real data.

The server's model is a run of the method ``one_shot`` with the images, model, learning rates and seeds of the first
method of the table. The central model (``central_trials``) trains for R x E epochs: R rounds, E epochs of a client.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.config import registry, target
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import IDENTIFYING, Cell, reached
from fedcommons.reports.series import value
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry
from papers.fedssyn import central_trials

if TYPE_CHECKING:
    from papers.fedssyn.central import Central

ONE_SHOT = "one_shot"
SERVER, CENTRAL = "server trains on the pool, 0 rounds", "central, all real data"
"""Names of the rows."""

NAMES = {ONE_SHOT: SERVER, "central": CENTRAL}
"""Algorithm -> name of its row."""

LINES = {SERVER: ("#009e73", 5), CENTRAL: ("k", 0)}
"""Colour of a row's line in pictures, and offset of its dashes, so that two equal lines are visible."""


def server_strategy(config: Experiment) -> str | None:
    """Return the sharing strategy by which clients send this experiment's pool to the server; None without a pool."""
    from fedcommons.core.capabilities import capabilities_of  # torch takes seconds to import

    strategy: Any = registry.find("sharing", config.sharing.setting)
    if config.sharing.setting == "shuffled_synthetic":
        return "server_synthetic" if config.sharing.p != 0 else None
    return config.sharing.setting if capabilities_of(strategy).serves_pool else None


def draw(line: Callable[..., object], name: str, accuracies: Sequence[float], label: str = "") -> None:
    """Draw the mean accuracy of a reference row by ``line``, such as ``axes.axhline``; label: default: name."""
    colour, offset = LINES[name]
    line(fmean(accuracies), color=colour, linestyle=(offset, (5, 5)), linewidth=1, label=label or name)


def federated(cells: Sequence[sweep.Trial]) -> list[sweep.Trial]:
    """Return the trials without those of the server alone; all trials if the table has no other method."""
    return [cell for cell in cells if cell.config.algorithm != ONE_SHOT] or list(cells)


def server_trials(options: parse.Options, cells: Sequence[sweep.Trial]) -> list[sweep.Trial]:
    """Return the trials of a server that trains on each pool of the table, unless the table has them already.

    If ``one_shot`` refuses the model or the pool, there is no such trial, and ``options.refused`` is the reason.
    """
    from fedcommons.runs.build import build

    options.refused, result = None, []
    if options.without_references or options.get("total"):
        return []
    try:
        for config in (cell.config for cell in cells if cell.config.algorithm == cells[0].config.algorithm):
            if strategy := server_strategy(config):
                fields = {**config.inactive, **config.flat, "algorithm": ONE_SHOT, "sharing.setting": strategy}
                result.append(sweep.cell(choose(fields, config.inactive), grid.VARIED))
                build(result[-1].config)
    except UserError as error:
        options.refused = str(error)
        return []
    return [cell for cell in grid.once(result) if cell.name not in {cell.name for cell in cells}]


def central_lines(entries: Sequence[Entry], options: parse.Options) -> "list[Central]":
    """Return the central models on all real data, if the table has a pool."""
    if options.without_references or options.get("total") or not any(server_strategy(e.cell.config) for e in entries):
        return []
    return central_trials.lines(entries, options)


def rows(first: Cell, servers: Sequence[Cell], central: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the reference rows as title -> text.

    first: a configuration of the table. servers: those of the server alone. central: that of the central model, if any.
    """
    names, result = [*IDENTIFYING, *columns.others(first)], []
    for cell in (*servers, *central):
        line = {columns.head(name): columns.text(value(cell, name), name) for name in names}
        line["algorithm"] = NAMES[line["algorithm"]]
        if line["algorithm"] == SERVER:
            line |= {"target": target.in_words(value(cell, "target")), "rounds": rounds(reached(cell.runs))}
            line |= {"MB exchanged": f"{value(cell, 'MB'):.3g}", "ε of shared data": tables.commons_epsilon(cell)}
        accuracies = {f"{which} acc.": tables.percent(cell, f"{which}_accuracy") for which in ("last", "best")}
        result.append({**line, **accuracies, "lr": columns.text(value(cell, "lr"))})
    return result


def rounds(to_target: Sequence[object]) -> str:
    """Return the rounds with clients in which the server alone reached the target: 0, or a text if a run missed it.

    to_target: the rounds of each run; None: it missed the target.
    """
    n, missed = len(to_target), [*to_target].count(None)
    return "not reached" if missed == n else "0" + f" (missed by {missed} of {n})" * bool(missed)


def notes(
    cells: Sequence[sweep.Trial], options: parse.Options, central: central_trials.Chosen = central_trials.NO_MODEL
) -> list[str]:
    """Return the footnotes on the reference rows: steps and learning rates of the server and of the central model."""
    from fedcommons.core.local_training import LocalSGD
    from fedcommons.runs.build import build

    result, c = [], cells[-1].config.client
    alone = [cell.config for cell in cells if cell.config.algorithm == ONE_SHOT]
    groups: dict[tuple[int, int, int], list[str]] = {}
    for config in {(config.client.epochs, config.partition.n_clients): config for config in alone}.values():
        spec, epochs = build(config), (config.constants["server_epochs"] or config.client.epochs)
        images, epochs = sum(request.n for request in spec.requests), epochs * config.federation.rounds
        steps = replace(spec.local, dp=None).steps_of(images, epochs)
        groups.setdefault((epochs, steps, images), []).append(str(config.partition.n_clients))
    for (epochs, steps, images), federations in groups.items():
        which = f" (N = {', '.join(federations)})" * (len(groups) > 1)
        amount = f" ({steps} steps on {images} images)" * bool(images)
        result.append(
            f"{SERVER}{which}: no client trains. The server makes {epochs} epochs on the pool{amount}, with the "
            f"learning rate of column lr and batch size {c.batch_size}. MB: the pool, which clients send to the server "
            "once."
        )
    if not alone and options.get("refused"):
        result.append(f"No row '{SERVER}': {options.refused}")
    for cell in central.cells:
        epochs, images = int(value(cell, "epochs")), int(value(cell, "images"))
        steps = LocalSGD(epochs, c.batch_size, c.drop_last).steps_of(images, epochs)
        amount = f"{epochs} epochs on {images} images ({steps} steps), batch size {c.batch_size}"
        result.append(f"{CENTRAL}: {amount}, {central.about}.")
    if central.about and not central.cells:
        result.append(f"No row '{CENTRAL}': {central.about}.")
    return result
