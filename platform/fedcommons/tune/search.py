"""Searches that look at results: ASHA, which stops runs, and Optuna, both through Ray Tune.

Optuna proposes points from the results so far, in batches of a fixed size. It is keyed, asked and told in
a fixed order, so the same results give the same points. A sweep that is resumed asks again from the beginning: points
whose runs are finished are told at once, and the search goes on behind them.

``space``: what ``--space`` and ``--seeds`` vary.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from fedcommons.cli import parse, search_space
from fedcommons.cli.search_space import SearchSpace
from fedcommons.errors import UserError
from fedcommons.reports.cells import ENVIRONMENT
from fedcommons.seeding import seed_for
from fedcommons.tune.sweep import Trial

BATCH = 4
"""Points that are proposed before any of them is known; a constant, as it decides which points are tried."""


def asha(cells: Sequence[Trial]) -> Any:
    """A scheduler for these cells: asynchronous successive halving on the validation accuracy of each round."""
    from ray.tune.schedulers import ASHAScheduler

    rounds = max(c.config.federation.rounds for c in cells)
    return ASHAScheduler(
        time_attr="round", metric="validation/accuracy", mode="max", max_t=rounds, grace_period=max(1, rounds // 5),
        reduction_factor=3, stop_last_trials=False,
    )  # fmt: skip


def require_optuna() -> None:
    """See that Optuna is there, which is no dependency of ours.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("optuna") is None:
        raise UserError("--search optuna needs the package optuna, which is not installed: pip install optuna")


class Optuna:
    """Points of a space, proposed by Optuna's tree-structured Parzen estimator.

    way: ``min`` or ``max``. Draws are keyed by seed and environment.

    Bergstra et al., "Algorithms for hyper-parameter optimization", NeurIPS 2011.
    """

    def __init__(self, space: SearchSpace, way: str, seed: int, environment: str) -> None:
        import optuna  # pyright: ignore[reportMissingImports]  (no dependency of ours)
        from ray import tune
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        keyed = seed_for(seed, environment) % 2**32  # numpy takes no more
        domains = {n: tune.choice(one) if isinstance(one, list) else one for n, one in space.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna's, about its own features
            found = OptunaSearch.convert_search_space(domains)
            self._search = OptunaSearch(found, metric="value", mode=way, seed=keyed)

    def ask(self, number: int) -> dict[str, Any]:
        """The point of this number, counted from 0."""
        point = self._search.suggest(str(number))
        assert point is not None
        return point

    def tell(self, number: int, value: float | None) -> None:
        """What came of it; None, as where a run failed: worse than every value."""
        # without a result the trial counts as pruned, from which Optuna learns; one that failed it would forget
        self._search.on_trial_complete(str(number), None if value is None else {"value": value})


def proposed(
    searches: Sequence[tuple[Mapping[str, Any], Optuna]],
    samples: int,
    make: Callable[[Mapping[str, Any]], Sequence[Trial]],
    value: Callable[[Sequence[Trial]], float | None],
) -> Iterator[list[Trial]]:
    """Batches of cells to run, of ``samples`` points in each environment; each batch is to be run before the next.

    searches: an environment's fields and its own search. make: the cells of a point. value: what came of them.
    """
    for first in range(0, samples, BATCH):
        asked = [
            (search, number, make({**environment, **search.ask(number)}))
            for environment, search in searches
            for number in range(first, min(first + BATCH, samples))
        ]
        yield list({c.name: c for *_, cells in asked for c in cells}.values())  # a point may be proposed twice
        for search, number, cells in asked:
            search.tell(number, value(cells))


def space(options: parse.Options) -> dict[str, Any]:
    """What is swept, seeds included.

    Raises:
        UserError: a field that cannot be swept.
    """
    found = dict(search_space.read_space(options.space, options.fields, options.chosen))
    parse.refuse_fields(options, dict.fromkeys(found, "space"))
    if options.seeds is not None:
        if "seed" in found:
            raise UserError("--seeds and --space seed both name the seeds; use one of them.")
        parse.refuse_fields(options, {"seed": "seeds"})
        found = {**found, "seed": list(parse.split("--seeds", options.seeds, int))}
    if not options.dp.local and any(name.startswith("dp.") for name in found):
        raise UserError("sigma and the other dp fields change nothing without --dp.local true.")
    drawn = [n for n, values in around(found).items() if not isinstance(values, list)]
    if drawn and (options.search == "optuna" or options.scheduler == "asha"):
        way = "--search optuna" if options.search == "optuna" else "--scheduler asha"
        raise UserError(f"--space {drawn[0]} needs a list of values with {way}, which compares like with like.")
    return found


def around(space: search_space.SearchSpace) -> dict[str, Any]:
    """Those of the space that describe the environment, seeds included: points are not compared across them."""
    return {n: values for n, values in space.items() if n == "seed" or n.startswith(ENVIRONMENT)}
