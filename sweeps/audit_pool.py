"""Audit the synthetic images of a configuration: do generators memorise, and can an attacker infer membership?

python sweeps/audit_pool.py                    # digits, some minutes on a laptop
python sweeps/audit_pool.py --preset smoke     # the same code with smaller numbers
python sweeps/audit_pool.py --seeds 0,1,2      # three seeds: table and ROC curves with their range
python sweeps/audit_pool.py --generator private_ddpm --generator.target_epsilon 10
python sweeps/audit_pool.py --sharing merf --sharing.target_epsilon 10   # for noisy sums: an estimate of epsilon
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets, registry
from fedcommons.config.dotted import choose, generates
from fedcommons.errors import UserError
from fedcommons.tune import grid, sweep
from papers.fedssyn import authors, private_presets


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, large="digits")
    setting = {"sharing.setting": "shuffled_synthetic"}
    parser = parse.parser(__doc__, argv, {**presets.preset(preset, dataset), **setting})
    few = preset == "smoke"
    parser.add_options((
        ("preset", str, "small", ", ".join(presets.PRESETS)),
        ("seeds", str, "", "seeds, separated by commas (default: seed)"),
        ("attacked", Annotated[int | None, "[0, 1e9]"], None,
         "the client whose generator is attacked; default: the one whose generator sees most images"),
        ("shadows", Annotated[int, "[2, 10000]"], 3 if few else 12, "shadow generators of the membership attack"),
        ("canaries", Annotated[int, "[4, 1e9]"], 8 if few else 400,
         "largest number of test images for the bound on epsilon; half are trained on. For noisy sums: a 25th of "
         "the draws of each world (merf), or a fourth of the canaries in the run (ndpdc)"),
        ("out", str, f"runs/audit-{preset}-{registry.label(dataset)}", "folder of the results"),
        ("resume", bool, False, "keep the audits that are already in that folder"),
        ("dry-run", bool, False, "say what would be trained, and stop"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    if options.seeds:
        parse.refuse_fields(options, {"seed": "seeds"})
    field = options.fields["seed"]
    seeds = grid.listed(options, "seeds", int, field.allowed) or (options.seed,)
    sweep.require_few(len(seeds))
    flat = parse.flat(options)
    each = (choose({**flat, "seed": seed}, options.fields) for seed in seeds)
    options.configs = [authors.settled(options.preset, config, options.asked) for config in each]
    options.config = options.configs[0]
    options.of_sums = options.config.sharing.setting in private_presets.OF_SUMS
    setting = options.config.sharing.setting
    if not (options.of_sums or generates(setting)):
        raise UserError(f"sharing.setting {setting} trains no generators and sends no sums that can be audited.")
    if options.of_sums and (idle := parse.named(argv) & {"shadows", "resume"}):
        raise UserError(f"--{min(idle)} is for audits of generators, and sharing.setting {setting} trains none.")
    return options


def audit_pool(argv: Sequence[str]) -> int:
    options = arguments(argv)
    with Display() as display:
        display.load_libraries()
        from fedcommons.tune import sweep_folder

        if options.of_sums:
            return _of_sums(options, display)
        from papers.fedssyn.attacks import checked, price, work

        if options.dry_run:
            for config in options.configs:
                price(*checked(config, options.attacked), options, display.say)
            return 0
        with sweep_folder.open_folder(Path(options.out)):
            work(options, display.say, partial(display.step, ends=False))
        display.say(f"Time: {options.elapsed():.0f} s. All in {options.out}.")
    return 0


def _of_sums(options: parse.Options, display: Display) -> int:
    from fedcommons.tune import sweep_folder
    from papers.fedssyn import noisy_sums

    if options.dry_run:
        display.say("Nothing is trained: the noisy sums are drawn anew.")
        return 0
    with sweep_folder.open_folder(Path(options.out)):
        noisy_sums.work(options, display.say)
    return 0


if __name__ == "__main__":
    parse.main(audit_pool)
