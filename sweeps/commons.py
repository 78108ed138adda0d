"""Compare all sharing strategies under one protocol: accuracy, bytes, privacy and disclosure.

python sweeps/commons.py                       # digits, alpha 0.1, one seed, minutes on a laptop
python sweeps/commons.py --preset smoke        # the same code with smaller numbers
python sweeps/commons.py --alphas 0.01,0.1 --seeds 0,1,2
python sweeps/commons.py --ways "real,Fedssyn (DDPM),FedDM" --lrs 0.04
python sweeps/commons.py --dataset mnist --data-dir DIR

A row of the table is a method with a sharing strategy. On the seeds of --tuning-seeds, each row tries every learning
rate of --lrs and further learning rates of its method. While the best is at an edge of its list, values beyond the edge
are tried, at most three per end. The seeds of the table then use the learning rates with the best validation accuracy.
Rates at which a run diverges are excluded, also on a seed of the table; the notes name these rates. If --lrs has one
value, no rate is tried: clients use this value, and all other learning rates have their defaults.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

from fedcommons.cli import parse
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Study
from papers.commons import ways, worst_case
from papers.commons.report import report
from papers.commons.ways import WAYS
from papers.fedssyn import central_trials, targets


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    more = (
        ("ways", str, ",".join(WAYS), "rows of the table (methods with their sharing strategies), separated by commas"),
        ("lrs", str, ways.RATES[preset], "learning rates of clients to choose from by validation accuracy"),
        learning_rates.OPTION,
        targets.OPTION,
        worst_case.OPTION,
    )  # fmt: skip
    lists = {"settings": "shuffled_synthetic", "alphas": "0.1"}
    parser = grid.parser(__doc__, argv, lists, more, "commons", ways.base(preset, dataset))
    options = parse.parse(parser, argv)
    for name in ("algorithms", "settings"):
        if name in parse.named(argv):
            raise UserError(f"--{name} is not for commons, whose rows set it: choose rows with --ways.")
    grid.refuse_fields(options, {"client.lr": "lrs"})
    grid.require_validation(options, "lrs")
    learning_rates.tuning_seeds(options)
    if options.targets is not None:
        grid.values(options, "targets", float, "(0, 1]")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each row of the table, alpha and seed, after entries that choose learning rates.

    ``options.undefined`` becomes the error sentence of each pair (alpha, row) that cannot run.
    """
    from fedcommons.runs.build import build

    chosen = grid.values(options, "ways", str, " | ".join(WAYS))
    alphas, seeds = grid.values(options, "alphas", float), grid.values(options, "seeds", int)
    tuning = learning_rates.tuning_seeds(options)
    rates = grid.values(options, "lrs", float, common_fields()["client.lr"].allowed)
    tries = {name: ways.tries(WAYS[name], rates, len(rates) > 1) for name in chosen}
    sweep.require_few(len(alphas) * sum(len(seeds) + len(tried) * len(tuning) for tried in tries.values()))
    base, result, options.undefined = grid.base(options), [], {}
    for alpha, (name, tried) in product(alphas, tries.items()):
        labels = {"way": name, "alpha": alpha, "line": f"{name}, alpha {alpha:g}", "rates": tried[0]}
        try:
            fields = {**base, **ways.fields(WAYS[name], options), **dict(tried[0]), "partition.alpha": alpha}
            cells = [grid.cell(options, {**fields, "seed": seed}) for seed in seeds]
            of_row = learning_rates.with_tuning([Entry(cell, labels) for cell in cells], tried, tuning)
            for entry in of_row:
                build(entry.cell.config)
            result += of_row
        except UserError as error:
            options.undefined[alpha, name] = str(error)
    if not result:
        (_, name), reason = next(iter(options.undefined.items()))
        raise UserError(f"none of the rows can run; {name}: {reason}")
    if options.worst_case:
        worst_case.check(result)
    return result


play, plan = partial(learning_rates.play, score=max), partial(learning_rates.plan, score=max)
with_central = partial(central_trials.play, central_trials.lines, run=play)
commons = Study(
    "commons", arguments, entries, report, partial(worst_case.play, with_central),
    partial(worst_case.extra_jobs, partial(central_trials.extra_jobs, central_trials.lines)), plan,
)  # fmt: skip

if __name__ == "__main__":
    parse.main(commons)
