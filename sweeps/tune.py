"""Sweep any fields of an experiment with Ray Tune; each generator is trained once for all trials that use it.

python sweeps/tune.py --space alpha=0.01,0.1 --space "lr=loguniform(0.01,0.1)" --seeds 0,1,2
python sweeps/tune.py --sharing shuffled_synthetic --space alpha=0.01,0.1 --space "p=uniform(0,0.5)" --samples 10
python sweeps/tune.py --config FILE.yaml --space "lr=loguniform(0.01,0.1)" --scheduler asha
python sweeps/tune.py --sharing shuffled_synthetic --space p=0.1,0.5 --metric zeta_hat_sq --search optuna
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fedcommons.cli import parse, search_space
from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import SHORT_NAMES, choose
from fedcommons.errors import UserError
from fedcommons.reports import metrics
from fedcommons.tune import grid, main, results, search, sweep
from papers.fedssyn import authors


def arguments(argv: Sequence[str]) -> parse.Options:
    chosen = ("preset", "small"), ("data.name", "digits"), ("generator.name", "ddpm")
    defaults = presets.preset(*(parse.early(argv, *option) for option in chosen))
    parser = parse.parser(__doc__, argv, defaults)
    parser.add_argument("--preset", type=str, default="small", help=", ".join(presets.PRESETS))
    parser.add_argument(
        "--space", action="append", type=str, default=[],
        help="NAME=V1,V2,... or NAME=uniform(LOW,HIGH), loguniform, randint; may stand several times; "
        f"NAME: a field or {', '.join(SHORT_NAMES)}",
    )  # fmt: skip
    parser.add_options((
        ("seeds", str | None, None, "seeds, separated by commas; every point runs with every seed"),
        ("samples", Annotated[int, "[1, 10000]"], 10,
         "random draws for each grid point; with optuna: number of points per environment"),
        ("search", Annotated[str, "random | optuna"], "random",
         "random: grids and random draws; optuna: points that depend on the results so far"),
        ("scheduler", Annotated[str, " | ".join(("fifo", *search.SCHEDULERS))], "fifo",
         f"fifo, or Ray Tune's {', '.join(search.SCHEDULERS)}, which stop the runs of low validation accuracy early"),
        ("metric", str, "validation_accuracy",
         "what is best: MB, epsilon, rounds_to_target, ..., a convergence parameter such as zeta_hat_sq, or its mean "
         "over rounds, zeta_hat_sq_mean"),
        ("mode", Annotated[str | None, "min | max"], None,
         "max or min; default: max for accuracies, min for losses, bytes, epsilons and convergence parameters; needed "
         "for user-defined metrics"),
        ("out", str, "runs/tune", "folder of the sweep"),
        ("resume", bool, False, "continue the sweep in that folder"),
    ))  # fmt: skip
    parse.add_shared(parser)
    options = parse.parse(parser, argv)
    options.mode = metrics.mode(options.metric, options.target) if options.mode is None else options.mode
    if not options.space:
        raise UserError("--space is missing: name at least one field to sweep, such as --space alpha=0.01,0.1.")
    if options.search == "optuna":
        if options.scheduler != "fifo":
            raise UserError("--search optuna needs --scheduler fifo: it learns from finished runs only.")
        search.require_optuna()
    options.base = sweep.tracked(parse.flat(options), Path(options.out))
    return options


def build_trials(points: Sequence[Mapping[str, Any]], options: parse.Options) -> list[sweep.Trial]:
    """Return the trials of these points (values of the swept fields), without duplicates."""
    set_by_user = {*options.asked, *points[0]}
    labels = {name: name.rpartition(".")[2] for name in points[0]}
    configs = [choose({**options.base, **point}, options.fields) for point in points]
    return grid.once(sweep.cell(authors.settled(options.preset, config, set_by_user), labels) for config in configs)


def cells(options: parse.Options) -> tuple[list[sweep.Trial], list[str]]:
    """Return the trials and the names of the swept fields."""
    swept = search.space(options)
    n = search_space.count(swept, options.samples)
    if options.search == "optuna":
        points = search_space.ends(swept)
    elif grid.print_count(options, n):
        points = search_space.points(swept, options.samples, options.seed, sweep.FEW)
    else:
        sweep.require_few(n)
        points = search_space.points(swept, options.samples, options.seed)
    trials = build_trials(points, options)
    metrics.require(options.metric, [c.config for c in trials])
    if options.scheduler != "fifo":
        search.require_rounds(
            options.scheduler, ((c.config.data.validation, c.rounds, c.config.evaluate.every) for c in trials)
        )
    return trials, list(swept)


def batches(options: parse.Options, out: Path) -> Iterator[list[sweep.Trial]]:
    """Yield batches of trials that run in parallel.

    By default a single batch has all trials. With a scheduler a batch has the trials with equal data, partition and
    other fields that must be equal for a comparison. With Optuna a batch has the points that Optuna proposes next.
    """
    fixed = search.around(search.space(options))
    seeds = fixed.pop("seed", [options.seed])
    if options.search == "optuna":
        searched = {n: values for n, values in search.space(options).items() if n not in (*fixed, "seed")}
        environments = search_space.points(fixed, 1, options.seed)
        searches = [(e, search.optuna_search(searched, options.mode, options.seed, str(e))) for e in environments]
        yield from search.proposed(
            searches, options.samples, lambda point: build_trials([{**point, "seed": seed} for seed in seeds], options),
            lambda cells: results.mean(cells, out, options.metric),
        )  # fmt: skip
        return
    groups: dict[str, list[sweep.Trial]] = {}
    for c in cells(options)[0]:
        fields = c.config.flat
        key = str([fields.get(name) for name in fixed]) if options.scheduler != "fifo" else ""
        groups.setdefault(key, []).append(c)
    yield from groups.values()


def tune(argv: Sequence[str]) -> int:
    options = arguments(argv)
    trials, fields = cells(options)
    around = {n: values for n, values in search.around(search.space(options)).items() if n != "seed"}
    if distributions := [n for n, values in around.items() if not isinstance(values, list)]:
        print(f"Each draw of {distributions[0]} has its own partition, so these points are not compared.")
    tried: list[sweep.Trial] = []

    def play(remaining: sweep.Todo, out: Path, display: Display) -> sweep.Outcome:
        outcomes = []
        for batch in batches(options, out):
            work = remaining if batch == trials else sweep.todo(batch, out, display)
            todo, scheduler = replace(work, limits=remaining.limits), search.scheduler_of(options.scheduler, batch)
            outcomes.append(sweep.run_cells(todo, out, display, scheduler=scheduler))
            tried.extend(batch)
        return sweep.together(outcomes)

    def report(out: Path, display: Display) -> None:
        results.report(grid.once(tried), fields, options, out, display)

    code = main.run(options, "tune", trials, report, play=play)
    if options.dry_run and options.search == "optuna":
        print(f"These are the ends of the space; {options.samples} points follow from the results.")
    return code


if __name__ == "__main__":
    parse.main(tune)
