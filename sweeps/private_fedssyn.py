"""Fedssyn with private generators, its figures 6 and A.6: epsilon over epochs, images, accuracy of the pools.

python sweeps/private_fedssyn.py                      # digits, minutes on a laptop
python sweeps/private_fedssyn.py --preset smoke       # the same code with smaller numbers
python sweeps/private_fedssyn.py --dataset mnist --data-dir DIR --epsilons 1,10 --sigmas 1.906
python sweeps/private_fedssyn.py --settings real,shuffled_synthetic,merf,ndpdc      # and images fitted to noisy sums
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
    """Options of the sweep on top of every field of the experiment; ``generator.`` is the private one."""
    preset, dataset = grid.preset_and_dataset(argv)
    if preset not in private_presets.PRIVATE:
        known = ", ".join(private_presets.PRIVATE)
        raise UserError(f"--preset must be one of {known}: no code of private generators was released.")
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
    """The private pools: what each is called, and its fields."""
    epsilons, sigmas = (
        parse.split(f"--{name}", text, float) if (text := options[name]) else () for name in ("epsilons", "sigmas")
    )
    last = options["generator.epochs"]
    found: dict[str, dict[str, Any]] = {}
    for e in epsilons:
        found[f"epsilon {e:g}"] = {"generator.target_epsilon": e, "generator.target_epochs": last}
    for s in sigmas:
        found[f"noise multiplier {s:g}"] = {"generator.noise_multiplier": s}
    return found


def entries(options: parse.Options) -> list[Entry]:
    """No pool, the plain one, the private ones; with the first method private ones at checkpoints too."""
    base, found, epochs = grid.base(options), [], options["generator.epochs"]
    plain = private_presets.plain(options.preset, base["data.name"])
    early = sorted({max(1, round(share * epochs)) for share in options.shares} - {epochs})
    seeds, algorithms = parse.split("--seeds", options.seeds, int), parse.split("--algorithms", options.algorithms)
    settings = parse.split("--settings", options.settings)

    def add(pool: str, last: bool, **fields: Any) -> None:
        sweep.require_few(len(found) + 1)
        found.append(Entry(pool, last, grid.cell(options, {**base, **fields})))

    for alpha, algorithm, seed in product(parse.split("--alphas", options.alphas, float), algorithms, seeds):
        at: dict[str, Any] = {"partition.alpha": alpha, "algorithm": algorithm, "seed": seed}
        for setting in settings:
            mine = {**at, "sharing.setting": setting}
            if setting in private_presets.OF_SUMS:
                for e in parse.split("--epsilons", options.epsilons, float):
                    for noise, level in private_presets.of_sums(setting, options.preset, e).items():
                        add(f"{private_presets.OF_SUMS[setting]} {noise}, epsilon {e:g}", True, **{**mine, **level})
                continue
            if "generator.rho" not in grid.cell(options, {**base, **mine, **plain}).config.flat:
                add("none", True, **mine)
                continue
            add("plain", True, **mine, **plain)
            for name, level in _levels(options).items():
                for e in (*(early if algorithm == algorithms[0] else ()), epochs):
                    add(name, e == epochs, **mine, **level, **{"generator.epochs": e})
    return found


def private_fedssyn(argv: Sequence[str]) -> int:
    options = arguments(argv)
    found = entries(options)
    return main.run(options, "private_fedssyn", grid.once(e.cell for e in found), partial(report, found, options))


if __name__ == "__main__":
    parse.main(private_fedssyn)
