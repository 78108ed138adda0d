"""Predict how much sharing is enough: a few rounds with some shares p of pool images give the rounds for every p.

python sweeps/advise.py                                  # digits, alpha 0.01 and 0.1: some minutes on a laptop
python sweeps/advise.py --alphas 0.05 --speed-up 3       # the smallest p that is predicted to train three times faster
python sweeps/advise.py --check                          # also trains with every p to the target, and compares

The probe is a set of ordinary runs of --probe-rounds rounds, without sharing and with the shares of --probe-p. Its
generators train for fewer epochs. With --lrs, validation accuracy after the probe's last round without sharing chooses
each federation's learning rate, on the seeds of --tuning-seeds. On digits the probe named no p that is close to the
best one (docs/results/advise_digits.md), so add --check.
"""

from collections.abc import Sequence
from itertools import product
from typing import Annotated

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError, quote
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry, Report, Results, Study

POOL = "shuffled_synthetic"
OPTIONS = {"partition.alpha": "alphas", "federation.participation": "participations", "seed": "seeds", "sharing.p": "p"}


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    usual = presets.preset(preset, dataset, parse.early(argv, "generator.name", "ddpm"))
    fields = {**usual, "measure.every": 0, "sharing.setting": POOL, "federation.stop": "target"}
    parser = grid.study_parser(__doc__, argv, "advise", grid.PRESETS, fields, (
        ("alphas", str, "0.01,0.1", "Dirichlet concentrations, separated by commas"),
        ("participations", str, "1", "shares C of the clients that take part in a round, separated by commas"),
        ("p", str, "0.05,0.1,0.25,0.5", "shares p to predict, in (0, 1), separated by commas"),
        ("speed-up", Annotated[float, "(1, inf)"], 2.0, "wanted factor by which the number of rounds decreases, > 1"),
        ("probe-p", str, "0.1,0.25", "shares p of pool images in the probe (the short runs), besides p = 0"),
        ("probe-rounds", Annotated[int, "[1, 1e9]"], 5, "rounds of each run of the probe"),
        ("probe-epochs", Annotated[int | None, "[1, 1e9]"], None,
         "training epochs of the generators in the probe (the short runs); default: a fifth of generator.epochs"),
        ("check", bool, False, "train with every p to the target and compare with the predictions"),
        ("lrs", str | None, None, "learning rates to choose from for each federation; default: client.lr for all"),
        learning_rates.OPTION,
    ), short={"alpha": "alphas"})  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, {**OPTIONS, **({} if options.lrs is None else {"client.lr": "lrs"})})
    grid.values(options, "p", float, "(0, 1)")
    grid.values(options, "probe-p", float, "[1e-6, 1)")  # the fit divides by log(1 - p)^2
    grid.values(options, "participations", float, "(0, 1]")
    if "partition.alpha" not in options.fields:
        raise UserError(
            f"partition.name {options.partition.name} has no alpha, and the predictions are made per alpha."
        )
    if options.sharing.setting != POOL:
        raise UserError(f"sharing.setting must be {POOL}, got {quote(options.sharing.setting)}.")
    if options.evaluate.every != 1:
        raise UserError(
            f"evaluate.every must be 1, as the curves need the accuracy of each round, got {options.evaluate.every}."
        )
    if isinstance(options.target, str):
        raise UserError(f"target must be a test accuracy in (0, 1], got {quote(options.target)}.")
    grid.require_validation(options, "lrs", several=True)
    learning_rates.tuning_seeds(options)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the trials of the probe, and with ``--check`` the trials to the target, by C, alpha, p and seed.

    Labels: C, at (alpha), p, check (whether the trial belongs to ``--check``). The last trial of a federation (line),
    the probe without sharing, is the trial that chooses the learning rate.
    """
    base, seeds = grid.base(options), grid.values(options, "seeds", int)
    places = [*product(grid.values(options, "participations", float), grid.values(options, "alphas", float))]
    rates = grid.listed(options, "lrs", float) or (options.client.lr,)
    shares, probe = (grid.values(options, name, float) for name in ("p", "probe-p"))
    sweep.require_few(len(places) * len(seeds) * (2 + len(probe) + len(shares)))
    epochs = options.probe_epochs or max(1, options.generator.epochs // 5)
    short = {"federation.rounds": options.probe_rounds, "federation.stop": "never", "generator.epochs": epochs}
    at_end = {"measure.every": options.probe_rounds, "measure.smoothness": True}
    result = []
    for c, alpha in places:
        fields = {**base, "partition.alpha": alpha, "federation.participation": c, "client.lr": rates[0]}
        runs = [(p, True, {}) for p in (0.0, *shares)] if options.check else []
        runs += [(p, False, short) for p in (*probe, 0.0)]
        for (p, check, more), seed in product(runs, seeds):
            theory = at_end if not check and p == max(probe) and seed == seeds[0] else {}
            sharing = {"sharing.p": p} if p else {"sharing.setting": "real"}
            cell = grid.cell(options, {**fields, **more, **theory, **sharing, "seed": seed})
            result.append(
                Entry(cell, {"C": c, "at": alpha, "line": f"alpha {alpha:g}, C {c:g}", "p": p, "check": check})
            )
    tries = [(("client.lr", rate),) for rate in rates]
    return learning_rates.with_tuning(result, tries, learning_rates.tuning_seeds(options))


def render(results: Results) -> Report | None:
    from papers.fedssyn.advice import report  # matplotlib takes long to import

    return report(results)


advise = Study("advise", arguments, entries, render, learning_rates.play, plan=learning_rates.plan)

if __name__ == "__main__":
    parse.main(advise)
