"""The rows of the replications: published numbers, their settings, and our experiments with these settings.

Settings and learning rates are those of the sources, except McMahan's learning rate. No setting is tuned on results.
E: local epochs; B: batch size; C: share of clients in a round. Sources:

McMahan   McMahan et al., AISTATS 2017, arXiv:1602.05629, table 1: 2NN, E = 1, B = 10, tuned learning rate unreported
FedLab    SMILELab-FL/FedLab: readme_exp.ipynb (R4), mlp_exp.sh (learning rate 0.02); we no longer find the numbers
          43, 439 and 93.14 there
FLUTE     microsoft/msrflute, README: LR_MNIST, "about 81"
DPIB      DPImageBench's table of DP-MERF: classifiers trained on synthetic and tested on real images
NDPDC     Zheng and Li, "Differentially private dataset condensation", NDSS 2024 workshop: ten images per class
Flower    adap/flower, baselines/fedprox: a figure, read with an error of 0.03
NIID      adap/flower, baselines/niid_bench, README: the best of 50 rounds, mean +- standard deviation of its seeds; the
          setting of Li et al., ICDE 2022

The 2NN, an MLP with two hidden layers of 200 units, takes pixels in [0, 1], as in the sources.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

MNIST = {
    "data.name": "mnist", "data.limit": None, "data.validation": 0.0, "measure.every": 0,
    "federation.weighting": "samples", "federation.checkpoint_every": 100, "sharing.setting": "real",
}  # fmt: skip
TWO_NN = {**MNIST, "data.standardise": False, "model.name": "mlp", "partition.n_clients": 100}
TO_97 = {
    **TWO_NN, "client.batch_size": 10, "target": 0.97, "federation.stop": "target", "federation.participation": 0.1,
}  # fmt: skip
MCMAHAN = {"client.epochs": 1, "client.lr": 0.1}
FEDLAB = {"client.epochs": 5, "client.lr": 0.02}
IID = {**TO_97, "partition.name": "iid", "federation.rounds": 300}
SHARDS = {**TO_97, "partition.name": "shards", "partition.per_client": 2, "federation.rounds": 1500}
NOTEBOOK = {
    **TWO_NN, "partition.name": "iid", "federation.participation": 0.5, "client.batch_size": 100, "client.epochs": 5,
    "client.lr": 0.05, "federation.rounds": 100,
}  # fmt: skip
DIRICHLET = {
    **TWO_NN, "partition.name": "dirichlet_niid", "partition.alpha": 0.5, "federation.participation": 0.1,
    "client.batch_size": 60_000, "client.epochs": 5, "client.lr": 0.1, "federation.rounds": 200,
    "federation.weighting": "uniform",
}  # fmt: skip
SOFTMAX = {
    **MNIST, "model.name": "linear", "partition.name": "labels_lognormal", "partition.n_clients": 1000,
    "federation.participation": 0.01, "federation.rounds": 100, "client.batch_size": 10, "client.lr": 0.03,
}  # fmt: skip
FEDPROX = {**SOFTMAX, "client.epochs": 10}
MERF = {
    "data.limit": None, "data.validation": 0.02, "measure.every": 0, "partition.name": "iid", "partition.n_clients": 1,
    "algorithm": "one_shot", "one_shot.server_epochs": 1, "federation.rounds": 10, "sharing.setting": "merf",
    "sharing.features": 10_000, "sharing.fit": "generator", "sharing.steps": 3000, "sharing.per_class": 500,
}  # fmt: skip
NDPDC = {
    "data.limit": None, "data.validation": 0.0, "measure.every": 0, "partition.name": "iid", "partition.n_clients": 1,
    "algorithm": "one_shot", "federation.rounds": 10, "evaluate.every": 10, "model.name": "convnet",
    "client.lr": 0.01, "client.momentum": 0.9, "sharing.setting": "ndpdc", "sharing.target_epsilon": 1.0,
    "sharing.iterations": 1000, "sharing.width": 32,
}  # fmt: skip
NIID = {
    **MNIST, "data.standardise": False, "partition.name": "dirichlet_niid", "partition.alpha": 0.5,
    "partition.n_clients": 10, "federation.rounds": 50, "model.name": "cnn", "model.channels": (6, 16),
    "model.hidden": 120, "client.batch_size": 64, "client.epochs": 10, "client.lr": 0.01, "client.momentum": 0.9,
    "client.weight_decay": 1e-5,
}  # fmt: skip
LATE = {"straggler.rule": "slow", "straggler.share": 0.9}


@dataclass(frozen=True)
class Quantity:
    """A published number of a variant: accuracy in % after ``round``, or rounds to 97 % if ``round`` is None.

    note: precision of the number, by the source or by our reading; shown in the table, not used in the verdict.
    runs: number of the source's runs whose mean is published.
    """

    variant: str
    round: int | None
    published: float
    source: str
    note: str = ""
    runs: int = 1

    @property
    def words(self) -> str:
        return "rounds to 97 %" if self.round is None else f"accuracy after round {self.round}, %"


@dataclass(frozen=True)
class Row:
    """A setting with its variants (fields of an experiment each); ``PUBLISHED`` has the variants' published numbers.

    departs: differences between our experiment and the source; choices that the source does not state are not listed.
    """

    setting: str
    variants: Mapping[str, Mapping[str, Any]]
    departs: str = ""


RATES = "McMahan's learning rate is tuned but not reported: ours is 0.1; FedLab's is 0.02, from its script"

ROWS = {
    "R1": Row(
        "MNIST, 2NN, 100 IID clients, C = 0.1, B = 10: rounds to 97 %",
        {"E = 1": {**IID, **MCMAHAN}, "E = 5": {**IID, **FEDLAB}},
        RATES,
    ),
    "R2": Row(
        "the same, with two shards of sorted digits per client",
        {"E = 1": {**SHARDS, **MCMAHAN}, "E = 5": {**SHARDS, **FEDLAB}},
        RATES,
    ),
    "R3": Row(
        "R1 with more clients in a round",
        {
            f"C = {c}, E = {fields['client.epochs']}": {**IID, **fields, "federation.participation": c}
            for c in (0.2, 0.5, 1.0)
            for fields in (MCMAHAN, FEDLAB)
        },
        RATES,
    ),
    "R4": Row(
        "MNIST, 2NN, 100 IID clients, C = 0.5, B = 100, E = 5, rate 0.05",
        {"IID": NOTEBOOK},
    ),
    "R5": Row(
        "MNIST, 2NN, 100 clients by Dirichlet(0.5), C = 0.1, full batch, E = 5, rate 0.1",
        {"Dirichlet": DIRICHLET},
        "all clients have the same weight, as in FedLab's server; we no longer find the source of 93.14",
    ),
    "R6": Row(
        "LR_MNIST: softmax regression, 1,000 clients of two digits, 10 a round, B = 10, E = 1, rate 0.03",
        {"FedAvg": {**SOFTMAX, "client.epochs": 1}},
        "FLUTE's model puts a sigmoid before the softmax; pixels are standardised; clients' sizes are drawn anew",
    ),
    "R7": Row(
        "DP-MERF, one site with all images, 10,000 features, noise for epsilon 1 and 10 as theirs (2/n, replace-one)",
        {
            f"{name}, epsilon {epsilon}": {
                **MERF, "data.name": data, "sharing.scale": scale, "sharing.noise_multiplier": sqrt(2) * sigma,
            }
            for name, data, scale in (("MNIST", "mnist", 105.0), ("Fashion-MNIST", "fmnist", 127.0))
            for epsilon, sigma in ((1, 3.7306), (10, 0.4999))
        },
        "two percent of the images are held out, so the site has 58,800 of 60,000; we draw 500 images per class from "
        "the generator, they 6,000; the classifier is our CNN; DPIB's stored run has scale 105 for Fashion-MNIST",
    ),
    "R8": Row(
        "NDPDC, one site with all images, ten images per class, epsilon 1, L = 50, sampling rate by the smallest class",
        {
            name: {**NDPDC, "data.name": data, "sharing.class_size": smallest}
            for name, data, smallest in (("MNIST", "mnist", 5421), ("Fashion-MNIST", "fmnist", 6000))
        },
        "we take 1,000 steps with networks of 32 channels (five to ten minutes on a core), they 10,000 with 128; we do "
        "not augment images, they augment real and fitted images equally in a step; our images become uint8; our "
        "ConvNet trains for 100 epochs of batches of ten at learning rate 0.01 with momentum 0.9, theirs for 1,000 "
        "epochs of batches of 256 at 0.01, and at 0.001 in the second half",
    ),
    "R10": Row(
        "softmax regression, clients as R6, E = 10; 0 or 90 % of a round's clients run only some of their epochs",
        {
            f"{name}, {share}": {**FEDPROX, **method, **late}
            for share, late in (("none late", {}), ("90 % late", LATE))
            for name, method in (
                ("FedAvg, late ones dropped", {"algorithm": "fedavg", "straggler.partial": "drop"}),
                ("mu = 0", {"algorithm": "fedprox", "fedprox.mu": 0.0, "straggler.partial": "take"}),
                ("mu = 2", {"algorithm": "fedprox", "fedprox.mu": 2.0, "straggler.partial": "take"}),
            )
        },
        "they use weight decay 0.001, hold out a tenth of each client's data, weight by batches and draw the "
        "stragglers; without stragglers, FedAvg and mu = 0 are the same runs of ours",
    ),
    "R12": Row(
        "NIID-Bench: ten clients by Dirichlet(0.5), all in each round, B = 64, E = 10, rate 0.01, momentum 0.9",
        {
            f"{name}, {method}": {**NIID, "data.name": data, "algorithm": method, **constants}
            for name, data in (("MNIST", "mnist"), ("Fashion-MNIST", "fmnist"))
            for method, constants in (
                ("fedavg", {}), ("fedprox", {"fedprox.mu": 0.01}), ("fednova", {}),
                ("scaffold", {"scaffold.option": 1}),
            )
        },
        "their accuracy is the best of the 50 rounds on test images, ours the last; our convolutions are 3x3, theirs "
        "5x5 without padding; we have one dense layer of 120, they 120 and 84; our mu is 0.01, theirs tuned but not "
        "reported; SCAFFOLD's new control is the gradient at the server's model (option 1), as option 2 assumes SGD "
        "without momentum",
    ),
}  # fmt: skip
"""Rows by the names (R1, R2, ...) that the page of results uses."""


def _published() -> dict[str, list[Quantity]]:
    result: dict[str, list[Quantity]] = {}
    with (Path(__file__).parent / "published.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            value = float(line["published"]) if "." in line["published"] else int(line["published"])
            last = int(line["round"]) if line["round"] else None
            quantity = Quantity(line["variant"], last, value, line["source"], line["note"], int(line["runs"]))
            result.setdefault(line["row"], []).append(quantity)
    return result


PUBLISHED = _published()
"""The published numbers of each row, in the order of the table."""

NOT_HERE = {
    "R9": "Opacus' MNIST example as a client: docs/results/opacus_mnist.md",
    "R11": "FedProx' synthetic(alpha, beta): curves without numbers, examples/fedprox_synthetic.py",
}
"""Further rows of the page that this sweep does not run, each with the reason or with the page of the result."""
