"""Predict how much sharing is enough: a short probe run and Corollary I give the effect of a share p of pool images.

python sweeps/advise.py                                  # digits, alpha 0.01 and 0.1: under a minute on a laptop
python sweeps/advise.py --alphas 0.05 --speed-up 3       # the smallest p that is predicted to train three times faster
python sweeps/advise.py --check                          # also trains with four values of p, and compares
python sweeps/advise.py --settings shuffled_real         # predicts for swapped real instead of synthetic images
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import create_display
from fedcommons.config.dotted import choose, override
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, unknown
from fedcommons.tune import grid, main, sweep
from fedcommons.tune.remote_sweep import SweepMirror
from papers.fedssyn import authors

POOLS = ("shuffled_synthetic", "shuffled_real")


def arguments(argv: Sequence[str]) -> parse.Options:
    more = (
        ("p", str, "0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9", "shares p to predict, in [0, 1), separated by commas"),
        ("speed-up", Annotated[float, "(1, inf)"], 2.0, "wanted factor by which the number of rounds decreases, > 1"),
        ("probe-rounds", Annotated[int, "[1, 1e9]"], 3,
         "rounds of the probe run, in which the clients share no images"),
        ("check-p", str, "0.1,0.25,0.5", "with --check: shares p to train with, in addition to p = 0"),
    )  # fmt: skip
    parser = grid.parser(__doc__, argv, {"settings": POOLS[0]}, more, "advise")
    check = "train with some p to the last round and compare with the predictions"
    parser.add_options([("check", bool, False, check)])
    parser.hide({"sharing.p"})
    options = parse.parse(parser, argv)
    grid.refuse_fields(options, {"sharing.p": "p"})
    for name in ("p", "check-p"):
        grid.values(options, name, float, "[0, 1)")
    if "partition.alpha" not in options.fields:
        raise UserError(
            f"partition.name {options.partition.name} has no alpha, and the predictions are made per alpha."
        )
    if options.settings not in POOLS:
        raise unknown("--settings", options.settings, POOLS)
    if options.algorithms != "fedavg":
        raise UserError(f"--algorithms must be fedavg, which Corollary I is about, got {options.algorithms}.")
    for name, value, needed in (
        ("client.optimizer", options.client.optimizer, "sgd"), ("client.momentum", options.client.momentum, 0),
        ("dp.local", options.dp.local, False), ("client.equal_work", options.client.equal_work, True),
    ):  # fmt: skip
        if value != needed:
            raise UserError(f"{name} must be {needed}, as Corollary I assumes, got {value}.")
    return options


def configs(options: parse.Options) -> list[Experiment]:
    """Return an experiment for each alpha, with the requested sharing strategy and the first seed."""
    seed, base = grid.values(options, "seeds", int)[0], grid.base(options)
    pool = {"sharing.setting": options.settings, "sharing.p": 0.5 if options.settings == "shuffled_real" else None}
    alphas = grid.values(options, "alphas", float)
    sweep.require_few(len(alphas) * len(options.seeds.split(",")) * len(options.check_p.split(",")))
    common = {**base, "seed": seed, "measure.every": max(1, options.measure.every), **pool}
    return [choose({**common, "partition.alpha": alpha}, options.fields) for alpha in alphas]


def probed(config: Experiment, options: parse.Options) -> Experiment:
    """Return the short probe run of this experiment, which measures all convergence parameters in each round."""
    rounds = {"federation.rounds": options.probe_rounds, "measure.every": 1, "measure.smoothness": True}
    return override(config, rounds)


def cells(options: parse.Options) -> dict[tuple[float, float], list[sweep.Trial]]:
    """Return the trials of ``--check`` by (alpha, share p of pool images), one trial per seed."""
    shares = dict.fromkeys((0.0, *grid.values(options, "check-p", float)))
    runs = {}
    for c, p in product(configs(options), shares):
        sharing: dict[str, Any] = {"sharing.setting": options.settings if p else "real"}
        sharing |= {"sharing.p": p} if p else {}
        if not options.measure.every:  # these runs measure nothing, so they have no measure.samples
            sharing |= {"measure.every": 0, "measure.samples": None}
        each = [{**c.flat, **sharing, "seed": seed} for seed in grid.values(options, "seeds", int)]
        runs[c.partition.alpha, p] = [authors.cell(options, fields) for fields in each]
    return runs


def advise(argv: Sequence[str]) -> int:
    options = arguments(argv)
    out, wanted, runs = Path(options.out), configs(options), cells(options) if options.check else {}
    several = [run for each in runs.values() for run in each]
    with create_display(options) as display:
        if options.dry_run:
            probes = [sweep.Trial(f"probe, alpha {c.partition.alpha:g}", probed(c, options)) for c in wanted]
            main.dry_run([*probes, *several], out, display, options.on_cores)
            return 0
        mirror = SweepMirror(several, out, display.say)
        mirror.begin(options.resume)
        todo = sweep.todo(several, out, display)
        from fedcommons.runs.build import build
        from papers.fedssyn.advice import report
        from papers.fedssyn.probe import predictions

        ready = [build(c) for c in wanted]
        with sweep.open_sweep(out, options.resume, display.say):  # opened only after all invalid requests are refused
            mirror.claim()
            predicted = {
                c.partition.alpha: (run, *predictions(run, options, display))
                for c, run in zip(wanted, ready, strict=True)
            }
            report(predicted, {}, options, out, display)
            if not runs:
                return 0
            ended = sweep.run_cells(todo, out, display)
            report(predicted, runs, options, out, display)
            code = main.conclude(ended, options, "advise", display)
            mirror.end()
            return code


if __name__ == "__main__":
    parse.main(advise)
