"""What the presets are in the experiments of FedCVAE, which methods are compared, and how long each trains.

One protocol: the same data, partition and classifier, clients that weigh by their numbers of images, and the same local
epochs for all, rounds x client.epochs. FedAvg makes them round by round, all others at once, before their clients send
anything: FedCVAE's clients of an autoencoder, the others' of the classifier.

Departs from the released code (ceh-2000/fed_cvae): a tenth of the 30,000 images is held out for validation; images are
padded to 32x32, not scaled; FedAvg's clients have SGD, and a rate that is chosen; its vote of clients' classifiers is
no row, and DENSE is one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from fedcommons.config import presets
from fedcommons.errors import UserError, shown, unknown

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedcvae-ens": {"algorithm": "fedcvae", "fedcvae.variant": "ens", "fedcvae.truncate": 3.0},
    "fedcvae-kd": {"algorithm": "fedcvae", "fedcvae.variant": "kd", "fedcvae.truncate": 1.0},
    "fedavg-once": {"algorithm": "fedavg"},
    "dense": {"algorithm": "dense"},
    "fedavg": {"algorithm": "fedavg"},
}
"""The rows, in their order."""

ALGORITHMS = ",".join(dict.fromkeys(of["algorithm"] for of in METHODS.values()))

SENDS: Mapping[str, str] = {
    "fedcvae": "decoder, number of images, label histogram",
    "dense": "classifier",
    "fedavg": "change of the classifier",
}
"""What leaves a client, by algorithm."""

_EVERY: dict[str, Any] = {
    "partition.name": "dirichlet_clients_all",
    "partition.n_clients": 10,
    "federation.weighting": "samples",  # as there: sizes are very unequal
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
"""What the presets set on top of the package's, whose FedCVAE is the paper's on MNIST."""

PAPER: Mapping[str, Mapping[str, Any]] = {
    "mnist": {"federation.rounds": 5, "client.epochs": 3, "fedcvae.decoder_epochs": 7, "fedcvae.server_epochs": 10},
    "fmnist": {"federation.rounds": 5, "client.epochs": 5, "fedcvae.decoder_epochs": 10, "fedcvae.server_epochs": 5},
}
"""What the released code sets by data set: 15 and 25 local epochs (sharing them among five rounds of FedAvg is ours),
epochs of the server's decoder and of its classifier."""
_OF_KD = {"fmnist": {"fedcvae.latent": 100, "fedcvae.truncate": 2.0}}
"""What KD alone has."""

RATES = {"smoke": "0.1", "small": "0.1,0.3", "paper": "0.01,0.03,0.1"}
"""Rates to choose from, of clients that train the classifier. FedCVAE has the paper's."""


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """The dotted fields of a preset of this experiment.

    Raises:
        UserError: there is none of this name, or the paper has no numbers for this data set.
    """
    if preset not in FIELDS:
        raise unknown("preset", preset, FIELDS)
    if preset == "paper" and dataset not in PAPER:
        raise UserError(
            f"--preset paper has numbers for {' and '.join(PAPER)}, got data.name {shown(dataset)}: use small."
        )
    more = PAPER[dataset] if preset == "paper" else {}
    return {**presets.preset(preset, dataset), **FIELDS[preset], **more}


def row(method: str, preset: str, base: Mapping[str, Any], asked: Collection[str]) -> Mapping[str, Any]:
    """What a row sets on top of ``base``, the fields of all rows; asked: fields that were given on the command line."""
    epochs = base["federation.rounds"] * base["client.epochs"]
    once = {"federation.rounds": 1, "client.epochs": epochs, "fedcvae.local_epochs": epochs}
    own = _OF_KD.get(base["data.name"], {}) if (method, preset) == ("fedcvae-kd", "paper") else {}
    own = {name: value for name, value in {**METHODS[method], **own}.items() if name not in asked}
    return {**own, **({} if method == "fedavg" else once)}
