"""Figures 6 and A.6 of Fedssyn, with differentially private generators: epsilon by epoch, images, test accuracy.

python sweeps/private_fedssyn.py                      # digits, minutes on a laptop
python sweeps/private_fedssyn.py --preset smoke       # the same code with smaller numbers
python sweeps/private_fedssyn.py --dataset mnist --data-dir DIR --epsilons 1,10 --sigmas 1.906
python sweeps/private_fedssyn.py --settings real,shuffled_synthetic,merf,ndpdc      # also images fitted to noisy sums
python sweeps/private_fedssyn.py --preset paper --dataset cifar10 --data-dir DIR       # for GPUs
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.tune import grid, main, sweep
from papers.fedssyn import private_presets
from papers.fedssyn.private_report import Entry, report


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the sweep and of each field; the ``generator.`` fields belong to the private generator."""
    preset, dataset = grid.preset_and_dataset(argv)
    if preset not in private_presets.PRIVATE:
        names = ", ".join(private_presets.PRIVATE)
        raise UserError(f"--preset must be one of {names}: no code of private generators was released.")
    paper = preset == "paper"
    fields = {**presets.preset(preset, dataset), **private_presets.fields(preset)}
    more = (
        ("epsilons", str, "10" if paper else "10,100", "target epsilons of private pools; empty for none"),
        ("sigmas", str, "1.906" if paper else "", "noise multipliers of further private pools; empty for none"),
        ("checkpoints", str, "0.1,0.5,1", "shares of the epochs after which images are shown and shared"),
    )
    lists = {"algorithms": "fedavg,scaffold", "settings": "real,shuffled_synthetic"}
    title = (__doc__ or "").partition("\n")[0]
    parser = grid.parser(title, argv, lists, more, "private_fedssyn", fields)
    parser.set_defaults({"alphas": "0.1"})
    options = parse.parse(parser, argv)
    if "generator.epochs" not in options.fields:
        raise UserError(
            f"--settings must name one with generators, such as shuffled_synthetic, got {options.settings}."
        )
    owners = {"generator.target_epsilon": "epsilons", "generator.noise_multiplier": "sigmas",
              "generator.target_epochs": "checkpoints", "generator.steps": "checkpoints"}  # fmt: skip
    grid.refuse_fields(options, owners)
    options.shares = parse.split("--checkpoints", options.checkpoints, float, "(0, 1]")
    return options


def _levels(options: parse.Options) -> dict[str, dict[str, Any]]:
    """Return the fields of each private pool of synthetic images, by the name of the pool."""
    epsilons, sigmas = (
        parse.split(f"--{name}", text, float) if (text := options[name]) else () for name in ("epsilons", "sigmas")
    )
    last = options["generator.epochs"]
    pools: dict[str, dict[str, Any]] = {}
    for e in epsilons:
        pools[f"epsilon {e:g}"] = {"generator.target_epsilon": e, "generator.target_epochs": last}
    for s in sigmas:
        pools[f"noise multiplier {s:g}"] = {"generator.noise_multiplier": s}
    return pools


def entries(options: parse.Options) -> list[Entry]:
    """Return the entries of the runs: without synthetic images, and with images of plain and of private generators.

    With the first algorithm, private generators also share images from each checkpoint of their training.
    """
    base, result, epochs = grid.base(options), [], options["generator.epochs"]
    plain = private_presets.plain(options.preset, base["data.name"])
    early = sorted({max(1, round(share * epochs)) for share in options.shares} - {epochs})
    seeds, algorithms = parse.split("--seeds", options.seeds, int), parse.split("--algorithms", options.algorithms)
    settings = parse.split("--settings", options.settings)

    def add(pool: str, last: bool, **fields: Any) -> None:
        sweep.require_few(len(result) + 1)
        result.append(Entry(pool, last, grid.cell(options, {**base, **fields})))

    for alpha, algorithm, seed in product(parse.split("--alphas", options.alphas, float), algorithms, seeds):
        fixed: dict[str, Any] = {"partition.alpha": alpha, "algorithm": algorithm, "seed": seed}
        for setting in settings:
            row = {**fixed, "sharing.setting": setting}
            if setting in private_presets.OF_SUMS:
                for e in parse.split("--epsilons", options.epsilons, float):
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


def private_fedssyn(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(options, "private_fedssyn", grid.once(e.cell for e in rows), partial(report, rows, options))


if __name__ == "__main__":
    parse.main(private_fedssyn)
