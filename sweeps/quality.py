"""How good the synthetic images of a configuration are, against real ones, without downloads.

python sweeps/quality.py                                      # digits, some minutes on a laptop
python sweeps/quality.py --preset smoke                       # the same code with smaller numbers
python sweeps/quality.py --config runs/mine/config.yaml       # the pool of a run
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from fedcommons.config import cli, parts, presets
from fedcommons.config.flat import generates
from fedcommons.errors import UserError
from fedcommons.sweeping.display import Display


def arguments(argv: Sequence[str]) -> cli.Options:
    """Options on top of every field of the experiment."""
    preset, dataset = cli.early(argv, "preset", "small"), cli.early(argv, "data.name", "digits")
    title = (__doc__ or "").partition("\n")[0]
    fields = {**presets.preset(preset, dataset), "sharing.setting": "shuffled_synthetic"}
    parser = cli.parser(title, argv, fields)
    for name, kind, default, text in (
        ("preset", str, "small", ", ".join(presets.PRESETS)),
        ("neighbours", Annotated[int, "[1, 1000]"], 5, "k of precision, recall, density and coverage"),
        ("images", Annotated[int, "[10, 1e6]"], 5000, "images of each kind at most"),
        ("epochs", Annotated[int, "[1, 1e6]"], 20, "epochs of the two classifiers"),
        ("out", str, f"runs/quality-{preset}-{parts.label(dataset)}", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and stop")
    options = cli.parse(parser, argv)
    options.config = cli.experiment(options)
    if not generates(options.config.sharing.setting):
        raise UserError(
            f"sharing.setting {options.config.sharing.setting} makes no images, so there are none to judge."
        )
    return options


def quality(argv: Sequence[str]) -> int:
    started, options = time.perf_counter(), arguments(argv)
    with Display() as display:
        display.say("Loading torch and the data ...")
        from fedcommons.sweeping import folders
        from papers.fedssyn.judged import work

        if options.dry_run:
            work(options, display.say)
            return 0
        with folders.open_folder(Path(options.out)):
            work(options, display.say, partial(display.step, ends=False))
        display.say(f"Time: {time.perf_counter() - started:.0f} s. All in {options.out}.")
    return 0


if __name__ == "__main__":
    cli.main(quality)
