"""The rows of ``sweeps/commons.py``: each way (a method with a sharing strategy), with its budget of training.

All rows have one protocol: the same data, partition, clients and classifier (``encoder``; FedDPMS trains the
autoencoder that contains it), with all clients in every round. A client that trains the classifier runs E epochs on its
own images in each of R rounds. A client that also holds other clients' images makes the same number of steps. A client
of a one-shot method runs E R epochs at once. Each row's ``budget`` states what the server and the generators train.
The values of fields differ from those of the papers, which are on the papers' pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import generates
from fedcommons.tune.learning_rates import Rates
from papers.fedssyn import private_presets

LR = "client.lr"
"""Name of the field of the clients' learning rate; ``--lrs`` lists the values to try."""


@dataclass(frozen=True)
class Way:
    """A row of the table: its config fields (dotted names), the learning rates to try, and its training in words.

    tries: learning rates to try, by field; one field varies at a time, with the first value of all other fields.
    bound: the way is an upper bound that is unrealistic in practice. smaller: further fields in preset smoke; large:
    further fields in preset small for images of 28x28 and more.
    """

    fields: Mapping[str, Any]
    budget: str
    tries: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: {LR: ()})
    bound: bool = False
    smaller: Mapping[str, Any] = field(default_factory=dict)
    large: Mapping[str, Any] = field(default_factory=dict)


_POOL = {"algorithm": "fedavg", "sharing.setting": "shuffled_synthetic", "sharing.audit": True}
_SERVER = {"sharing.setting": "server_synthetic", "sharing.audit": True}
_LOCAL, _GENERATOR = "clients E epochs per round", "{generator} epochs of a generator per client"
_PRIVATE = {"generator.name": "private_ddpm", "generator.target_epsilon": 10.0}
_MERF = {"algorithm": "fedavg", "sharing.setting": "merf", "sharing.target_epsilon": 10.0}
_ONCE = "one noisy sum of features per client, epsilon 10"
_NDPDC = {"algorithm": "fedavg", "sharing.setting": "ndpdc", "sharing.target_epsilon": 10.0}
_EACH_STEP = "{iterations} noisy sums of features per client, epsilon 10 for all together"
_COPIES = {"sharing.setting": "raw_copies", "sharing.c": 0.1, "sharing.d": 2}
_AT_SERVER = "server E epochs per round on the pool"
_TO_TWO = "copies of 10 % of the images, each to two other clients"
_FEDDM = {"algorithm": "feddm", "feddm.ipc": 3, "feddm.iterations": 20, "feddm.image_lr": 0.01,
          "feddm.server_epochs": 30, "feddm.server_batch": 64, "feddm.server_lr": 0.05}  # fmt: skip
_FEDLAP = {"algorithm": "fedlap", "fedlap.trajectories": 1, "fedlap.local_steps": 1, "fedlap.radius": 3.0}
_FITS = (
    "clients {trajectories} x {steps} x {image_steps} steps on the pixels, server up to {server_steps} steps per round"
)
_DISTILS = "clients E R epochs once; server {server_epochs} epochs of distillation per round"


def _few(method: str) -> dict[str, Any]:
    """Return the fields of preset smoke for a method that distils an ensemble: few epochs and generator steps."""
    return {f"{method}.server_epochs": 1, f"{method}.generator_steps": 2}


_DECODERS = (
    "clients {local_epochs} epochs of an autoencoder once; server {server_epochs} epochs per round on {samples} images"
)
_FEDCVAE = {"algorithm": "fedcvae", "fedcvae.local_epochs": 200, "fedcvae.decoder_epochs": 20,
            "fedcvae.server_lr": 1e-3, "fedcvae.channels": (32, 64)}  # fmt: skip
_VAE = {"model.name": "vae", "model.normalise": True}


def _fedcvae(variant: str, image_source: str) -> Way:
    """Return the row of the table for a variant of FedCVAE."""
    return Way(
        {**_FEDCVAE, "fedcvae.variant": variant},
        _DECODERS + image_source,
        {"fedcvae.server_lr": (1e-3, 3e-4, 3e-3), "fedcvae.local_lr": (1e-3, 3e-4, 3e-3)},
        smaller={"fedcvae.local_epochs": 5, "fedcvae.decoder_epochs": 2, "fedcvae.samples": 200},
        large={"fedcvae.local_epochs": 60, "fedcvae.channels": (32, 32, 64, 64)},
    )


