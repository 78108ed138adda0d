"""Table 1 of Fedssyn: rounds to a target accuracy, with and without the shuffled synthetic pool.

python sweeps/table1.py                     # digits, the paper's five algorithms, some minutes on a laptop
python sweeps/table1.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/table1.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs
python sweeps/table1.py --preset authors --dataset cifar10 --data-dir DIR    # as the authors' released code runs it

With --lrs each row and sharing strategy tries every learning rate on the seeds of --tuning-seeds. While the best is at
an edge of the list, values beyond the edge are tried, at most three per end. The seeds of the table then use the best
learning rate by validation accuracy. A learning rate at which a run diverges is excluded, also on a seed of the table;
the notes name it.
"""

from collections.abc import Sequence
from functools import partial

from fedcommons.cli import parse
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid as grids
from fedcommons.tune import learning_rates, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedssyn import authors, central_trials, references, targets
from papers.fedssyn.published import fedssyn_table1
from papers.fedssyn.table1 import line, play, report

ALGORITHMS = "fedavg,scaffold,fedprox,feddyn,fedpvr"
COLUMNS = "10:1,10:0.4,40:0.2,100:0.1"


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, _ = grids.preset_and_dataset(argv)
    large = preset in ("paper", "authors")
    more = (
        ("federations", str | None, COLUMNS if large else None,
         f"N:C pairs, separated by commas (the paper's: {COLUMNS}); default: partition.n_clients and "
         "federation.participation"),
        ("lrs", str | None, "0.01,0.05,0.1" if preset == "paper" else None,
         "learning rates to choose from by validation accuracy; default: client.lr alone"),
        learning_rates.OPTION,
        targets.OPTION,
        ("without-references", bool, False,
         "leave out the rows of a server that trains on the pool alone and of a central model"),
    )  # fmt: skip
    algorithms = "fedavg,scaffold" if preset == "smoke" else ALGORITHMS
    defaults = {"algorithms": algorithms, "settings": "real,shuffled_synthetic"}
    parser = grids.parser(__doc__, argv, defaults, more, "table1")
    parser.hide(_set_by_options(parser.get_defaults()))
    options = parse.parse(parser, argv)
    grids.refuse_fields(options, _set_by_options(options))
    grids.require_validation(options, "lrs", several=True)
    learning_rates.tuning_seeds(options)
    if options.targets is not None:
        grids.values(options, "targets", float, "(0, 1]")
    return options


def _set_by_options(options: parse.Options) -> dict[str, str]:
    """Return the fields that ``--lrs`` and ``--federations`` set, each with the name of its option."""
    fields = {"client.lr": "lrs"} if options.lrs is not None else {}
    if options.federations is not None:
        fields |= {"partition.n_clients": "federations", "federation.participation": "federations"}
    return fields


def grid(options: parse.Options) -> list[sweep.Trial]:
    """Return the table's trials at the first learning rate, in the order of the table."""
    base = grids.base(options)
    federations = [(options.partition.n_clients, options.federation.participation)]
    if options.federations is not None:
        federations = grids.pairs(options, "federations", (int, float), "N:C such as 10:0.4")
    if len(set(federations)) < len(federations):
        raise UserError(f"--federations takes different pairs N:C, got {quote(options.federations)}.")
    # the paper's targets apply unless the user sets a target
    papers = options.preset in ("paper", "authors") and options.target == Experiment().target
    of_paper = {key[:4]: target for key, (target, _) in fedssyn_table1().items()} if papers else {}
    cells, owned = [], {"client.lr"} if options.lrs is not None else ()
    lists = {"federation": federations, **grids.lists(options)}
    seeds = lists.pop("seed")
    for point in grids.combined(options, {**lists, "client.lr": _rates(options)[:1], "seed": seeds}):
        n, c = point.pop("federation")
        target = of_paper.get((options.data.name, n, c, point["partition.alpha"]), options.target)
        of_federation = {"partition.n_clients": n, "federation.participation": c, "target": target}
        cells.append(authors.cell(options, {**base, **point, **of_federation}, owned))
    return grids.once(cells)


def _rates(options: parse.Options) -> tuple[float, ...]:
    return grids.values(options, "lrs", float) if options.lrs is not None else (options.client.lr,)


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each trial of the table and of the server alone, after entries that choose learning rates."""
    cells = grid(options)
    reported = [Entry(cell, {"line": line(cell)}) for cell in [*cells, *references.server_trials(options, cells)]]
    rates, seeds = _rates(options), learning_rates.tuning_seeds(options)
    if options.total is not None:  # a dry run that measures a sample
        options.total += options.total // len(grids.values(options, "seeds", int)) * len(rates) * len(seeds)
        return reported
    return learning_rates.with_tuning(reported, [(("client.lr", rate),) for rate in rates], seeds)


table1 = Study(
    "table1", arguments, entries, report,
    partial(central_trials.play, references.central_lines, run=play),
    partial(central_trials.extra_jobs, references.central_lines), learning_rates.plan,
)  # fmt: skip

if __name__ == "__main__":
    parse.main(table1)
