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
from itertools import product
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Study
from papers.commons import ways
from papers.commons.report import report
from papers.commons.ways import WAYS


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

    ``options.undefined`` becomes the error sentence of each pair (alpha, row) that cannot run.
    """
    from fedcommons.runs.build import build

    chosen = grid.values(options, "ways", str, " | ".join(WAYS))
    alphas, seeds = grid.values(options, "alphas", float), grid.values(options, "seeds", int)
    rates = grid.values(options, "lrs", float, common_fields()["client.lr"].allowed)
    tries = {name: ways.tries(WAYS[name], rates, len(rates) > 1) for name in chosen}
    sweep.require_few(len(alphas) * sum(map(len, tries.values())) * len(seeds))
    base, result, options.undefined = grid.base(options), [], {}
    for alpha, (name, tried) in product(alphas, tries.items()):
        of_row = []
        try:
            for of_rates, seed in product(tried, seeds):
                fields = {**ways.fields(WAYS[name], options), **dict(of_rates), "partition.alpha": alpha, "seed": seed}
                cell = grid.cell(options, {**base, **fields})
                build(cell.config)
                of_row.append(Entry(cell, {"way": name, "alpha": alpha, "rates": of_rates, "seed": seed}))
            result += of_row
        except UserError as error:
            options.undefined[alpha, name] = str(error)
    if not result:
        (_, name), reason = next(iter(options.undefined.items()))
        raise UserError(f"none of the rows can run; {name}: {reason}")
    return result


def trials(entries: Sequence[Entry]) -> list[sweep.Trial]:
    """Return the trials to run: all learning rates with the first seed, and one trial per row, alpha and other seed."""
    first = entries[0]["seed"]
    per_seed = {(e["way"], e["alpha"], e["seed"]): e.cell for e in reversed(entries) if e["seed"] != first}
    return grid.once([*(e.cell for e in entries if e["seed"] == first), *per_seed.values()])


def play(
    entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the first seed at every learning rate, then all seeds at the best learning rates (``best_rates``).

    If a trial fails at the best learning rates of its row, the next best rates are run. Trials that failed in an
    earlier call run again first. A failure at learning rates that the table does not show is displayed, but is
    not part of the outcome.
    """
    from papers.commons.measured import at_rates, best_rates, failed

    every = grid.once(e.cell for e in entries)
    remaining = grid.once(e.cell for e in entries if e["seed"] == entries[0]["seed"] or failed(e, out))
    outcomes: list[sweep.Outcome] = []
    tried: set[str] = set()
    at_best: list[Entry] = []
    while remaining:
        outcomes.append(sweep.run_cells(sweep.todo(remaining, out, display), out, display))
        tried |= {cell.name for cell in remaining}
        at_best = at_rates(entries, best_rates(entries, grid.finished(every, out, display.say), out))
        best = grid.once(e.cell for e in at_best)
        remaining = [cell for cell in best if cell.name not in tried and not sweep.is_done(cell, out)]
    outcome = sweep.together(outcomes)
    has_row = {(e["way"], e["alpha"]) for e in at_best}
    needed = {e.cell.name for e in [*at_best, *(e for e in entries if (e["way"], e["alpha"]) not in has_row)]}
    for name in outcome.failures.keys() - needed:
        display.say(f"Skipped, with its learning rates: {name}: {outcome.failures[name]}")
    return replace(outcome, failures={n: reason for n, reason in outcome.failures.items() if n in needed})


commons = Study("commons", arguments, entries, report, play, trials=trials)

if __name__ == "__main__":
    parse.main(commons)
