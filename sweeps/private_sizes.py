"""How many images n per client does a useful private pool need, judged by classifiers trained on the pool's images?

python sweeps/private_sizes.py                 # digits, a quarter of an hour on a laptop
python sweeps/private_sizes.py --preset smoke  # the same code with smaller numbers
python sweeps/private_sizes.py --ways merf,ndpdc --epsilons 1,10    # images fitted to noisy sums
python sweeps/private_sizes.py --dataset mnist --data-dir DIR --sizes 1000,6000 --generator.channels [8,16,16]
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from fedcommons.cli import parse
from fedcommons.cli.display import Display, duration
from fedcommons.config import presets, registry
from fedcommons.errors import UserError
from fedcommons.tune import grid
from papers.fedssyn import private_presets
from papers.fedssyn.sizes_report import report

OPTIONS = {"data.limit": "sizes", "generator.target_epsilon": "epsilons", "seed": "seeds"}
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""

WAYS = ("plain", "private", "merf", "ndpdc")
"""Sources of images: generators without and with differential privacy, and strategies that fit images to noisy sums."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, private_presets.PRIVATE, large="digits")
    client_fields = {"sharing.setting": "shuffled_synthetic", "partition.name": "iid", "partition.n_clients": 1,
           "data.validation": 0.0, "generator.target_epsilon": 10.0}  # fmt: skip
    fields = {**presets.preset(preset, dataset), **private_presets.fields(preset), **client_fields}
    parser = parse.parser(__doc__, argv, fields)
    few = preset == "smoke"
    parser.add_options((
        ("preset", str, "small", ", ".join(private_presets.PRIVATE)),
        ("sizes", str, "40,80" if few else "129,322,645,1290", "numbers of images n, separated by commas"),
        ("clients", Annotated[int, "[1, 1000]"], 10,
         "number of clients of n images each whose noisy sums are also added up"),
        ("ways", str, ",".join(WAYS), "pools to compare with the real images, separated by commas"),
        ("epsilons", str, "10", "target epsilons, separated by commas"),
        ("seeds", str, "0" if few else "0,1,2", "seeds of the generators; the images that they see are the same"),
        ("out", str, f"runs/private_sizes-{preset}-{registry.label(dataset)}", "folder of the results"),
        ("dry-run", bool, False, "say what would be trained, and how long, and stop"),
    ))  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, OPTIONS)
    if "generator.name" not in options:
        setting = options.sharing.setting
        raise UserError(f"sharing.setting must be one with generators, such as shuffled_synthetic, got {setting}.")
    if options["generator.name"] != "private_ddpm":
        raise UserError(f"generator.name must be private_ddpm here, got {options['generator.name']}.")
    fields = [options.fields[name] for name in OPTIONS]
    options.lists = {
        o: grid.values(options, o, f.kinds[0], f.allowed) for o, f in zip(OPTIONS.values(), fields, strict=True)
    }
    options.ways = grid.values(options, "ways", str, " | ".join(WAYS))
    return options


def private_sizes(argv: Sequence[str]) -> int:
    options = arguments(argv)
    with Display() as display:
        display.load_libraries()
        from fedcommons.tune import dry_run, sweep_folder
        from papers.fedssyn.sizes import jobs, of_sums, seconds, study

        todo, pools = jobs(options), sum(1 for _ in of_sums(options))  # raises for impossible requests before any work
        if options.dry_run:
            needed = duration(dry_run.generators(todo) + seconds(of_sums(options)))
            what = f"{len(todo)} generators to train, {pools} pools to fit to noisy sums"
            display.say(f"{what}, in about {needed} here on one core.")
            return 0
        with sweep_folder.open_folder(out := Path(options.out)):
            text = ""
            for results in study(options, display.say, partial(display.step, ends=False)):
                text = report(results, options, out)  # after each size, so that an interrupted study keeps its results
            display.say("\n" + text)
        display.say(f"Time: {options.elapsed():.0f} s. All in {options.out}; generators in the store are kept.")
    return 0


if __name__ == "__main__":
    parse.main(private_sizes, resumes=False)