WAYS: Mapping[str, Way] = {
    "real": Way({"algorithm": "fedavg", "sharing.setting": "real"}, _LOCAL),
    "raw copies": Way({"algorithm": "fedavg", **_COPIES}, f"{_LOCAL}; {_TO_TWO}"),
    "shuffled real": Way(
        {"algorithm": "fedavg", "sharing.setting": "shuffled_real", "sharing.p": 0.5},
        f"{_LOCAL}; half of all images swapped",
        bound=True,
    ),
    "local synthetic": Way({**_POOL, "sharing.setting": "local_synthetic"}, f"{_LOCAL}; {_GENERATOR}"),
    "Fedssyn (DDPM)": Way(_POOL, f"{_LOCAL}; {_GENERATOR}"),
    "Fedssyn (GAN)": Way({**_POOL, "generator.name": "gan"}, f"{_LOCAL}; {_GENERATOR}"),
    "Fedssyn (CVAE)": Way({**_POOL, "generator.name": "cvae"}, f"{_LOCAL}; {_GENERATOR}"),
    "Fedssyn (private DDPM)": Way({**_POOL, **_PRIVATE}, f"{_LOCAL}; {_GENERATOR}, epsilon 10 for images"),
    "one-shot Fedssyn (DDPM)": Way({"algorithm": "one_shot", **_SERVER}, f"{_AT_SERVER}; {_GENERATOR}"),
    "one-shot Fedssyn (private DDPM)": Way(
        {"algorithm": "one_shot", **_SERVER, **_PRIVATE}, f"{_AT_SERVER}; {_GENERATOR}, epsilon 10 for images"
    ),
    "FedMERF": Way(_MERF, f"{_LOCAL}; {_ONCE}"),
    "FedMERF (summed)": Way({**_MERF, "sharing.noise": "summed"}, f"{_LOCAL}; {_ONCE}"),
    "one-shot FedMERF (summed)": Way(
        {**_MERF, "algorithm": "one_shot", "sharing.noise": "summed"}, f"{_AT_SERVER}; {_ONCE}"
    ),
    "NDPDC": Way(_NDPDC, f"{_LOCAL}; {_EACH_STEP}"),
    "one-shot NDPDC": Way({**_NDPDC, "algorithm": "one_shot"}, f"{_AT_SERVER}; {_EACH_STEP}"),
    "DP-CDA": Way(
        {"algorithm": "fedavg", "sharing.setting": "dpcda", "sharing.target_epsilon": 10.0},
        f"{_LOCAL}; {{per_class}} noisy sums of images per class and client, epsilon 10 for all together",
    ),
    "FedDM": Way(
        _FEDDM,
        "clients {iterations} steps on the pixels per round, server {server_epochs} epochs on these images",
        # the presets of papers.feddm have 0.3 for the pixels, with a ConvNet; the encoder here diverges at 0.3
        {"feddm.image_lr": (0.01, 0.003, 0.03), "feddm.server_lr": (0.05, 0.02, 0.1)},
        smaller={"feddm.ipc": 1, "feddm.least": 1, "feddm.iterations": 2, "feddm.server_epochs": 2},
        large={"feddm.ipc": 5, "feddm.iterations": 30, "feddm.match_batch": 64},
    ),
    "FedLAP": Way(
        _FEDLAP,
        _FITS,
        {"fedlap.image_lr": (30.0, 10.0, 100.0), "fedlap.model_lr": (0.1, 0.03, 0.3)},
        smaller={"fedlap.ipc": 1, "fedlap.steps": 2, "fedlap.image_steps": 1, "fedlap.server_steps": 5},
        large={"fedlap.match_batch": 64},
    ),
    "FedLAP-DP": Way(
        {**_FEDLAP, "fedlap.steps": 2, "fedlap.classes": "all", "dp.local": True, "dp.target_epsilon": 10.0,
         "dp.clip": 1.0},
        f"{_FITS}, epsilon 10",
        {"fedlap.image_lr": (10.0, 3.0, 30.0), "fedlap.model_lr": (0.1, 0.03, 0.3)},
        smaller={"fedlap.ipc": 1, "fedlap.image_steps": 1, "fedlap.server_steps": 5},
    ),
    "FedDPMS": Way(
        {"algorithm": "feddpms", **_VAE, "feddpms.quota": 5, "feddpms.sigma": 1.0},
        f"{_LOCAL} on the autoencoder's loss, with other clients' decoded images",
    ),
    "FedMix": Way({"algorithm": "fedmix"}, f"{_LOCAL}; means of 64 images"),
    "FedGEN": Way(
        {"algorithm": "fedgen"},
        f"{_LOCAL}; server trains a generator of features in each round",
        {LR: (), "fedgen.weight": (10.0, 1.0), "fedgen.server_lr": (3e-4, 3e-3)},
    ),
    "DENSE": Way(
        {"algorithm": "dense", "dense.server_epochs": 5},
        _DISTILS,
        {LR: (), "dense.server_lr": (0.005, 0.02), "dense.generator_lr": (1e-3, 1e-2)},
        smaller=_few("dense"),
    ),
    "Co-Boosting": Way(
        {"algorithm": "coboosting", "coboosting.server_epochs": 5},
        _DISTILS,
        {LR: (), "coboosting.server_lr": (0.01, 0.04), "coboosting.generator_lr": (1e-3, 1e-2)},
        smaller=_few("coboosting"),
    ),
    "FedCVAE-Ens": _fedcvae("ens", ""),
    "FedCVAE-KD": _fedcvae("kd", " of a decoder that it trains for {decoder_epochs} epochs"),
    "gradient coding": Way({"algorithm": "gradient_coding", **_COPIES}, f"{_LOCAL}; {_TO_TWO}"),
}  # fmt: skip
"""All rows (methods with sharing strategies) by name, in the order of the table."""

