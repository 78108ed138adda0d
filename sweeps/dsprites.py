"""Figures A.9 and A.10 of Fedssyn, on dSprites: accuracy against the training images and epochs of beta-VAEs.

python sweeps/dsprites.py                       # images drawn by this program with dSprites' factors
python sweeps/dsprites.py --preset smoke        # the same code with smaller numbers
python sweeps/dsprites.py --preset paper --data.file dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz      # for GPUs

Preset paper is appendix A.4. The paper's classifier has a head of 2,048 inputs, as VGG-11 has for images of 64x64. The
paper does not print learning rate, local epochs and rounds, so the presets have those of its other experiments.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.tune import grid as grids
from fedcommons.tune.study import Entry, Row, Study, expand
from papers.fedssyn.sprites_report import report

OPTIONS = {"seed": "seeds", "generator.rho": "rhos", "sharing.p": "numbers", "sharing.setting": "rhos",
         "generator.steps": "checkpoints"}  # fmt: skip
"""Experiment fields that this sweep's options set, as field: option. Setting such a field directly is refused."""


_CLIENTS: dict[str, Any] = {
    "partition.name": "by_factor",
    "partition.factor": "quadrant_shape",
    "partition.n_clients": 12,
    "sharing.setting": "shuffled_synthetic",
    "generator.name": "beta_vae",
    "measure.every": 0,
}

_SMALL: dict[str, Any] = {
    **_CLIENTS,
    "data.name": "procedural_sprites",
    "data.side": 16,
    "data.images": 6000,
    "generator.epochs": 120,
    "generator.batch_size": 64,
    "generator.lr": 2e-3,
    "generator.ramp": 8,
    "model.name": "encoder",
    "client.optimizer": "adam",
    "client.lr": 3e-3,  # best of 0.002, 0.003 and 0.006 by validation accuracy after 16 rounds with sharing.p 0.2
    "client.batch_size": 32,
    "client.epochs": 5,  # with n_i/4 synthetic images, the rule of equal work reduces five epochs to four
    "federation.rounds": 20,  # last accuracy: 66 % if a fifth of the images is swapped, 33 % (chance) without sharing
}

_SMOKE: dict[str, Any] = {
    "data.side": 8,
    "data.images": 480,
    "generator.epochs": 8,
    "generator.filters": 4,
    "generator.hidden": 16,
    "generator.ramp": 1,
    "federation.rounds": 2,
    "federation.checkpoint_every": 1,
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, **_SMOKE},
    "small": _SMALL,
    "paper": {
        **_CLIENTS,
        "data.validation": 0.0,
        "model.name": "vgg11",
        "client.batch_size": 256,
        "client.lr": 0.1,
        "client.epochs": 10,
        "federation.rounds": 100,
    },
}
"""Config fields of each preset. With data.validation 0 a client of dSprites has 55,296 images, as in the paper."""

LISTS: Mapping[str, tuple[str, str, str, str]] = {
    "smoke": ("0.5,1", "0.5,1", "0.25", "0.5"),
    "small": ("0.04,0.2,1", "0.25,1", "0.25,1", "1"),
    "paper": ("0.01,0.02,0.04,0.08,0.16,0.32,0.64,1", "0.1,0.25,0.5,1", "0.0625,0.125,0.25,0.5,1", "0.04,0.16,0.64,1"),
}
"""Four lists of values by preset: rho; checkpoints as shares of the generators' epochs; n~/n_i; rho again.

rho: share of a client's n_i images that its generator sees. n~: synthetic images that a client gets. The values n~/n_i
are used with each rho of the fourth list. With each rho of the first list, n~/n_i is 1/4.
"""


def fields(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields (dotted names) of a preset with this data set."""
    base = presets.preset("small" if preset == "paper" else preset, dataset)
    generic = {name: value for name, value in base.items() if not name.startswith(("generator.", "feddm."))}
    preset_fields = {**FIELDS[preset], "data.name": dataset}
    if dataset == "dsprites" and preset != "paper":
        preset_fields["data.side"] = 16  # The side must divide 64, the side of dSprites images.
    return {**generic, **preset_fields}


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grids.preset_and_dataset(argv, FIELDS, "procedural_sprites", "dsprites")
    rhos, checkpoints, numbers, numbers_rhos = LISTS[preset]
    parser = grids.study_parser(__doc__, argv, "dsprites", FIELDS, fields(preset, dataset), (
        ("rhos", str, rhos, "rho: shares of a client's images that its generator sees, nested"),
        ("checkpoints", str, checkpoints, "shares of generator.epochs after which images are drawn"),
        ("numbers", str, numbers, "n~/n_i: synthetic images of a client per real image of that client"),
        ("numbers-rhos", str, numbers_rhos,
         "values of rho for which all of --numbers are tried; other values of rho use 0.25"),
    ), short={"seed": "seeds", "rho": "rhos"})  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    parse.refuse_fields(options, OPTIONS)
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
