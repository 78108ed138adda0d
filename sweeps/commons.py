"""Compare all sharing strategies under one protocol: accuracy, bytes, privacy and disclosure.

python sweeps/commons.py                       # digits, alpha 0.1, one seed, minutes on a laptop
python sweeps/commons.py --preset smoke        # the same code with smaller numbers
python sweeps/commons.py --alphas 0.01,0.1 --seeds 0,1,2
python sweeps/commons.py --ways "real,Fedssyn (DDPM),FedDM" --lrs 0.04
python sweeps/commons.py --dataset mnist --data-dir DIR

A row of the table is a method with a sharing strategy. With the first seed, each row tries every learning rate of --lrs
and further learning rates of its method. All seeds then use the learning rates with the best validation accuracy. If a
seed diverges at these rates, the next best rates are used. If --lrs has one value, no rate is tried: clients use this
value, and all other learning rates have their defaults.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError
from fedcommons.tune import grid, main, sweep
from papers.commons import ways
from papers.commons.report import report
from papers.commons.ways import WAYS, Entry, Rates


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    more = (
        ("ways", str, ",".join(WAYS), "rows of the table (methods with their sharing strategies), separated by commas"),
        ("lrs", str, ways.RATES[preset], "learning rates of clients to choose from by validation accuracy"),
    )  # fmt: skip
    lists = {"settings": "shuffled_synthetic", "alphas": "0.1"}
    parser = grid.parser(__doc__, argv, lists, more, "commons", ways.base(preset, dataset))
    options = parse.parse(parser, argv)
    for name in ("algorithms", "settings"):
        if name in parse.named(argv):
            raise UserError(f"--{name} is not for commons, whose rows set it: choose rows with --ways.")
    grid.refuse_fields(options, {"client.lr": "lrs"})
    grid.require_validation(options, "lrs")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each row of the table, alpha, combination of learning rates, and seed.

    If a row cannot run at an alpha, it has one entry for this alpha, whose ``cell`` is the error sentence.
    """
    chosen = grid.values(options, "ways", str, " | ".join(WAYS))
    alphas, seeds = grid.values(options, "alphas", float), grid.values(options, "seeds", int)
    rates = grid.values(options, "lrs", float, common_fields()["client.lr"].allowed)
    tries = {name: ways.tries(WAYS[name], rates, len(rates) > 1) for name in chosen}
    sweep.require_few(len(alphas) * sum(map(len, tries.values())) * len(seeds))
    result = []
    for alpha, (name, tried) in product(alphas, tries.items()):
        of_row = [_entry(options, name, alpha, rate, seed) for rate, seed in product(tried, seeds)]
        refused = [e for e in of_row if isinstance(e.cell, str)]
        result += refused[:1] or of_row
    if all(isinstance(e.cell, str) for e in result):
        raise UserError(f"none of the rows can run; {result[0].way}: {result[0].cell}")
    return result


def _entry(options: parse.Options, name: str, alpha: float, rates: Rates, seed: int) -> Entry:
    from fedcommons.runs.build import build

    own = {**ways.fields(WAYS[name], options), **dict(rates), "partition.alpha": alpha, "seed": seed}
    try:
        cell = grid.cell(options, {**grid.base(options), **own})
        build(cell.config)
    except UserError as error:
        return Entry(name, alpha, rates, seed, str(error))
    return Entry(name, alpha, rates, seed, cell)


def expected(entries: Sequence[Entry]) -> list[sweep.Trial]:
    """Return the trials to run: all learning rates with the first seed, and one trial per row, alpha and other seed."""
    first = entries[0].seed
    per_seed = {(e.way, e.alpha, e.seed): e for e in reversed(entries) if e.seed != first}
    return _cells([e for e in entries if e.seed == first] + list(per_seed.values()))


def run_cells(entries: Sequence[Entry], todo: sweep.Todo, out: Path, display: Display) -> sweep.Outcome:
    """Run the first seed at every learning rate, then all seeds at the best learning rates (``best_rates``).

    If a trial fails at the best learning rates of its row, the next best rates are run. Trials that failed in an
    earlier call run again first. A failure at learning rates that the table does not show is displayed, but is
    not part of the outcome.
    """
    from papers.commons.measured import at_rates, best_rates, failed

    remaining = _cells([e for e in entries if e.seed == entries[0].seed or failed(e, out)])
    outcomes: list[sweep.Outcome] = []
    tried: set[str] = set()
    at_best: list[Entry] = []
    while remaining:
        outcomes.append(sweep.run_cells(sweep.todo(remaining, out, display), out, display))
        tried |= {cell.name for cell in remaining}
        at_best = at_rates(entries, best_rates(entries, grid.finished(_cells(entries), out, display.say), out))
        remaining = [cell for cell in _cells(at_best) if cell.name not in tried and not sweep.is_done(cell, out)]
    outcome = sweep.together(outcomes)
    has_row = {(e.way, e.alpha) for e in at_best}
    needed = {cell.name for cell in _cells(at_best + [e for e in entries if (e.way, e.alpha) not in has_row])}
    for name in outcome.failures.keys() - needed:
        display.say(f"Skipped, with its learning rates: {name}: {outcome.failures[name]}")
    return replace(outcome, failures={n: reason for n, reason in outcome.failures.items() if n in needed})


def _cells(rows: Sequence[Entry]) -> list[sweep.Trial]:
    """Return the trials of the entries that can run, without duplicates."""
    return grid.once(e.cell for e in rows if isinstance(e.cell, sweep.Trial))


def commons(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(options, "commons", expected(rows), partial(report, rows, options), play=partial(run_cells, rows))


if __name__ == "__main__":
    parse.main(commons)