FEDAVG = "real"
"""Name of the row of FedAvg without sharing, with which all rows are compared."""

ONE_SHOT = ("dense", "coboosting")
"""Methods whose clients train the classifier only once."""

STAYS = ("local_synthetic",)
"""Sharing strategies whose synthetic images do not leave the client."""

SENDS_COUNTS = ("fedgen",)
"""Methods whose clients send class counts, without an epsilon, and no images."""

WITH_DECODERS = ("fedcvae", "feddpms")
"""Methods whose clients train an autoencoder, from which images are drawn or decoded."""

RATES = {"smoke": "0.1", "small": "0.04,0.08,0.16,0.32", "paper": "0.01,0.03,0.1"}
"""Default of ``--lrs`` by preset: learning rates of clients, separated by commas."""

_SMALL = {"model.name": "encoder", "federation.rounds": 10, "client.epochs": 5, "measure.every": 0}
_OF_PRESET: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, "federation.rounds": 3, "client.epochs": 1, "data.limit": 300},
    "small": _SMALL,
    "paper": {"measure.every": 0},
}


def tries(way: Way, lrs: Sequence[float], everything: bool) -> list[Rates]:
    """Return the learning rates to try for a row: the defaults, then choices that change one rate.

    The default of the clients' rate is the middle of ``lrs``. The default of another rate is its first value in
    ``way.tries``.

    everything: vary all learning rates of the row (True), or only the clients' learning rate (False).
    """
    values = {name: (lrs[len(lrs) // 2], *lrs) if name == LR else grid for name, grid in way.tries.items()}
    default = {name: grid[0] for name, grid in values.items()}
    others = [{**default, name: value} for name, grid in values.items() for value in grid if everything or name == LR]
    return list(dict.fromkeys(tuple(rates.items()) for rates in (default, *others)))


def base(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields that all rows have in a preset; options of the command line override these fields."""
    return {**presets.preset(preset, dataset), **_OF_PRESET[preset]}


def fields(way: Way, options: parse.Options) -> dict[str, Any]:
    """Return the config fields that a row sets on top of the fields of ``base``; options: the options of the sweep."""
    preset, result = options["preset"], dict(way.fields)
    if result["algorithm"] in ONE_SHOT:
        epochs = options["federation.rounds"] * options["client.epochs"]
        result[f"{result['algorithm']}.client_epochs"] = epochs
    made_by = result.get("generator.name", "ddpm")
    result |= presets.generator(made_by, preset)
    if made_by == "private_ddpm":
        result |= private_presets.fields(preset)
        result.setdefault("generator.epochs", options["generator.epochs"])
        result["generator.target_epochs"] = result["generator.epochs"]
    if result.get("sharing.setting") == "ndpdc":
        result |= private_presets.NDPDC[preset]
    is_large = preset == "small" and options["data.name"] in presets.LARGE_IMAGES
    return {**result, **(way.smaller if preset == "smoke" else way.large if is_large else {})}


def trains_generators(way: Way) -> bool:
    """Return whether clients train generators of images, for a sharing strategy or as a part of the method."""
    return way.fields["algorithm"] in WITH_DECODERS or generates(way.fields.get("sharing.setting", "real"))


def is_summed(way: Way) -> bool:
    """Return whether clients' noise protects only the sum of all messages."""
    return way.fields.get("sharing.noise") == "summed"


def budget(way: Way, values: Mapping[str, Any]) -> str:
    """Return a row's budget of training as text, with the epochs and steps of ``values``, a configuration."""
    sections = f"{values['algorithm']}.", "sharing."
    constants = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(sections)}
    return way.budget.format(generator=values.get("generator.epochs"), **constants)
