"""Compare methods on the same clients: accuracy with intervals, rounds to a target, bytes, and all curves in a picture.

python sweeps/methods.py                                # five methods on digits, three seeds, minutes on a laptop
python sweeps/methods.py --preset smoke                        # the same code with smaller numbers
python sweeps/methods.py --algorithms fedavg,scaffold,my_lab.py:FedAvgM --alphas 0.01,0.1,1
python sweeps/methods.py --lrs 0.01,0.04,0.1                   # chooses a learning rate for each method
python sweeps/methods.py --preset paper --dataset cifar10 --data-dir DIR      # for GPUs

With --lrs each method tries every learning rate on the seeds of --tuning-seeds. The seeds of the table then use the
learning rate with the best validation accuracy. Test data, and the seeds of the table, choose nothing.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets, registry
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Study, load
from papers.methods import best_rates, report

METHODS = "fedavg,fedprox,scaffold,fednova,feddyn"
TAKEN = {"algorithm": "algorithms", "partition.alpha": "alphas", "seed": "seeds"}


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    fields = {**presets.preset(preset, dataset), "measure.every": 0, "sharing.setting": "real"}
    parser = grid.study_parser(__doc__, argv, "methods", grid.PRESETS, fields, (
        ("algorithms", str, METHODS, "methods, separated by commas; each is compared with the first"),
        ("alphas", str, "0.1", "Dirichlet concentrations, separated by commas"),
        ("seeds", str, "0,1,2", "seeds that the table reports, separated by commas"),
        ("lrs", str | None, None,
         "learning rates to choose from for each method and alpha, by validation accuracy; default: client.lr for all"),
        ("tuning-seeds", str, "100", "with --lrs: seeds on which learning rates are chosen; the table leaves them out"),
    ), lists=dict.fromkeys(("algorithms", "methods"), METHODS),
       short={"alpha": "alphas", "seed": "seeds", "methods": "algorithms"})  # fmt: skip
    parser.hide(TAKEN)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, {**TAKEN, **({} if options.lrs is None else {"client.lr": "lrs"})})
    if (setting := options["sharing.setting"]) != "real":
        raise UserError(
            "sharing.setting must be real (no sharing) here, as these methods are compared without a pool, got "
            f"{quote(setting)}: commons compares what is shared."
        )
    if "partition.alpha" not in options.fields and "alphas" in parse.named(argv):
        raise UserError(f"--alphas varies partition.alpha, which {options['partition.name']} does not have.")
    if options.lrs is not None:
        grid.require_validation(options, "lrs")
        if both := {*grid.values(options, "seeds", int)} & {*grid.values(options, "tuning-seeds", int)}:
            raise UserError(
                f"--tuning-seeds must differ from --seeds, which the table reports, got {min(both)} in both."
            )
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return a trial per alpha (``at``), method, learning rate and seed. ``tuning``: the trial is not in the table."""
    from fedcommons.core.capabilities import capabilities_of  # torch takes seconds to import

    base, result = grid.base(options), []
    alphas = grid.values(options, "alphas", float) if "partition.alpha" in options.fields else (None,)
    methods, rates = grid.values(options, "algorithms"), grid.listed(options, "lrs", float) or (options.client.lr,)
    for method in methods:
        component: Any = registry.find("algorithm", method)
        if capabilities_of(component).needs_pool:
            raise UserError(
                f"--algorithms {method} cannot be compared here: its server trains on a pool of synthetic images, and "
                "methods are compared here without a pool. Use fedcommons commons instead."
            )
    tuning = grid.values(options, "tuning-seeds", int) if options.lrs is not None else ()
    seeds = [*((seed, True) for seed in tuning), *((seed, False) for seed in grid.values(options, "seeds", int))]
    sweep.require_few(len(alphas) * len(methods) * len(rates) * len(seeds))
    for alpha, method, (seed, is_tuning), rate in product(alphas, methods, seeds, rates):
        varied = {"algorithm": method, "client.lr": rate, "seed": seed}
        cell = grid.cell(options, {**base, **varied, **({} if alpha is None else {"partition.alpha": alpha})})
        labels = {"method": registry.label(method), "at": alpha, "rate": rate, "tuning": is_tuning}
        result.append(Entry(cell, labels))
    return result


def trials(entries: Sequence[Entry]) -> list[sweep.Trial]:
    """Return the trials of the tuning, and one trial per line and seed of the table, at the first learning rate."""
    reported = {(e["at"], e["method"], e.cell.config.seed): e.cell for e in reversed(entries) if not e["tuning"]}
    return grid.once([*(e.cell for e in entries if e["tuning"]), *reversed(reported.values())])


def play(
    entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the tuning, if there is one, then all seeds of the table at the chosen learning rates."""
    if options.lrs is None:
        return sweep.run_cells(todo, out, display)
    tuning = grid.once(e.cell for e in entries if e["tuning"])
    outcome = sweep.run_cells(sweep.todo(tuning, out, display), out, display)
    best = best_rates(load(entries, options, out, display).runs)
    chosen = [e.cell for e in entries if not e["tuning"] and best.get((e["at"], e["method"])) == e["rate"]]
    return sweep.together([outcome, sweep.run_cells(sweep.todo(grid.once(chosen), out, display), out, display)])


methods = Study("methods", arguments, entries, report, play, trials=trials)

if __name__ == "__main__":
    parse.main(methods)
