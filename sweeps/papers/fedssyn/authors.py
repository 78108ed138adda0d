"""Settings of Fedssyn's released code that differ from its paper, for each configuration of Table 1.

Sources: section 4 of the paper (Li et al., TMLR 2024, arXiv:2306.13263) and github.com/lyn1874/fedssyn at commit
4ceefff. For a configuration without a branch in the released code, the nearest configuration with a branch is used.

N: number of clients; n: number of training images. Four settings stay as in preset ``paper``: the generator's optimizer
(the released code uses AdamW), the rule of equal work (the code counts 50000/N images, but trains on 45000/N), the
partition (the code draws it again for the shuffled runs) and the number of rounds (102 in the code). This package
generates a multiple of n/N images per client, which is more than a client uses.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError

if TYPE_CHECKING:  # the import takes 0.1 s, and a single experiment does not need it
    from fedcommons.tune.sweep import Trial

_N_SEEN = {10: 3375, 40: 845, 100: 385}  # number of training images of a generator, by the number of clients N

# (data set, algorithm) -> for each of ``_FEDERATIONS``, the learning rates at the two values of ``_ALPHAS``
_RATES = {
    ("cifar10", "fedavg"): ((0.1, 0.05), (0.05, 0.05), (0.1, 0.1), (0.1, 0.1)),
    ("cifar100", "fedavg"): ((0.1, 0.05), (0.05, 0.05), (0.1, 0.1), (0.1, 0.1)),
    ("cifar10", "scaffold"): ((0.05, 0.05), (0.05, 0.05), (0.1, 0.1), (0.1, 0.1)),
    ("cifar100", "scaffold"): ((0.1, 0.1), (0.05, 0.01), (0.1, 0.1), (0.1, 0.1)),
    ("cifar10", "fedpvr"): ((0.1, 0.05), (0.05, 0.01), (0.1, 0.1), (0.1, 0.1)),
    ("cifar100", "fedpvr"): ((0.1, 0.05), (0.01, 0.01), (0.1, 0.1), (0.1, 0.1)),
    ("cifar10", "fedprox"): ((0.05, 0.05),) * 4,
    ("cifar100", "fedprox"): ((0.1, 0.1),) * 4,
    ("cifar10", "feddyn"): ((0.01, 0.01),) * 4,
    ("cifar100", "feddyn"): ((0.05, 0.05),) * 4,
}
_FEDERATIONS = ((10, 1.0), (10, 0.4), (40, 0.2), (100, 0.1))
_ALPHAS = (0.01, 0.1)


def cell(options: parse.Options, fields: Mapping[str, Any], owned: Collection[str] = ()) -> "Trial":
    """Return the trial with these config fields; preset ``authors`` replaces fields by the released code's."""
    from fedcommons.tune import grid, sweep

    config = choose(fields, options.fields)
    return sweep.cell(settled(options.preset, config, {*options.asked, *owned}), grid.VARIED)


def settled(preset: str, config: Experiment, asked: Collection[str]) -> Experiment:
    """Return the config; preset ``authors`` replaces fields by the released code's, except fields in ``asked``.

    asked: names of fields that the user or an option of the sweep has set.
    """
    if preset != "authors":
        return config
    fields = {name: value for name, value in authors(config).items() if name not in asked}
    return choose({**config.inactive, **config.flat, **fields}, config.inactive)


def authors(config: Experiment) -> Mapping[str, Any]:
    """Return the released code's config fields for this configuration of Table 1."""
    data, algorithm = config.data.name, config.algorithm
    n, c, alpha = config.partition.n_clients, config.federation.participation, config.flat.get("partition.alpha")
    if (data, algorithm) not in _RATES or (n, c) not in _FEDERATIONS or alpha not in _ALPHAS:
        raise UserError(
            f"preset authors has values for the configurations of Table 1 only: cifar10 or cifar100; fedavg, scaffold, "
            f"fedpvr, fedprox or feddyn; N:C 10:1, 10:0.4, 40:0.2 or 100:0.1; alpha 0.01 or 0.1; "
            f"got {data}, {algorithm}, {n}:{c:g}, {alpha}."
        )
    synthetic = config.sharing.setting in ("local_synthetic", "shuffled_synthetic")
    n_own = 45000 // n
    fields: dict[str, Any] = {
        **presets.AUTHORS,
        "client.epochs": 10 if n == 10 else 30 if data == "cifar10" else 40,
        "client.lr": _rate(config),
        "feddyn.alpha": 0.001 if data == "cifar10" and not synthetic else 0.01,
        "generator.rho": (_N_SEEN[n] + 0.5) / n_own,  # + 0.5, so that rounding down rho n_own gives _N_SEEN[n] images
        "generator.epochs": 499 if n == 100 or (n == 40 and data == "cifar100") else 450,
    }
    if synthetic:
        n_synthetic = 1000 if (n, data) == (100, "cifar100") else {10: 5000, 40: 1125, 100: 500}[n]
        fields["sharing.p"] = n_synthetic / (n_own + n_synthetic)
    return fields


def _rate(config: Experiment) -> float:
    data, algorithm, setting = config.data.name, config.algorithm, config.sharing.setting
    n, c, alpha = config.partition.n_clients, config.federation.participation, config.partition.alpha
    if algorithm == "feddyn" and setting != "real":
        if data == "cifar10":
            return 0.1 if setting == "local_synthetic" or n == 100 else 0.01
        return 0.1 if n == 100 else 0.05
    if setting == "shuffled_synthetic":
        exceptions = {("cifar10", "scaffold", 10, 0.4), ("cifar10", "fedprox", 100, 0.1)}
        if (data, algorithm, n, c) in exceptions and (algorithm == "scaffold" or alpha == 0.01):
            return 0.05
        return 0.1
    return _RATES[data, algorithm][_FEDERATIONS.index((n, c))][_ALPHAS.index(alpha)]
