"""Figures A.9 and A.10 of Fedssyn, on dSprites: accuracy against the training images and epochs of beta-VAEs.

python sweeps/dsprites.py                       # images drawn by this program with dSprites' factors
python sweeps/dsprites.py --preset smoke        # the same code with smaller numbers
python sweeps/dsprites.py --preset paper --data.file dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz      # for GPUs
"""

from collections.abc import Sequence
from itertools import product

from fedcommons.cli import parse
from fedcommons.errors import UserError
from fedcommons.tune import grid as grids
from fedcommons.tune.study import Entry, Row, Study, expand
from papers.fedssyn import sprites_presets as presets
from papers.fedssyn.sprites_report import report

TAKEN = {"seed": "seeds", "generator.rho": "rhos", "sharing.p": "numbers", "sharing.setting": "rhos",
         "generator.steps": "checkpoints"}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grids.preset_and_dataset(argv, presets.FIELDS, "procedural_sprites", "dsprites")
    rhos, checkpoints, numbers, numbers_rhos = presets.LISTS[preset]
    parser = grids.study_parser(__doc__, argv, "dsprites", presets.FIELDS, presets.fields(preset, dataset), (
        ("rhos", str, rhos, "rho: shares of a client's images that its generator sees, nested"),
        ("checkpoints", str, checkpoints, "shares of generator.epochs after which images are drawn"),
        ("numbers", str, numbers, "n~/n_i: synthetic images of a client per real image of that client"),
        ("numbers-rhos", str, numbers_rhos,
         "values of rho for which all of --numbers are tried; other values of rho use 0.25"),
    ), short={"seed": "seeds", "rho": "rhos"})  # fmt: skip
    parser.hide(TAKEN)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, TAKEN)
    if "generator.epochs" not in options.fields:
        raise UserError("generator.name must name a generator that has epochs.")
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the entries of the runs.

    rho is the share of a client's images that its generator sees. Each seed has a run without sharing, a run for each
    rho and checkpoint with 0.25 synthetic images per real image, and a run with fully trained generators for each rho
    of ``--numbers-rhos`` and each number of synthetic images per real image in ``--numbers``.
    """
    epochs = options["generator.epochs"]
    rhos = grids.values(options, "rhos", float, "(0, 1]")
    shares = grids.values(options, "checkpoints", float, "(0, 1]")
    numbers = grids.values(options, "numbers", float, "(0, 1e6]")
    numbers_rhos = grids.values(options, "numbers-rhos", float, "(0, 1]")
    early = sorted({max(1, round(share * epochs)) for share in shares})
    grid = list(product(rhos, early, [0.25])) + list(product(numbers_rhos, [epochs], numbers))
    rows: list[Row] = [({"rho": None, "epochs": 0, "number": 0.0}, {"sharing.setting": "real"})]
    for rho, epoch, number in dict.fromkeys(grid):
        fields = {"generator.rho": rho, "generator.epochs": epoch, "sharing.p": number / (1 + number)}
        rows.append(({"rho": rho, "epochs": epoch, "number": number}, fields))
    return expand(options, rows, by_seed=True)


dsprites = Study("dsprites", arguments, entries, report)

if __name__ == "__main__":
    parse.main(dsprites)
