"""Figures 6 and A.6 of Fedssyn, with differentially private generators: epsilon by epoch, images, test accuracy.

python sweeps/private_fedssyn.py                      # digits, minutes on a laptop
python sweeps/private_fedssyn.py --preset smoke       # the same code with smaller numbers
python sweeps/private_fedssyn.py --dataset mnist --data-dir DIR --epsilons 1,10 --sigmas 1.906
python sweeps/private_fedssyn.py --settings real,shuffled_synthetic,merf,ndpdc      # also images fitted to noisy sums
python sweeps/private_fedssyn.py --preset paper --dataset cifar10 --data-dir DIR       # for GPUs
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedssyn import private_presets
from papers.fedssyn.private_report import report


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, private_presets.PRIVATE)
    paper = preset == "paper"
    fields = {**presets.preset(preset, dataset), **private_presets.fields(preset)}
    more = (
        ("epsilons", str, "10" if paper else "10,100", "target epsilons of private pools; empty for none"),
        ("sigmas", str, "1.906" if paper else "", "noise multipliers of further private pools; empty for none"),
        ("checkpoints", str, "0.1,0.5,1", "shares of the epochs after which images are shown and shared"),
    )
    lists = {"algorithms": "fedavg,scaffold", "settings": "real,shuffled_synthetic", "alphas": "0.1"}
    parser = grid.parser(__doc__, argv, lists, more, "private_fedssyn", fields)
    options = parse.parse(parser, argv)
    if "generator.epochs" not in options.fields:
        raise UserError(
            f"--settings must name one with generators, such as shuffled_synthetic, got {options.settings}."
        )
    owners = {"generator.target_epsilon": "epsilons", "generator.noise_multiplier": "sigmas",
              "generator.target_epochs": "checkpoints", "generator.steps": "checkpoints"}  # fmt: skip
    grid.refuse_fields(options, owners)
    options.shares = grid.values(options, "checkpoints", float, "(0, 1]")
    return options


def _levels(options: parse.Options) -> dict[str, dict[str, Any]]:
    """Return the fields of each private pool of synthetic images, by the name of the pool."""
    last = options["generator.epochs"]
    pools: dict[str, dict[str, Any]] = {}
    for e in grid.listed(options, "epsilons", float):
        pools[f"epsilon {e:g}"] = {"generator.target_epsilon": e, "generator.target_epochs": last}
    for s in grid.listed(options, "sigmas", float):
        pools[f"noise multiplier {s:g}"] = {"generator.noise_multiplier": s}
    return pools


def entries(options: parse.Options) -> list[Entry]:
    """Return the entries of the runs: without synthetic images, and with images of plain and of private generators.

    With the first algorithm, private generators also share images from each checkpoint of their training.
    """
    base, result, epochs = grid.base(options), [], options["generator.epochs"]
    plain = private_presets.plain(options.preset, base["data.name"])
    early = sorted({max(1, round(share * epochs)) for share in options.shares} - {epochs})
    seeds, algorithms = grid.values(options, "seeds", int), grid.values(options, "algorithms")
    settings = grid.values(options, "settings")

    def add(pool: str, last: bool, **fields: Any) -> None:
        sweep.require_few(len(result) + 1)
        result.append(Entry(grid.cell(options, {**base, **fields}), {"pool": pool, "last": last}))

    for alpha, algorithm, seed in product(grid.values(options, "alphas", float), algorithms, seeds):
        fixed: dict[str, Any] = {"partition.alpha": alpha, "algorithm": algorithm, "seed": seed}
        for setting in settings:
            row = {**fixed, "sharing.setting": setting}
            if setting in private_presets.OF_SUMS:
                for e in grid.values(options, "epsilons", float):
                    for noise, level in private_presets.of_sums(setting, options.preset, e).items():
                        add(f"{private_presets.OF_SUMS[setting]} {noise}, epsilon {e:g}", True, **{**row, **level})
                continue
            if "generator.rho" not in grid.cell(options, {**base, **row, **plain}).config.flat:
                add("none", True, **row)
                continue
            add("plain", True, **row, **plain)
            for name, level in _levels(options).items():
                for e in (*(early if algorithm == algorithms[0] else ()), epochs):
                    add(name, e == epochs, **row, **level, **{"generator.epochs": e})
    return result


private_fedssyn = Study("private_fedssyn", arguments, entries, report)

if __name__ == "__main__":
    parse.main(private_fedssyn)
