"""The study of private pools of synthetic images: accuracy over the number n of real images per client.

A pool comes from one generator trained on n images, from noisy sums of one client with n images (FedMERF, NDPDC), or
from the noisy sums of several clients with n images each.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch, set_up_process
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError
from fedcommons.generators.image_cache import Job, missing
from fedcommons.runs.assemble import OnStep, synthetic_images
from fedcommons.runs.build import build, load
from fedcommons.runs.spec import RunSpec
from fedcommons.sharing.exchange import contribute
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cost
from fedcommons.tune.sweep import require_few
from papers.fedssyn import private_presets

COLUMNS = ("n", "pool", "noise_multiplier", "seed", "accuracy")


def configs(options: parse.Options, n: int, seed: int) -> dict[str, Experiment]:
    """Return the experiments with generators of n images: one without privacy, and one for each target epsilon."""
    at = {**parse.flat(options), "data.limit": n, "seed": seed}
    result = {}
    if "plain" in options.ways:
        result["plain"] = choose({**at, **private_presets.plain(options.preset, at["data.name"])}, options.fields)
    for epsilon in options.lists["epsilons"] if "private" in options.ways else ():
        result[f"epsilon {epsilon:g}"] = choose({**at, "generator.target_epsilon": epsilon}, options.fields)
    return result


def released(options: parse.Options, n: int, seed: int) -> dict[str, Experiment]:
    """Return the experiments with noisy sums, by name: one or ``--clients`` clients, each with n images."""
    flat = {name: value for name, value in parse.flat(options).items() if name.partition(".")[0] not in _NOT_OF_SUMS}
    result = {}
    chosen = [way for way in options.ways if way in private_presets.OF_SUMS]
    for epsilon, way in product(options.lists["epsilons"], chosen):
        name, levels = private_presets.OF_SUMS[way], private_presets.of_sums(way, options.preset, epsilon)
        pools = {"alone": (1, levels["local"])}
        if (many := options.clients) > 1:
            pools |= {f"{many} clients, {noise}": (many, level) for noise, level in levels.items()}
        for sender, (clients, level) in pools.items():
            at = {"data.limit": clients * n, "seed": seed, "partition.n_clients": clients}
            result[f"{name} {sender}, epsilon {epsilon:g}"] = choose({**flat, **level, **at}, options.fields)
    return result


_NOT_OF_SUMS = ("generator", "sharing")


def jobs(options: parse.Options) -> list[Job]:
    """Return the trainings of generators whose results are not in the store."""
    sizes, seeds = options.lists["sizes"], options.lists["seeds"]
    require_few(len(sizes) * len(seeds) * len(options.lists["epsilons"]))
    every = [config for n in sizes for seed in seeds for config in configs(options, n, seed).values()]
    of_each = [build(config).requests for config in every]
    if any([need.n > 0 for need in needs] != [True] for needs in of_each):
        raise UserError(
            "this study trains one generator at a time: partition.n_clients must be 1, and sharing.p above 0."
        )
    store = Store(Path(options["artifacts"]), storage=options["storage"])
    return missing(store, [need for needs in of_each for need in needs])


def of_sums(options: parse.Options) -> Iterator[RunSpec]:
    """Yield the prepared experiments with noisy sums; the preparation finds the noise that gives the target epsilon."""
    sizes, seeds = options.lists["sizes"], options.lists["seeds"]
    every = (config for n in sizes for seed in seeds for config in released(options, n, seed).values())
    return (ready for config in every if (ready := enough(config)))


def enough(config: Experiment) -> RunSpec | None:
    """Return the prepared experiment; None if the data set has fewer training images than ``data.limit``."""
    if len(load(replace(config.data, limit=None)).train) < (config.data.limit or 0):
        return None
    return build(config)


def seconds(pools: Iterable[RunSpec]) -> float:
    """Return the seconds of fitting these pools in sequence; pools that differ only in the seed are timed once."""
    prices: dict[str, float] = {}
    total = 0.0
    for ready in pools:
        shape = str({**ready.record.flat, "seed": None})
        if shape not in prices:
            prices[shape] = cost.contribute(ready, ())[1]
        total += prices[shape]
    return total


def fitted_images(
    config: Experiment, say: Callable[[str], None], on_step: OnStep | None
) -> tuple[Examples, float | None, Dataset]:
    """Return the images of a generator (from the store if stored), its noise multiplier or None, and the data set."""
    prepared, store = build(config), Store(Path(config.artifacts), say, config.storage)
    (contribution,) = synthetic_images(prepared, store, missing(store, prepared.requests), lambda _: None, on_step)
    sigma = contribution.receipt.sigma if contribution.receipt and contribution.receipt.sigma else None
    return contribution.examples, sigma, prepared.dataset


def fitted(config: Experiment) -> tuple[Examples, float | None, Dataset] | None:
    """Return images fitted to clients' noisy sums, noise multiplier and data set; None: the data set is too small."""
    set_up_process()
    if (prepared := enough(config)) is None:
        return None
    pool = contribute(prepared.stage, prepared.client_data, ())
    event = prepared.stage.release(prepared.client_data, pool)[1][0]
    return pool.store[slice(len(prepared.train), None)], event.sigma, prepared.dataset


def taught(examples: Examples, test: Examples) -> float:
    """Train a logistic regression on the pixels of ``examples`` and return its accuracy on ``test``, in [0, 1].

    The training stops when the gradient is below 1e-8. With few noisy images, a loss two thousandths above the minimum
    can change the accuracy by four points. With an earlier stop, the accuracy would depend on the number of threads.
    """
    from sklearn.linear_model import LogisticRegression

    pixels, tested = ((e.x.flatten(1) / 255).double().numpy() for e in (examples, test))
    model = LogisticRegression(tol=1e-8, max_iter=100_000).fit(pixels, examples.y.numpy())
    return float(model.score(tested, test.y.numpy()))


def study(
    options: parse.Options, say: Callable[[str], None], on_step: OnStep | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows (``COLUMNS``) after each n: the accuracy of each pool with each seed, and of the real images."""
    rows = []
    for n in options.lists["sizes"]:
        of_size: list[tuple[str, float | None, int, float]] = []
        for seed in options.lists["seeds"]:
            of_each = configs(options, n, seed)
            for pool, config in {**of_each, **released(options, n, seed)}.items():
                with fresh_torch():
                    generated = fitted_images(config, say, on_step) if pool in of_each else fitted(config)
                if generated is None:
                    continue
                images, sigma, data = generated
                if seed not in (row[2] for row in of_size):  # true only for the first pool of a seed
                    # all seeds have the same n real images, so one training suffices
                    real = of_size[0][3] if of_size else taught(data.train, data.test)
                    of_size.append(("real images", None, seed, real))
                of_size.append((pool, sigma, seed, accuracy := taught(images, data.test)))
                say(f"{n} images, {pool}, seed {seed}: {100 * accuracy:.1f} % of test images are right")
        pools = list(dict.fromkeys(pool for pool, *_ in of_size))
        of_size.sort(key=lambda row: pools.index(row[0]))
        rows += [dict(zip(COLUMNS, (n, *row), strict=True)) for row in of_size]
        yield rows
