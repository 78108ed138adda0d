"""At which size of data does a useful private pool begin? One generator of n images, judged by what its images teach.

python sweeps/private_sizes.py                 # digits, a quarter of an hour on a laptop
python sweeps/private_sizes.py --preset smoke  # the same code with smaller numbers
python sweeps/private_sizes.py --dataset mnist --data-dir DIR --sizes 1000,6000 --generator.channels [8,16,16]
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.config import cli, parts, presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose
from fedcommons.errors import UserError
from papers.fedssyn import private_presets
from papers.fedssyn.sizes_report import report

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from collections.abc import Callable

    from fedcommons.data.examples import Dataset, Examples
    from fedcommons.sharing.stage import Contribution
    from fedcommons.sharing.synthetic_pool import Job

TAKEN = {"data.limit": "sizes", "generator.target_epsilon": "epsilons", "seed": "seeds"}
"""Fields that an option sets."""


def arguments(argv: Sequence[str]) -> cli.Options:
    """Options on top of every field of the experiment."""
    preset, dataset = cli.early(argv, "preset", "small"), cli.early(argv, "data.name", "digits")
    if preset not in private_presets.PRIVATE:
        raise UserError(f"--preset must be one of {', '.join(private_presets.PRIVATE)}, got {preset}.")
    one = {"sharing.setting": "shuffled_synthetic", "partition.name": "iid", "partition.n_clients": 1,
           "data.validation": 0.0, "generator.target_epsilon": 10.0}  # fmt: skip
    fields = {**presets.preset(preset, dataset), **private_presets.fields(preset), **one}
    parser = cli.parser((__doc__ or "").partition("\n")[0], argv, fields)
    few = preset == "smoke"
    for name, kind, default, text in (
        ("preset", str, "small", ", ".join(private_presets.PRIVATE)),
        ("sizes", str, "40,80" if few else "129,322,645,1290", "numbers of images n, separated by commas"),
        ("epsilons", str, "10", "target epsilons, separated by commas"),
        ("seeds", str, "0" if few else "0,1,2", "seeds of the generators; the images that they see are the same"),
        ("out", str, f"runs/private_sizes-{preset}-{parts.label(dataset)}", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and how long, and stop")
    parser.hide(TAKEN)
    options = cli.parse(parser, argv)
    cli.refuse_fields(options, TAKEN)
    if options["generator.name"] != "private_ddpm":
        raise UserError(f"generator.name must be private_ddpm here, got {options['generator.name']}.")
    return options


def configs(options: cli.Options, n: int, seed: int) -> "dict[str, Experiment]":
    """The plain generator of n images, and a private one for each epsilon."""
    at = {**cli.flat(options), "data.limit": n, "seed": seed}
    found = {"plain": choose({**at, **private_presets.plain(options.preset, at["data.name"])}, options.fields)}
    for epsilon in cli.split("--epsilons", options.epsilons, float):
        found[f"epsilon {epsilon:g}"] = choose({**at, "generator.target_epsilon": epsilon}, options.fields)
    return found


def jobs(options: cli.Options) -> "list[Job]":
    """The trainings that are not in the store yet."""
    from fedcommons.artifacts import Store
    from fedcommons.runs.build import prepare
    from fedcommons.sharing.synthetic_pool import missing

    sizes, seeds = (cli.split(f"--{name}", options[name], int) for name in ("sizes", "seeds"))
    every = [config for n in sizes for seed in seeds for config in configs(options, n, seed).values()]
    store = Store(Path(every[0].artifacts))
    return missing(store, [need for config in every for need in prepare(config).needs])


def made(config: Experiment, say: "Callable[[str], None]") -> "tuple[Contribution, Dataset]":
    """The images of a generator, from the store if they are there, and the data."""
    from fedcommons.artifacts import Store
    from fedcommons.runs.build import prepare, synthetic_images
    from fedcommons.sharing.synthetic_pool import missing

    prepared, store = prepare(config), Store(Path(config.artifacts), say)
    (found,) = synthetic_images(prepared, store, missing(store, prepared.needs), lambda _: None)
    return found, prepared.dataset


def taught(examples: "Examples", test: "Examples") -> float:
    """Accuracy, in [0, 1], on test images of a logistic regression on pixels that these examples have trained."""
    from sklearn.linear_model import LogisticRegression

    pixels, tested = ((e.x.flatten(1) / 255).numpy() for e in (examples, test))
    found = LogisticRegression(max_iter=1000).fit(pixels, examples.y.numpy())
    return float(found.score(tested, test.y.numpy()))


def study(options: cli.Options, say: "Callable[[str], None]") -> list[dict[str, Any]]:
    """A record for each size and pool: accuracies by seed, and the noise multiplier."""
    from fedcommons.core.worker import fresh_torch

    sizes, seeds = (cli.split(f"--{name}", options[name], int) for name in ("sizes", "seeds"))
    records = []
    for n in sizes:
        found: dict[str, dict[str, Any]] = {}
        for seed in seeds:
            for pool, config in configs(options, n, seed).items():
                with fresh_torch():
                    images, data = made(config, say)
                real = found.setdefault("real images", {"n": n, "pool": "real images", "sigma": None, "accuracy": []})
                if pool == "plain":
                    real["accuracy"].append(taught(data.train, data.test))
                sigma = images.receipt.sigma if images.receipt and images.receipt.sigma else None
                one = found.setdefault(pool, {"n": n, "pool": pool, "sigma": sigma, "accuracy": []})
                one["accuracy"].append(taught(images.examples, data.test))
                say(f"{n} images, {pool}, seed {seed}: {100 * one['accuracy'][-1]:.1f} % of test images are right")
        records += found.values()
    return records


def private_sizes(argv: Sequence[str]) -> int:
    started, options = time.perf_counter(), arguments(argv)
    print("Loading torch and the data ...", flush=True)
    from fedcommons.sweeping import folders, planned

    def say(text: str) -> None:
        print(text, flush=True)

    left = jobs(options)  # refuses what cannot be, before any work
    if options.dry_run:
        say(f"{len(left)} generators to make, in about {planned.duration(planned.generators(left))} here on one core.")
        return 0
    with folders.open_folder(Path(options.out)):
        say("\n" + report(study(options, say), options, Path(options.out)))
    print(f"Time: {time.perf_counter() - started:.0f} s. All in {options.out}; generators in the store are kept.")
    return 0


if __name__ == "__main__":
    cli.main(private_sizes)
