"""Adaptive hyperparameter search: schedulers stop runs early, and Optuna proposes points (values of the swept fields).

Optuna proposes points from the results so far, in batches of a fixed size. Its random draws are keyed by the seed, and
proposals and results follow a fixed order. So equal results give equal proposals. A resumed sweep repeats the search
from the beginning: finished runs return their results at once, and the search continues after them.

"Environment" means the fields that describe the problem, such as data and partition. Only points of the same
environment are compared.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from fedcommons.cli import parse, search_space
from fedcommons.cli.search_space import SearchSpace
from fedcommons.cli.values import split
from fedcommons.config.fields import select_arguments
from fedcommons.errors import UserError
from fedcommons.reports.cells import ENVIRONMENT
from fedcommons.seeding import seed_for
from fedcommons.tune.sweep import Trial

if TYPE_CHECKING:  # Ray takes seconds to import, and --help needs none
    from ray.tune.search.optuna import OptunaSearch

BATCH = 4
"""Number of points that are proposed at a time. It is a constant, as it affects which points are proposed."""


SCHEDULERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "asha": ("ASHAScheduler", {}),
    "hyperband": ("AsyncHyperBandScheduler", {"brackets": 3}),
    "median": ("MedianStoppingRule", {}),
}
"""Name -> class in ``ray.tune.schedulers``, and constants. No scheduler pauses trials or changes configs."""


def scheduler_of(name: str, cells: Sequence[Trial]) -> Any:
    """Return Ray Tune's scheduler, which stops the trials with the lowest validation accuracies; None for ``fifo``."""
    if name == "fifo":
        return None
    from ray.tune import schedulers

    rounds = max(c.rounds for c in cells)
    place, constants = SCHEDULERS[name]
    kind, grace = getattr(schedulers, place), max(1, rounds // 5)
    usual = {"max_t": rounds, "grace_period": grace, "reduction_factor": 3, "stop_last_trials": False, **constants}
    return kind(time_attr="round", metric="validation/accuracy", mode="max", **select_arguments(kind, usual))


def require_rounds(name: str, trials: Iterable[tuple[float, int, int]]) -> None:
    """Check that a scheduler has validation accuracies by which it can stop a trial before the trial's last round.

    trials: share of validation data, number of rounds, and rounds between two evaluations, of each trial.

    Raises:
        UserError: there are no validation data, or no evaluation before the last round.
    """
    for validation, rounds, every in trials:
        if validation <= 0:
            raise UserError(f"--scheduler {name} stops runs by validation accuracy: --data.validation must be above 0.")
        if rounds <= every:
            raise UserError(
                f"--scheduler {name} stops runs between evaluations: federation.rounds must be above evaluate.every "
                f"({every}), got {rounds}."
            )


def require_optuna() -> None:
    """Check that Optuna, an optional package, is installed.

    Raises:
        UserError: Optuna is not installed.
    """
    if find_spec("optuna") is None:
        raise UserError("--search optuna needs the package optuna: pip install 'fedcommons[search]'.")


def optuna_search(space: SearchSpace, way: str, seed: int, environment: str) -> "OptunaSearch":
    """Return a search over a space, with points proposed by Optuna's tree-structured Parzen estimator.

    way: ``min`` or ``max``, the better direction of a point's value. Random draws are keyed by ``seed`` and
    ``environment``, the text of the fields that describe the problem, such as data and partition.

    Reference: Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011.
    """
    import optuna  # pyright: ignore[reportMissingImports]  (an optional package)
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keyed = seed_for(seed, environment) % 2**32  # numpy accepts no larger seed
    domains = {n: tune.choice(domain) if isinstance(domain, list) else domain for n, domain in space.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns about its experimental features
        ray_space = OptunaSearch.convert_search_space(domains)
        return OptunaSearch(ray_space, metric="value", mode=way, seed=keyed)


def proposed(
    searches: Sequence[tuple[Mapping[str, Any], "OptunaSearch"]],
    samples: int,
    make: Callable[[Mapping[str, Any]], Sequence[Trial]],
    value: Callable[[Sequence[Trial]], float | None],
) -> Iterator[list[Trial]]:
    """Yield batches of trials, for ``samples`` points per environment; the caller must run each batch before the next.

    searches: (fields of an environment, search in this environment). make: returns the trials of a point, one per seed.
    value: returns a point's value from its trials; None if there is no value, for example after a failed run.
    """
    for first in range(0, samples, BATCH):
        batch = [
            (search, str(number), make({**environment, **cast(dict, search.suggest(str(number)))}))
            for environment, search in searches
            for number in range(first, min(first + BATCH, samples))
        ]
        yield list({c.name: c for *_, cells in batch for c in cells}.values())  # a point may be proposed twice
        for search, number, cells in batch:
            # A point without a value counts as pruned, which Optuna takes into account; it would ignore a failed one.
            search.on_trial_complete(number, None if (result := value(cells)) is None else {"value": result})


def space(options: parse.Options) -> dict[str, Any]:
    """Return the fields that ``--space`` and ``--seeds`` sweep, with their values or distributions.

    Raises:
        UserError: a field cannot be swept.
    """
    swept = dict(search_space.read_space(options.space, options.fields, options.chosen))
    parse.refuse_fields(options, dict.fromkeys(swept, "space"))
    if options.seeds is not None:
        if "seed" in swept:
            raise UserError("--seeds and --space seed both name the seeds; use one of them.")
        parse.refuse_fields(options, {"seed": "seeds"})
        swept = {**swept, "seed": list(split("--seeds", options.seeds, int))}
    if not options.dp.local and any(n.startswith("dp.") and not n.startswith("dp.central") for n in swept):
        raise UserError("sigma and the other dp fields change nothing without --dp.local true.")
    sampled = [n for n, values in around(swept).items() if not isinstance(values, list)]
    if sampled and (options.search == "optuna" or options.scheduler != "fifo"):
        way = "--search optuna" if options.search == "optuna" else f"--scheduler {options.scheduler}"
        raise UserError(f"--space {sampled[0]} needs a list of values with {way}, not a distribution.")
    return swept


def around(space: SearchSpace) -> dict[str, Any]:
    """Return the swept fields that describe the problem (environment), including the seed, with their values."""
    return {n: values for n, values in space.items() if n == "seed" or n.startswith(ENVIRONMENT)}
