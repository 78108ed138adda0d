"""Presets of the experiments of FedCVAE: the compared methods, their training times and learning rates.

All methods share one protocol: the same data, partition and classifier, clients weighted by their numbers of images,
and the same number of local epochs, ``federation.rounds`` times ``client.epochs``. FedAvg runs these epochs round by
round. All other methods run them at once, before a client sends anything. In these epochs FedCVAE's clients train an
autoencoder; the clients of the other methods train the classifier.

Departs from the released code (ceh-2000/fed_cvae): a tenth of the 30,000 images is held out for validation. Images are
padded to 32x32, not scaled. FedAvg's clients use SGD with a learning rate chosen by validation accuracy. The table has
no row for the vote of the clients' classifiers, and a row for DENSE.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fedcommons.config import presets
from fedcommons.errors import UserError, quote

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedcvae-ens": {"algorithm": "fedcvae", "fedcvae.variant": "ens", "fedcvae.truncate": 3.0},
    "fedcvae-kd": {"algorithm": "fedcvae", "fedcvae.variant": "kd", "fedcvae.truncate": 1.0},
    "fedavg-once": {"algorithm": "fedavg"},
    "dense": {"algorithm": "dense"},
    "fedavg": {"algorithm": "fedavg"},
}
"""Config fields of each method, which is a row of the table, in the order of the table."""

ALGORITHMS = ",".join(dict.fromkeys(constants["algorithm"] for constants in METHODS.values()))

SENDS: Mapping[str, str] = {
    "fedcvae": "decoder, number of images, label histogram",
    "dense": "classifier",
    "fedavg": "change of the classifier",
}
"""What a client sends to the server, by algorithm: texts of a table column."""

_EVERY: dict[str, Any] = {
    "partition.name": "dirichlet_clients_all",
    "partition.n_clients": 10,
    "federation.weighting": "samples",  # as in the released code; clients' numbers of images are unequal
    "client.batch_size": 32,
    "measure.every": 0,
}
_SMALL = {"model.name": "encoder", "federation.rounds": 10, "client.epochs": 10, "fedcvae.decoder_epochs": 20,
          "fedcvae.server_epochs": 10, "dense.server_epochs": 25}  # fmt: skip
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_EVERY, **_SMALL, "partition.n_clients": 4, "federation.rounds": 2, "client.epochs": 1,
              "fedcvae.decoder_epochs": 1, "fedcvae.server_epochs": 1, "dense.server_epochs": 1},
    "small": {**_EVERY, **_SMALL},
    "paper": {**_EVERY, "model.name": "conv5", "data.limit": 30000, "dense.server_epochs": 200},
}  # fmt: skip
"""Config fields that each preset adds to the package's preset. FedCVAE's default constants are the paper's for MNIST.
"""

PAPER: Mapping[str, Mapping[str, Any]] = {
    "mnist": {"federation.rounds": 5, "client.epochs": 3, "fedcvae.decoder_epochs": 7, "fedcvae.server_epochs": 10},
    "fmnist": {"federation.rounds": 5, "client.epochs": 5, "fedcvae.decoder_epochs": 10, "fedcvae.server_epochs": 5},
}
"""Training times of the released code by data set: local epochs (15 or 25), and epochs of the server's models.

The split of the local epochs into five rounds of FedAvg is our choice.
"""
_OF_KD = {"fmnist": {"fedcvae.latent": 100, "fedcvae.truncate": 2.0}}
"""Config fields of the row fedcvae-kd with preset paper, by data set."""

RATES = {"smoke": "0.1", "small": "0.1,0.3", "paper": "0.01,0.03,0.1"}
"""Learning rates to try for clients that train the classifier, by preset. FedCVAE has the learning rates of its paper.
"""


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """Return the config fields (dotted names) of a preset of this experiment."""
    if preset == "paper" and dataset not in PAPER:
        raise UserError(
            f"--preset paper has numbers for {' and '.join(PAPER)}, got data.name {quote(dataset)}: use small."
        )
    more = PAPER[dataset] if preset == "paper" else {}
    return {**presets.preset(preset, dataset), **FIELDS[preset], **more}


def row(method: str, preset: str, base: Mapping[str, Any], asked: Collection[str]) -> Mapping[str, Any]:
    """Return the config fields that a row sets on top of ``base``, the fields of all rows."""
    epochs = base["federation.rounds"] * base["client.epochs"]
    once = {"federation.rounds": 1, "client.epochs": epochs, "fedcvae.local_epochs": epochs}
    row_fields = _OF_KD.get(base["data.name"], {}) if (method, preset) == ("fedcvae-kd", "paper") else {}
    row_fields = {name: value for name, value in {**METHODS[method], **row_fields}.items() if name not in asked}
    return {**row_fields, **({} if method == "fedavg" else once)}
