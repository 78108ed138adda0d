"""Table 1 of Fedssyn: rounds to a target accuracy, with and without the shuffled synthetic pool.

python sweeps/table1.py                     # digits, FedAvg, a few minutes on a laptop
python sweeps/table1.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/table1.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs
"""

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons import cli, config, presets, tuning
from fedcommons.artifacts import Store
from fedcommons.config import Experiment, override
from fedcommons.display import Display
from fedcommons.errors import UserError
from fedcommons.experiment import prepare
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.reports.plots import round_bars
from fedcommons.reports.published import fedssyn_table1
from fedcommons.sharing.synthetic_pool import missing
from fedcommons.tracking.run_folder import read_summary

GRID = {  # option: the field it varies
    "seeds": "seed", "algorithms": "algorithm", "alphas": "partition.alpha", "settings": "sharing.setting",
}  # fmt: skip
VARIED = {
    "partition.alpha": "alpha", "partition.n_clients": "N", "federation.participation": "C", "client.lr": "lr",
    "seed": "seed",
}  # fmt: skip
"""Fields in the names of run folders, and what they are called there."""


def arguments(argv: Sequence[str]):
    """Options of the table on top of every field of the experiment."""
    preset = cli.early(argv, "preset", "small")
    paper = preset == "paper"
    dataset = cli.early(argv, "dataset", "cifar10" if paper else "digits")
    parser = cli.parser((__doc__ or "").partition("\n")[0], presets.preset(preset, dataset))
    for name, default, text in (
        ("preset", "small", "smoke, small or paper: sets the defaults of all fields"),
        ("dataset", dataset, "digits, mnist, fmnist, cifar10 or cifar100"),
        ("data-dir", None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("seeds", "0", "seeds, separated by commas"),
        ("algorithms", "fedavg", "algorithms, separated by commas"),
        ("alphas", "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("settings", "real,shuffled_synthetic" if paper else "real,local_synthetic,shuffled_synthetic",
         "data settings, separated by commas"),
        ("federations", "10:1,10:0.4,40:0.2,100:0.1" if paper else None,
         "N:C pairs, separated by commas; default: partition.n_clients and federation.participation"),
        ("lrs", "0.01,0.05,0.1" if paper else None,
         "learning rates to choose from by validation accuracy; default: client.lr alone"),
        ("out", f"runs/table1-{preset}-{dataset}", "folder of the sweep"),
        ("wandb", "offline", "online (needs a login), offline or off"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=str if default is not None else str | None, default=default, help=text)
    parser.add_argument("--download", action="store_true", help="fetch the data set if it is not in the folder")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    parser.add_argument("--dry-run", action="store_true", help="print the cells and which artifacts exist, and stop")
    options = cli.parse(parser, argv)
    taken = {name: option for option, name in GRID.items()}
    taken |= {"data.name": "dataset", "data.dir": "data-dir", "data.download": "download", "tracking.wandb": "wandb"}
    taken |= (
        {"partition.n_clients": "federations", "federation.participation": "federations"} if options.federations else {}
    )
    taken |= {"client.lr": "lrs"} if options.lrs else {}
    for name, option in taken.items():
        if options[name] != parser.get_default(name):
            raise UserError(f"{name} is set by the table's own option: use --{option} instead of {options[name]}.")
    if options.lrs and "," in options.lrs and options.data.validation == 0:
        raise UserError("--lrs chooses by validation accuracy: data.validation must be above 0.")
    return options


def grid(options) -> list[tuning.Cell]:
    """The table's runs, in its order."""
    base = cli.experiment(options)
    own = {"data.name": "dataset", "data.dir": "data_dir", "data.download": "download", "tracking.wandb": "wandb"}
    base = override(base, {name: options[option] for name, option in own.items()})
    base = tuning.tracked(base, Path(options.out))
    pairs = [f"{base.partition.n_clients}:{base.federation.participation}"]
    federations = [
        _federation(t) for t in (cli.split("--federations", options.federations) if options.federations else pairs)
    ]
    rates = cli.split("--lrs", options.lrs, float) if options.lrs else (base.client.lr,)
    papers = options.preset == "paper" and options.target == Experiment().target  # unless another target is asked for
    targets = {key[:4]: target for key, (target, _) in fedssyn_table1().items()} if papers else {}
    experiments = []
    for (n, c), alpha, algorithm, setting, rate, seed in product(
        federations, cli.split("--alphas", options.alphas, float), cli.split("--algorithms", options.algorithms),
        cli.split("--settings", options.settings), rates, cli.split("--seeds", options.seeds, int),
    ):  # fmt: skip
        values: dict[str, Any] = {
            "seed": seed, "algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": setting,
            "partition.n_clients": n, "federation.participation": c, "client.lr": rate,
            "target": targets.get((options.dataset, n, c, alpha), base.target),
        }  # fmt: skip
        experiments.append(override(base, values))
    return [tuning.cell(e, VARIED) for e in experiments]


def _federation(text: str) -> tuple[int, float]:
    n, _, c = text.partition(":")
    try:
        return int(n), float(c)
    except ValueError:
        raise UserError(f"--federations takes pairs N:C such as 10:0.4, got {text!r}.") from None


def footnotes(cells: Sequence[tuning.Cell], options) -> list[str]:
    """What a reader must know to read the numbers."""
    c = cells[0].config
    work = "E' = floor(n_i E/(n_i + n~)) local epochs with synthetic data, so that steps stay equal"
    return [
        "Rounds: the first whose server model has the target test accuracy, unsmoothed; >R: not within R rounds.",
        f"{work if c.client.equal_work else f'E = {c.client.epochs} local epochs in every setting'}; "
        f"E = {c.client.epochs}, B = {c.client.batch_size}, {c.model.name}.",
        "The learning rate was chosen per cell by validation accuracy of the last round, never by test data."
        if options.lrs
        else f"The learning rate was fixed at {c.client.lr:g} for all cells, not chosen per cell.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation. MB: all clients, both ways, pool included.",
    ]


def report(cells: Sequence[tuning.Cell], out: Path, options, display: Display) -> None:
    """Write the tables, the picture and the summary from the run folders, and show the table."""
    found = [({**s, "run_dir": c.name}) for c in cells if (s := read_summary(out / c.name))]
    if not found:
        return
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": found})
    chosen = tables.choose_learning_rate(found)
    entries = tables.entries(chosen)
    markdown = tables.table1_markdown(entries, published(cells[0].config, options), footnotes(cells, options))
    write_text(out / "table1.md", markdown)
    write_text(out / "table1.csv", tables.to_csv(chosen))
    groups: dict[str, list[tuple[str, float, bool]]] = {}
    for e in entries:
        label = f"{e.algorithm}, α = {e.alpha:g}\nN = {e.n_clients}, C = {e.participation:g}"
        groups.setdefault(label, []).append((e.setting, *e.mean_rounds))
    round_bars(out / "table1.png", list(groups.items()), found[0]["rounds"])
    display.say("\n" + markdown)


def published(one: Experiment, options) -> Mapping[tuple, str]:
    """The paper's rounds, only where every field but those of the grid is the paper preset's."""
    paper = override(Experiment(), presets.preset("paper", options.dataset))
    free = {*GRID.values(), "partition.n_clients", "federation.participation", "client.lr", "target"}
    if set(config.same_results(paper, one)) - free or options.target != Experiment().target:
        return {}
    return {key: rounds for key, (_, rounds) in fedssyn_table1().items()}


def dry_run(cells: Sequence[tuning.Cell], out: Path, display: Display) -> None:
    """Print what would run."""
    for c in cells:
        ready = prepare(c.config)
        store = Store(Path(c.config.artifacts), display.say)
        lacking = sum(len(job.needs) for job in missing(store, ready.needs))
        has = (
            f", {len(ready.needs) - lacking} of {len(ready.needs)} clients' synthetic images exist"
            if ready.needs
            else ""
        )
        display.say(f"{c.name}: {'done' if tuning.is_done(c, out) else 'to run'}{has}")
    display.say(f"{len(cells)} cells.")


def table1(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, cells = Path(options.out), grid(options)
    with Display() as display:
        if options.dry_run:
            dry_run(cells, out, display)
            return 0
        outcome = tuning.run_cells(cells, out, display, resume=options.resume)
        report(cells, out, options, display)
        for name, message in outcome.failures.items():
            display.say(f"failed: {name}: {message}")
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.seconds.items())
        display.say(
            f"Time: {time.perf_counter() - started:.0f} s ({spent}; {outcome.generators_trained} generators trained)."
        )
        display.say(f"All in {out}: table1.md, table1.csv, table1.png, summary.json, and a folder for each run.")
        return 1 if outcome.failures else 0


if __name__ == "__main__":
    cli.main(table1)
