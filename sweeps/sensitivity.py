"""Figure 4 of Fedssyn: accuracy against a generator's training images, samples, training epochs and type.

python sweeps/sensitivity.py                       # digits, one seed, minutes on a laptop
python sweeps/sensitivity.py --preset smoke        # the same code with smaller numbers
python sweeps/sensitivity.py --seeds 0,1,2
python sweeps/sensitivity.py --preset paper --dataset cifar10 --data-dir DIR      # for GPUs
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.errors import UserError, unknown
from fedcommons.tune import grid, main, sweep
from papers.fedssyn import central_trials
from papers.fedssyn import sensitivity_presets as presets
from papers.fedssyn.sensitivity_report import Entry, report

if TYPE_CHECKING:
    from papers.fedssyn.central import Central

TAKEN = {"seed": "seeds", "generator.rho": "rhos", "sharing.p": "numbers", "sharing.setting": "rhos",
         "partition.n_clients": "clients", "generator.name": "generators",
         "generator.steps": "checkpoints"}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the sweep, and an option for each field of the experiment's configuration."""
    preset = parse.early(argv, "preset", "small")
    if preset not in presets.FIELDS:
        raise unknown("preset", preset, presets.FIELDS)
    dataset = parse.early(argv, "data.name", "cifar10" if preset == "paper" else "digits")
    rhos, numbers, checkpoints, clients, generators = presets.LISTS[preset]
    parser = parse.parser((__doc__ or "").partition("\n")[0], argv, presets.fields(preset, dataset))
    for name, default, text in (
        ("preset", "small", f"{', '.join(presets.FIELDS)}: sets the defaults of all fields"),
        ("seeds", "0", "seeds, separated by commas"),
        ("rhos", rhos, "(a): rho, shares of a client's images that its generator sees, nested"),
        ("numbers", numbers, "(a): n~/n_i, synthetic images of a client per real image of that client"),
        ("checkpoints", checkpoints, "(b): shares of generator.epochs after which images are drawn"),
        ("clients", clients, "(b): numbers of clients; (a) and (c) use the first number"),
        ("generators", generators, "(c): generators"),
        ("out", f"runs/sensitivity-{preset}-{registry.label(dataset)}", "folder of the sweep"),
    ):
        parser.add_argument(f"--{name}", type=str, default=default, help=text)
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parse.add_shared(parser)
    parser.short = {**SHORT_NAMES, "seed": "seeds", "rho": "rhos"}
    parser.hide([*TAKEN, "partition.alpha"])
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, TAKEN)
    if "partition.alpha" in parse.named(argv):
        raise UserError("partition.alpha is not for figure 4: it is 0.1 in (a), 0.01 in (b) and (c).")
    if "partition.alpha" not in options.fields:
        raise UserError(f"figure 4 varies partition.alpha, which {options['partition.name']} does not have.")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the runs of figure 4's panels (a) to (c) per seed, with a run without sharing per panel and federation."""
    base, epochs, result = grid.base(options), options["generator.epochs"], []
    rhos = parse.split("--rhos", options.rhos, float, "(0, 1]")
    numbers = parse.split("--numbers", options.numbers, float, "(0, 1e6]")
    shares = parse.split("--checkpoints", options.checkpoints, float, "(0, 1]")
    clients = parse.split("--clients", options.clients, int, "[2, 1e6]")
    early = sorted({max(1, round(share * epochs)) for share in shares})
    made_by = "ddpm"
    pools = [("a", clients[0], made_by, rho, number, epochs) for rho, number in product(rhos, numbers)]
    pools += [("b", n, made_by, 1.0, 1.0, epoch) for n, epoch in product(clients, early)]
    kinds = {g: presets.generator(g, options.preset, epochs) for g in parse.split("--generators", options.generators)}
    pools += [("c", clients[0], name, 1.0, 1.0, kind["generator.epochs"]) for name, kind in kinds.items()]
    for seed in parse.split("--seeds", options.seeds, int):
        federations = dict.fromkeys((panel, n) for panel, n, *_ in pools)
        for panel, n in federations:
            fixed = {**base, "seed": seed, "partition.n_clients": n, "partition.alpha": presets.ALPHAS[panel]}
            real = grid.cell(options, {**fixed, "sharing.setting": "real"})
            result.append(Entry(panel, n, None, 0.0, 0.0, 0, real))
            for _, _, name, rho, number, epoch in (p for p in pools if p[:2] == (panel, n)):
                fields: dict[str, Any] = {**kinds[name]} if panel == "c" else {"generator.name": name}
                fields |= {"generator.rho": rho, "generator.epochs": epoch, "sharing.p": number / (1 + number)}
                result.append(Entry(panel, n, name, rho, number, epoch, grid.cell(options, {**fixed, **fields})))
    sweep.require_few(len(result))
    return result


def central_lines(entries: Sequence[Entry]) -> "list[Central]":
    """Return the models to train centrally on all real images, one per seed, for rounds x ``client.epochs`` epochs."""
    from papers.fedssyn.central import Central

    lines = []
    for e in entries:
        config = sweep.with_absolute_paths(e.cell.config)
        lines.append(Central("central_real", config, config.federation.rounds * config.client.epochs))
    return list({line.name: line for line in lines}.values())


def run_cells(entries: Sequence[Entry], todo: sweep.Todo, out: Path, display: Display) -> sweep.Outcome:
    """Run the remaining trials, then train the central models."""
    outcome, started = sweep.run_cells(todo, out, display), time.perf_counter()
    failures = {**outcome.failures, **central_trials.train(central_lines(entries), out, display)}
    seconds = {**outcome.seconds, "central models": time.perf_counter() - started}
    return replace(outcome, seconds=seconds, failures=failures)


def sensitivity(argv: Sequence[str]) -> int:
    options = arguments(argv)
    rows = entries(options)
    return main.run(
        options, "sensitivity", grid.once(e.cell for e in rows),
        lambda out, display: report(rows, [line.name for line in central_lines(rows)], options, out, display),
        play=partial(run_cells, rows), extra=lambda: central_trials.extra_jobs(central_lines(rows)),
    )  # fmt: skip


if __name__ == "__main__":
    parse.main(sensitivity)
