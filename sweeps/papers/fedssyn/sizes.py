"""What a private pool of n images a client teaches: the trainings of a study over n, and its records.

Pools: of one generator that saw n images; of noisy sums of n images (FedMERF, NDPDC), and of such of N clients.
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
from fedcommons.runs import load_data
from fedcommons.runs.build import OnStep, Prepared, contribute, prepare, synthetic_images
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import cost
from fedcommons.tune.sweep import require_few
from papers.fedssyn import private_presets


def configs(options: parse.Options, n: int, seed: int) -> dict[str, Experiment]:
    """The plain generator of n images, and a private one for each epsilon."""
    at = {**parse.flat(options), "data.limit": n, "seed": seed}
    found = {}
    if "plain" in options.ways:
        found["plain"] = choose({**at, **private_presets.plain(options.preset, at["data.name"])}, options.fields)
    for epsilon in parse.split("--epsilons", options.epsilons, float) if "private" in options.ways else ():
        found[f"epsilon {epsilon:g}"] = choose({**at, "generator.target_epsilon": epsilon}, options.fields)
    return found


def released(options: parse.Options, n: int, seed: int) -> dict[str, Experiment]:
    """Noisy sums of one client with n images, and of ``--clients`` of them; those of FedMERF with summed noise, too."""
    flat = {name: value for name, value in parse.flat(options).items() if name.partition(".")[0] not in _NOT_OF_SUMS}
    found = {}
    chosen = [way for way in options.ways if way in private_presets.OF_SUMS]
    for epsilon, way in product(parse.split("--epsilons", options.epsilons, float), chosen):
        name, levels = private_presets.OF_SUMS[way], private_presets.of_sums(way, options.preset, epsilon)
        pools = {"alone": (1, levels["local"])}
        if (many := options.clients) > 1:
            pools |= {f"{many} clients, {noise}": (many, level) for noise, level in levels.items()}
        for of, (clients, level) in pools.items():
            at = {"data.limit": clients * n, "seed": seed, "partition.n_clients": clients}
            found[f"{name} {of}, epsilon {epsilon:g}"] = choose({**flat, **level, **at}, options.fields)
    return found


_NOT_OF_SUMS = ("generator", "sharing")


def jobs(options: parse.Options) -> list[Job]:
    """The trainings that are not in the store yet.

    Raises:
        UserError: a generator that cannot be met, or not one that draws images.
    """
    sizes, seeds = (parse.split(f"--{name}", options[name], int) for name in ("sizes", "seeds"))
    require_few(len(sizes) * len(seeds) * len(options.epsilons.split(",")))
    every = [config for n in sizes for seed in seeds for config in configs(options, n, seed).values()]
    of_each = [prepare(config).needs for config in every]
    if any([need.n > 0 for need in needs] != [True] for needs in of_each):
        raise UserError("a study of sizes has one generator: partition.n_clients must be 1, and sharing.p above 0.")
    store = Store(Path(options["artifacts"]), storage=options["storage"])
    return missing(store, [need for needs in of_each for need in needs])


def of_sums(options: parse.Options) -> Iterator[Prepared]:
    """The pools of noisy sums, checked: noise for a target is solved for.

    Raises:
        UserError: one cannot be met.
    """
    sizes, seeds = (parse.split(f"--{name}", options[name], int) for name in ("sizes", "seeds"))
    every = (config for n in sizes for seed in seeds for config in released(options, n, seed).values())
    return (ready for config in every if (ready := enough(config)))


def enough(config: Experiment) -> Prepared | None:
    """It, prepared; None where there are not as many real images."""
    if len(load_data.load(replace(config.data, limit=None)).train) < (config.data.limit or 0):
        return None
    return prepare(config)


def seconds(pools: Iterable[Prepared]) -> float:
    """Of fitting these, one after another; of those that differ in the seed one is timed, by a part of its steps."""
    prices: dict[str, float] = {}
    found = 0.0
    for ready in pools:
        shape = str({**ready.config.flat, "seed": None})
        if shape not in prices:
            prices[shape] = cost.contribute(ready, ())[1]
        found += prices[shape]
    return found


def made(
    config: Experiment, say: Callable[[str], None], on_step: OnStep | None
) -> tuple[Examples, float | None, Dataset]:
    """The images of a generator, from the store if they are there, its noise multiplier, and the data."""
    prepared, store = prepare(config), Store(Path(config.artifacts), say, config.storage)
    (found,) = synthetic_images(prepared, store, missing(store, prepared.needs), lambda _: None, on_step)
    sigma = found.receipt.sigma if found.receipt and found.receipt.sigma else None
    return found.examples, sigma, prepared.dataset


def fitted(config: Experiment) -> tuple[Examples, float | None, Dataset] | None:
    """As ``made``, of images that are fitted to all clients' releases; None where there are not as many real images."""
    set_up_process()
    if (prepared := enough(config)) is None:
        return None
    pool = contribute(prepared.stage, prepared.dealt, ())
    event = prepared.stage.release(prepared.dealt, pool)[1][0]
    return pool.store[slice(len(prepared.train), None)], event.sigma, prepared.dataset


def taught(examples: Examples, test: Examples) -> float:
    """Accuracy, in [0, 1], on test images of a logistic regression on pixels that these examples have trained.

    It is trained until its gradient is below 1e-8: of few noisy images a regression whose loss is two thousandths above
    the least can be four points of accuracy away, and which one it is depends on the number of threads.
    """
    from sklearn.linear_model import LogisticRegression

    pixels, tested = ((e.x.flatten(1) / 255).double().numpy() for e in (examples, test))
    found = LogisticRegression(tol=1e-8, max_iter=100_000).fit(pixels, examples.y.numpy())
    return float(found.score(tested, test.y.numpy()))


def study(
    options: parse.Options, say: Callable[[str], None], on_step: OnStep | None = None
) -> Iterator[list[dict[str, Any]]]:
    """A record for each size and pool, with accuracies by seed and the noise multiplier: after each size all so far."""
    sizes, seeds = (parse.split(f"--{name}", options[name], int) for name in ("sizes", "seeds"))
    records = []
    for n in sizes:
        found: dict[str, dict[str, Any]] = {}
        for place, seed in enumerate(seeds):
            of_each = configs(options, n, seed)
            for pool, config in {**of_each, **released(options, n, seed)}.items():
                with fresh_torch():
                    drawn = made(config, say, on_step) if pool in of_each else fitted(config)
                if drawn is None:
                    continue
                images, sigma, data = drawn
                real = found.setdefault("real images", {"n": n, "pool": "real images", "sigma": None, "accuracy": []})
                if len(real["accuracy"]) == place:  # the first pool is of one client, so its data are these n images
                    again = real["accuracy"][:1]  # they are the same for each seed
                    real["accuracy"] += again or [taught(data.train, data.test)]
                one = found.setdefault(pool, {"n": n, "pool": pool, "sigma": sigma, "accuracy": []})
                one["accuracy"].append(taught(images, data.test))
                say(f"{n} images, {pool}, seed {seed}: {100 * one['accuracy'][-1]:.1f} % of test images are right")
        records += found.values()
        yield records
