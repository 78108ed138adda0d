"""Which metric of heterogeneity predicts the rounds that FedAvg needs? A rank correlation over many federations.

python sweeps/heterogeneity.py --seeds 0,1         # digits, 24 federations, some minutes on a laptop
python sweeps/heterogeneity.py --preset smoke      # the same code with smaller numbers

A federation is a partition with a seed. All federations have one learning rate: the rate of --lrs with the best
validation accuracy on the tuning seed of the federation that the options partition.* describe. Metrics of class counts:
``data/heterogeneity.py``. zeta_sq: dissimilarity of the clients' gradients, before round 1 and after round 3.

A metric predicts an outcome if the 95 % interval of its rank correlation (Spearman) excludes 0, and predicts better
than zeta_sq of round 3 if the interval of the difference between the absolute correlations excludes 0. A missed target
counts as all rounds. Intervals: bootstrap over partitions, each with all its seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Entry, Study, expand
from papers.heterogeneity_report import report

PARTITIONS = (
    "dirichlet_classes:0.01,dirichlet_classes:0.05,dirichlet_classes:0.1,dirichlet_classes:0.5,dirichlet_classes:5,"
    "dirichlet_classes:50,dirichlet_niid:0.1,dirichlet_clients:0.1,shards,single_class,labels_lognormal,quantity"
)
_SMALL = {"client.epochs": 1, "federation.rounds": 30, "measure.every": 3, "partition.n_clients": 10}
FIELDS: Mapping[str, Mapping[str, Any]] = {"smoke": {**_SMALL, "federation.rounds": 3}, "small": _SMALL}
"""Fields that each preset adds to the package's: single_class needs ten clients, and few epochs spread the rounds."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, FIELDS)
    fields = {**presets.preset(preset, dataset), **FIELDS[preset]}
    parser = grid.study_parser(__doc__, argv, "heterogeneity", FIELDS, fields, (
        ("partitions", str, PARTITIONS, "partitions, as NAME or NAME:alpha, separated by commas"),
        ("lrs", str, "0.2" if preset == "smoke" else "0.08,0.16,0.32", "learning rates to choose from, once for all"),
        learning_rates.OPTION,
    ), short={"seed": "seeds"})  # fmt: skip
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, {"seed": "seeds", "client.lr": "lrs"})
    if options.federation.rounds < 3:
        raise UserError(
            f"federation.rounds must be at least 3 for zeta_sq of round 3, got {options.federation.rounds}."
        )
    if options.federation.stop != "never":
        raise UserError(f"federation.stop must be never in this sweep, got {quote(options.federation.stop)}.")
    if options.measure.every not in (1, 3):
        raise UserError(f"measure.every must be 1 or 3 for zeta_sq of round 3, got {options.measure.every}.")
    grid.require_validation(options, "lrs", several=True)
    grid.values(options, "partitions", partition)
    learning_rates.tuning_seeds(options)
    return options


def partition(text: str) -> tuple[tuple[str, Any], ...]:
    """Return the config fields of a partition, as pairs, from ``NAME`` or ``NAME:alpha``."""
    name, _, alpha = text.partition(":")
    return (("partition.name", name), *([("partition.alpha", float(alpha))] if alpha else []))


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each partition and seed, after the entries that choose the learning rate."""
    rates = grid.values(options, "lrs", float, common_fields()["client.lr"].allowed)
    tries = [(("client.lr", rate),) for rate in rates]
    rows = [({"federation": text, "line": "fedavg"}, {**dict(partition(text)), "client.lr": rates[0]})
            for text in map(str.strip, options.partitions.split(","))]  # fmt: skip
    reported = expand(options, rows, by_seed=True)
    tuned = Entry(grid.cell(options, {**grid.base(options), "seed": reported[0].cell.seed}), reported[0].labels)
    tuning = learning_rates.with_tuning([tuned], tries, learning_rates.tuning_seeds(options))
    return [*(entry for entry in tuning if entry.is_tuning), *reported]


heterogeneity = Study("heterogeneity", arguments, entries, report, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(heterogeneity)
