"""Quality of synthetic images against real images, without downloads: by generator, training size and epoch.

python sweeps/quality.py                                      # digits, some minutes on a laptop
python sweeps/quality.py --preset smoke                       # the same code with smaller numbers
python sweeps/quality.py --config runs/mine/config.yaml       # the pool of a run
python sweeps/quality.py --checkpoints 0.1,0.3,1 --rhos 0.1,1 --generators ddpm,gan,cvae --seeds 0,1,2
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets, registry
from fedcommons.config.dotted import choose, generates
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.tune import grid, sweep

OF_FIELDS = {"seeds": "seed", "generators": "generator.name", "rhos": "generator.rho"}
"""Options that list values of a field; by default, the list holds only the field's value."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, large="digits")
    fields = presets.preset(preset, dataset, parse.early(argv, "generator.name", "ddpm"))
    parser = parse.parser(__doc__, argv, {**fields, "sharing.setting": "shuffled_synthetic"})
    parser.add_options((
        ("preset", str, "small", ", ".join(presets.PRESETS)),
        ("seeds", str, "", "seeds, separated by commas (default: seed)"),
        ("generators", str, "", "generators, separated by commas (default: generator.name)"),
        ("rhos", str, "", "shares of a client's images that its generator sees, nested (default: generator.rho)"),
        ("checkpoints", str, "1", "shares of generator.epochs after which images are drawn"),
        ("neighbours", Annotated[int, "[1, 1000]"], 5, "k of precision, recall, density and coverage"),
        ("images", Annotated[int, "[10, 1e6]"], 5000, "largest number of images of each kind"),
        ("epochs", Annotated[int, "[1, 1e6]"], 20, "epochs of the two classifiers"),
        ("out", str, f"runs/quality-{preset}-{registry.label(dataset)}", "folder of the results"),
        ("dry-run", bool, False, "say what would be trained, and stop"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    options.config = parse.experiment(options)
    if not generates(options.config.sharing.setting):
        raise UserError(
            f"sharing.setting {options.config.sharing.setting} makes no images, so there are none to judge."
        )
    parse.refuse_fields(options, {field: name for name, field in OF_FIELDS.items() if options[name]})
    options.pools = pools(options)
    return options


def pools(options: parse.Options) -> list[Experiment]:
    """Return the experiments whose images are judged: one per seed, generator, rho and checkpoint of the training."""
    base, listed = parse.flat(options), partial(_listed, options)
    seeds, names = listed("seeds", int), listed("generators")
    rhos, shares = listed("rhos", float, "(0, 1]"), grid.values(options, "checkpoints", float, "(0, 1]")
    sweep.require_few(len(seeds) * len(names) * len(rhos) * len(shares))
    result = []
    for seed, name, rho in product(seeds, names, rhos):
        preset = {} if name == base["generator.name"] else presets.generator(name, options.preset)
        fields: dict[str, Any] = {**base, **preset, "generator.name": name, "generator.rho": rho, "seed": seed}
        config = choose(fields, options.fields)
        if shares != (1.0,) and "generator.epochs" not in config.flat:
            raise UserError(f"--checkpoints needs a generator that has epochs, and {registry.label(name)} has none.")
        if shares != (1.0,) and config.flat.get("generator.steps") is not None:
            raise UserError("--checkpoints are shares of generator.epochs: leave generator.steps out.")
        epochs = config.flat.get("generator.epochs")
        early = [] if epochs is None else sorted({max(1, round(share * epochs)) for share in shares})
        result += [choose({**fields, "generator.epochs": epoch}, options.fields) for epoch in early] or [config]
    return result


def _listed(options: parse.Options, name: str, kind: Any = str, allowed: str = "") -> tuple[Any, ...]:
    """Return the values of an option in ``OF_FIELDS``, or the field's value where the option is empty."""
    return grid.listed(options, name, kind, allowed) or (options[OF_FIELDS[name]],)


def quality(argv: Sequence[str]) -> int:
    options = arguments(argv)
    with Display() as display:
        display.load_libraries()
        from fedcommons.tune import sweep_folder
        from papers.fedssyn.judged import price, work

        if options.dry_run:
            price(options, display.say)
            return 0
        with sweep_folder.open_folder(Path(options.out)):
            work(options, display.say, partial(display.step, ends=False))
        display.say(f"Time: {options.elapsed():.0f} s. All in {options.out}.")
    return 0


if __name__ == "__main__":
    parse.main(quality, resumes=False)
