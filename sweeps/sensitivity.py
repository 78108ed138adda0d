"""Figure 4 of Fedssyn: accuracy against a generator's training images, samples, training epochs and type.

python sweeps/sensitivity.py                       # digits, one seed, minutes on a laptop
python sweeps/sensitivity.py --preset smoke        # the same code with smaller numbers
python sweeps/sensitivity.py --seeds 0,1,2
python sweeps/sensitivity.py --preset paper --dataset cifar10 --data-dir DIR      # for GPUs

rho: share of a client's n_i images that its generator sees; n~: synthetic images that a client gets; N: clients. (a)
varies rho and n~ at alpha 0.1. (b) varies the generators' epochs for two N, (c) varies the generator; both at alpha
0.01. The method is FedAvg.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.tune import grid
from fedcommons.tune.study import Entry, Row, Study, expand
from papers.fedssyn import central_trials
from papers.fedssyn.sensitivity_report import KEY, report

OPTIONS = {"seed": "seeds", "generator.rho": "rhos", "sharing.p": "numbers", "sharing.setting": "rhos",
         "partition.n_clients": "clients", "generator.name": "generators",
         "generator.steps": "checkpoints"}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


ALPHAS = {"a": 0.1, "b": 0.01, "c": 0.01}

_SMALL: dict[str, Any] = {
    "model.name": "encoder",
    "federation.rounds": 10,
    "client.epochs": 5,
    "client.lr": 0.16,  # has the best validation accuracy at both alphas, see docs/results/commons_digits.md
    "measure.every": 0,
    "generator.even_batches": True,  # else 129 images in batches of 64 leave a batch of one, which harms the DDPM
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, "federation.rounds": 2, "client.epochs": 2, "client.lr": 0.1},
    "small": _SMALL,
    "paper": {"measure.every": 0},
}
"""Config fields that each preset adds to the package's preset of the same name."""

LISTS: Mapping[str, tuple[str, str, str, str, str]] = {
    "smoke": ("0.5,1", "0.25,1", "0.5,1", "4,6", "ddpm,gan"),
    "small": ("0.1,0.3,1", "0.1,0.3,1", "0.1,0.3,1", "10,40", "ddpm,gan,cvae"),
    "paper": ("0.1,0.25,0.5,0.75,1", "0.1,0.25,0.5,0.75,1", "0.1,0.3,0.5,0.7,0.9", "10,40", "ddpm,gan"),
}
"""Five lists of values for each preset. The panels of the figure are (a) to (c).

For (a): rho, then n~/n_i. For (b): checkpoints as shares of all epochs of a generator, then N. For (c): generators. The
module's docstring explains the symbols. Only the values of N are from the paper.
"""


def fields(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields of a preset with this data set: FedAvg with shuffled synthetic images."""
    return {**presets.preset(preset, dataset), **FIELDS[preset], "data.name": dataset, "algorithm": "fedavg",
            "sharing.setting": "shuffled_synthetic"}  # fmt: skip


def generator(name: str, preset: str, epochs: int) -> dict[str, Any]:
    """Return the config fields of a generator in panel (c); ``epochs`` applies unless the preset sets epochs."""
    return {"generator.epochs": epochs, **presets.generator(name, preset), "generator.name": name}


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, FIELDS)
    rhos, numbers, checkpoints, clients, generators = LISTS[preset]
    parser = grid.study_parser(__doc__, argv, "sensitivity", FIELDS, fields(preset, dataset), (
        ("rhos", str, rhos, "(a): rho, shares of a client's images that its generator sees, nested"),
        ("numbers", str, numbers, "(a): n~/n_i, synthetic images of a client per real image of that client"),
        ("checkpoints", str, checkpoints, "(b): shares of generator.epochs after which images are drawn"),
        ("clients", str, clients, "(b): numbers of clients; (a) and (c) use the first number"),
        ("generators", str, generators, "(c): generators"),
    ), short={"seed": "seeds", "rho": "rhos"})  # fmt: skip
    parser.hide([*OPTIONS, "partition.alpha"])
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, OPTIONS)
    if "partition.alpha" in parse.named(argv):
        raise UserError("partition.alpha is not for figure 4: it is 0.1 in (a), 0.01 in (b) and (c).")
    if "partition.alpha" not in options.fields:
        raise UserError(f"figure 4 varies partition.alpha, which {options['partition.name']} does not have.")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the runs of figure 4's panels (a) to (c) per seed, with a run without sharing per panel and federation."""
    epochs = options["generator.epochs"]
    rhos = grid.values(options, "rhos", float, "(0, 1]")
    numbers = grid.values(options, "numbers", float, "(0, 1e6]")
    shares = grid.values(options, "checkpoints", float, "(0, 1]")
    clients = grid.values(options, "clients", int, "[2, 1e6]")
    early = sorted({max(1, round(share * epochs)) for share in shares})
    made_by = "ddpm"
    pools = [("a", clients[0], made_by, rho, number, epochs) for rho, number in product(rhos, numbers)]
    pools += [("b", n, made_by, 1.0, 1.0, epoch) for n, epoch in product(clients, early)]
    kinds = {g: generator(g, options.preset, epochs) for g in grid.values(options, "generators")}
    pools += [("c", clients[0], name, 1.0, 1.0, kind["generator.epochs"]) for name, kind in kinds.items()]
    rows: list[Row] = []
    for panel, n in dict.fromkeys(pool[:2] for pool in pools):
        fixed = {"partition.n_clients": n, "partition.alpha": ALPHAS[panel]}
        none = dict(zip(KEY, (panel, n, None, 0.0, 0.0, 0), strict=True))
        rows.append((none, {**fixed, "sharing.setting": "real"}))
        for pool in (pool for pool in pools if pool[:2] == (panel, n)):
            _, _, name, rho, number, epoch = pool
            kind = kinds[name] if panel == "c" else {"generator.name": name}
            of_pool = {"generator.rho": rho, "generator.epochs": epoch, "sharing.p": number / (1 + number)}
            rows.append((dict(zip(KEY, pool, strict=True)), {**fixed, **kind, **of_pool}))
    return expand(options, rows, by_seed=True)


central_lines = central_trials.lines

sensitivity = Study(
    "sensitivity", arguments, entries, partial(report, central_lines),
    partial(central_trials.play, central_lines), partial(central_trials.extra_jobs, central_lines),
)  # fmt: skip

if __name__ == "__main__":
    parse.main(sensitivity)
