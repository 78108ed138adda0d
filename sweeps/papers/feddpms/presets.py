"""Presets of the experiments of FedDPMS: the paper's tables, and the authors' released code.

Sources: Chen and Vikalo, arXiv:2206.00686, section 4 and appendix A.2; github.com/CityChan/Federated-DPMS at commit
dd16e44. In every preset the encoder of the autoencoder normalises its input, as the networks of the other methods do.
Otherwise the tables would compare scales of pixels. Preset ``authors`` is the paper's experiment with these settings of
the released code: BatchNorm, a classifier on the encoder's features instead of the code, a cross entropy of pixels
instead of the squared error, twice the channels for Fashion-MNIST, clients with equal weights, other noise and quotas,
25 rounds of stage I with many clients, and FedProx with its mu multiplied twice. The released code's learning rate
never decays, which is the default here too.

The following properties of the released code are not reproduced. Network: PReLU, dropout 0.2 for CIFAR, strided
deconvolutions, Xavier's initial weights, float64, and pixels that are normalised and then squashed by a sigmoid. Data:
bootstrap samples of each client's images. Exchange: it takes place before round T_p, one number replaces all
entries of a mean, more codes are sent than the quota, a client may be its own helper, and clients train on all images
instead of n_i of them. Results: accuracies are means over batches instead of images. The released code reports the best
of all rounds; the tables here show the best and the last round.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

_ALL: dict[str, Any] = {
    "partition.name": "dirichlet_niid", "federation.weighting": "samples", "client.optimizer": "adam",
    "model.name": "vae", "model.normalise": True, "fedprox.mu": 0.001, "measure.every": 0,
}  # fmt: skip
_DIGITS: dict[str, Any] = {  # chosen in runs with seeds 100 and 101
    "client.lr": 5e-3, "client.batch_size": 16, "client.epochs": 3, "federation.rounds": 16,
    "model.latent": 16, "model.channels": (8, 16), "feddpms.quota": 5, "feddpms.sigma": 1.0,
}  # fmt: skip
_LAPTOP: dict[str, Any] = {  # chosen on Fashion-MNIST with seed 100, so that decoded images are recognisable
    "data.limit": 1000, "data.validation": 0.02, "client.lr": 3e-3, "client.batch_size": 32, "client.epochs": 5,
    "federation.rounds": 20, "feddpms.quota": 10, "feddpms.sigma": 1.0,
}  # fmt: skip
_LARGE: dict[str, Any] = {
    "client.lr": 1e-3, "client.batch_size": 64, "client.epochs": 5, "federation.rounds": 50,
}  # fmt: skip

_FMNIST: dict[str, Any] = {"model.latent": 32, "model.channels": (16, 32), "feddpms.quota": 50, "feddpms.sigma": 3.0}
_CIFAR: dict[str, Any] = {
    "model.latent": 128, "model.channels": (32, 64), "model.depth": 2, "feddpms.quota": 200, "feddpms.sigma": 4.0,
}  # fmt: skip
_PAPERS: Mapping[str, dict[str, Any]] = {
    "fmnist": _FMNIST, "mnist": _FMNIST, "cifar10": _CIFAR,
    "cifar100": {**_CIFAR, "feddpms.quota": 50, "feddpms.classes": 10},
}  # fmt: skip

_AUTHORS: dict[str, Any] = {
    "federation.weighting": "uniform", "model.batch_norm": True, "model.classify": "features",
    "model.reconstruction": "cross_entropy", "fedprox.mu": 1e-6, "moon.mu": 10.0,
}  # fmt: skip
_AUTHORS_OF: Mapping[str, dict[str, Any]] = {
    "fmnist": {"model.channels": (32, 64), "feddpms.quota": 200, "feddpms.sigma": 4.0},
    "cifar10": {"feddpms.sigma": 2.0, "moon.mu": 5.0},
}


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """Return the config fields of a preset of this experiment; the data set digits has only ``small`` and ``smoke``."""
    papers = _PAPERS.get(dataset, {})
    if preset in ("paper", "authors"):
        base = {**presets.preset("paper", dataset), **_ALL, **_LARGE, **papers}
        return {**base, **_AUTHORS, **_AUTHORS_OF.get(dataset, {})} if preset == "authors" else base
    base = {**presets.preset(preset, dataset), **_ALL}
    if preset == "small" and papers:
        return {**base, **papers, **_LAPTOP}
    return {**base, **_DIGITS, **({"federation.rounds": 4, "client.epochs": 1} if preset == "smoke" else {})}
