"""The description of one experiment: frozen dataclasses, each field explained in a line (they are the ``--help``).

Names follow the papers' symbols where a paper has one: alpha, p, rho, C (participation), E (epochs), B (batch_size).
``check`` refuses what cannot be run, before any work, in one sentence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, get_type_hints

from fedcommons.errors import UserError, unknown

DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")
PARTITIONS = ("iid", "dirichlet_classes", "dirichlet_niid", "single_class")
SETTINGS = ("real", "local_synthetic", "shuffled_synthetic", "shuffled_real")
MODELS = ("cnn", "vgg11", "linear")
GENERATORS = ("ddpm",)


@dataclass(frozen=True)
class Data:
    """Which images, and which of them are held out."""

    name: str = "digits"
    """digits (in the package), mnist, fmnist, cifar10 or cifar100"""
    dir: str | None = None
    """folder with the data sets in torchvision's layout; default: the variable FEDCOMMONS_DATA, else ./data"""
    download: bool = False
    """fetch the data set into that folder if it is not there"""
    validation: float = 0.1
    """share of the training images held out before partitioning, in [0, 0.5]"""
    limit: int | None = None
    """keep only so many training images (drawn at random); default: all"""
    augment: bool | None = None
    """random flip and crop in training; default: for CIFAR only"""


@dataclass(frozen=True)
class Partition:
    """Who holds which training images."""

    name: str = "dirichlet_classes"
    """iid, dirichlet_classes (Lin et al. 2020; Fedssyn), dirichlet_niid (NIID-Bench) or single_class"""
    n_clients: int = 10
    """N, the number of clients"""
    alpha: float = 0.1
    """concentration of the Dirichlet law, > 0; smaller is more heterogeneous"""
    n_aux: int | None = None
    """clients that are dealt to together (dirichlet_classes); default: the paper's, see methods.md section 1"""
    recut: bool = True
    """cut dirichlet_classes again into N equal slices, as the paper does"""


@dataclass(frozen=True)
class Generator:
    """The generator that every client trains on a part of its own data."""

    name: str = "ddpm"
    """ddpm (Ho et al. 2020), conditional on the class"""
    rho: float = 0.75
    """share of a client's images that its generator sees, in (0, 1]"""
    epochs: int = 500
    """passes over that share"""
    batch_size: int = 256
    """images per step"""
    lr: float = 1e-4
    """learning rate of Adam"""
    channels: tuple[int, ...] = (64, 128, 128)
    """channels of the U-Net's levels; each level halves the image"""
    ema_decay: float = 0.9995
    """decay of the weights' moving average, reached by warm-up"""
    timesteps: int = 1000
    """T, steps of the diffusion in training"""
    schedule: str = "linear"
    """noise schedule: linear (Ho et al.) or squaredcos_cap_v2 (cosine)"""
    sampler: str = "ddpm"
    """ddpm (ancestral) or ddim (deterministic, for few steps)"""
    sampling_steps: int = 1000
    """steps of the sampler, at most T"""


@dataclass(frozen=True)
class Sharing:
    """What clients train on besides their own data."""

    setting: str = "real"
    """real, local_synthetic, shuffled_synthetic (Fedssyn) or shuffled_real (Fig. 1c)"""
    p: float | None = None
    """share of shared data in a client's training set, in [0, 1); default: the paper's, n_total/N images a client"""


@dataclass(frozen=True)
class Model:
    """The classifier that is federated."""

    name: str = "cnn"
    """cnn, vgg11 or linear"""
    channels: tuple[int, ...] = (16, 32)
    """channels of the cnn's two convolutions"""


@dataclass(frozen=True)
class Client:
    """Local training: plain SGD on the cross entropy."""

    lr: float = 0.05
    """learning rate, constant"""
    momentum: float = 0.0
    """momentum of SGD, in [0, 1); its state is new in every round"""
    weight_decay: float = 0.0
    """weight decay of SGD, >= 0"""
    epochs: int = 10
    """E, passes over the client's own data in a round"""
    batch_size: int = 32
    """B, images per step"""
    drop_last: bool = False
    """leave out a last batch that is not full (kept where it is the only one)"""
    equal_work: bool = True
    """with synthetic data, E' = max(1, floor(n_i E/(n_i + n~))) epochs, so that steps stay equal"""


@dataclass(frozen=True)
class Federation:
    """Rounds, participation and where clients run."""

    rounds: int = 30
    """R, rounds of communication"""
    participation: float = 1.0
    """C, share of the clients drawn in every round, in (0, 1]"""
    weighting: str = "uniform"
    """weights of clients in averages: uniform or samples (n_i)"""
    blocks: int = 4
    """a round's clients are summed in so many fixed blocks; decides rounding, so never a function of the machine"""
    executor: str = "serial"
    """serial (this process) or ray_actors; the results are the same bits"""
    actors: int = 2
    """actors of ray_actors, at most `blocks`"""
    gpus_per_actor: float = 1.0
    """share of a GPU an actor asks for, where there is a GPU"""
    checkpoint_every: int = 5
    """rounds between checkpoints, >= 1"""


@dataclass(frozen=True)
class Measure:
    """Convergence parameters at the server model."""

    every: int = 10
    """rounds between measurements of zeta^2 and sigma^2; 0: never"""


@dataclass(frozen=True)
class Tracking:
    """Weights & Biases, beside the run folder that is always written."""

    wandb: str = "offline"
    """online (needs a login; else falls back to offline), offline or off"""
    project: str = "fedcommons"
    """project of the W&B run"""
    group: str | None = None
    """group of the W&B run; a sweep sets its own name"""


@dataclass(frozen=True)
class Experiment:
    """One run: data -> partition -> sharing -> federation -> measures."""

    seed: int = 0
    """seed of everything that is drawn"""
    algorithm: str = "fedavg"
    """federated algorithm: fedavg"""
    target: float = 0.8
    """test accuracy in [0, 1] for rounds-to-target"""
    artifacts: str = "runs/artifacts"
    """folder of trained generators and synthetic images, shared between runs"""
    data: Data = field(default_factory=Data)
    partition: Partition = field(default_factory=Partition)
    generator: Generator = field(default_factory=Generator)
    sharing: Sharing = field(default_factory=Sharing)
    model: Model = field(default_factory=Model)
    client: Client = field(default_factory=Client)
    federation: Federation = field(default_factory=Federation)
    measure: Measure = field(default_factory=Measure)
    tracking: Tracking = field(default_factory=Tracking)


SHORT_NAMES = {
    "alpha": "partition.alpha",
    "p": "sharing.p",
    "rho": "generator.rho",
    "lr": "client.lr",
}
"""What sweeps may call a field (methods.md section 0)."""


def field_names(kind: type = Experiment, prefix: str = "") -> list[str]:
    """Dotted names of all fields: ``partition.alpha`` and so on."""
    names = []
    for name, hint in get_type_hints(kind).items():
        names += (
            field_names(hint, f"{prefix}{name}.") if is_dataclass(hint) and isinstance(hint, type) else [prefix + name]
        )
    return names


def override(config: Experiment, values: Mapping[str, Any]) -> Experiment:
    """A copy of ``config`` with these dotted fields replaced; a field that does not exist is a ``UserError``."""
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        if name not in field_names():
            raise unknown("config key", name, field_names())
        if section:
            config = replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
        else:
            config = replace(config, **{leaf: value})
    return config


def get(config: Experiment, name: str) -> Any:
    """The value of a dotted field."""
    section, _, leaf = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def to_dict(config: Experiment) -> dict[str, Any]:
    """Nested plain values, tuples as lists: what config.yaml holds."""
    plain = asdict(config)
    for section in plain.values():
        if isinstance(section, dict):
            section.update({k: list(v) for k, v in section.items() if isinstance(v, tuple)})
    return plain


def from_dict(values: Mapping[str, Any]) -> Experiment:
    """The experiment of a config.yaml that ``to_dict`` wrote (fields left out keep their defaults)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{k}": tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        else:
            flat[name] = value
    return override(Experiment(), flat)


IGNORED_BY_RESULTS = (
    "artifacts",
    "data.dir",
    "data.download",
    "federation.executor",
    "federation.actors",
    "federation.gpus_per_actor",
    "federation.checkpoint_every",
    "tracking.wandb",
    "tracking.project",
    "tracking.group",
)
"""Fields that may change between a run and its resumption: none of them decides a bit of the results."""


def same_results(a: Experiment, b: Experiment) -> list[str]:
    """Names of the fields that decide results and differ."""
    return [n for n in field_names() if n not in IGNORED_BY_RESULTS and get(a, n) != get(b, n)]


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False):
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not inside:  # also for nan
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise UserError(f"{name} must lie in {bounds}, got {value:g}.")


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise unknown(name, value, known)


def check(config: Experiment) -> None:
    """Raise ``UserError`` for what no data set could make right; what depends on the data is checked when loaded."""
    from fedcommons.algorithms import ALGORITHMS

    c, inf = config, float("inf")
    _one_of("algorithm", c.algorithm, ALGORITHMS)
    _one_of("data.name", c.data.name, DATASETS)
    _one_of("partition.name", c.partition.name, PARTITIONS)
    _one_of("sharing.setting", c.sharing.setting, SETTINGS)
    _one_of("model.name", c.model.name, MODELS)
    _one_of("generator.name", c.generator.name, GENERATORS)
    _one_of("generator.schedule", c.generator.schedule, ("linear", "squaredcos_cap_v2"))
    _one_of("generator.sampler", c.generator.sampler, ("ddpm", "ddim"))
    _one_of("federation.weighting", c.federation.weighting, ("uniform", "samples"))
    _one_of("federation.executor", c.federation.executor, ("serial", "ray_actors"))
    _one_of("tracking.wandb", c.tracking.wandb, ("online", "offline", "off"))
    _within("target", c.target, 0, 1, open_low=True)
    _within("seed", c.seed, 0, 2**62)
    _within("data.validation", c.data.validation, 0, 0.5)
    _within("partition.n_clients", c.partition.n_clients, 1, inf)
    _within("partition.alpha", c.partition.alpha, 0, inf, open_low=True, open_high=True)
    _within("generator.rho", c.generator.rho, 0, 1, open_low=True)
    _within("generator.lr", c.generator.lr, 0, inf, open_low=True, open_high=True)
    _within("generator.ema_decay", c.generator.ema_decay, 0, 1, open_high=True)
    _within("client.lr", c.client.lr, 0, inf, open_low=True, open_high=True)
    _within("client.momentum", c.client.momentum, 0, 1, open_high=True)
    _within("client.weight_decay", c.client.weight_decay, 0, inf, open_high=True)
    _within("federation.participation", c.federation.participation, 0, 1, open_low=True)
    _within("federation.gpus_per_actor", c.federation.gpus_per_actor, 0, 1, open_low=True)
    _within("measure.every", c.measure.every, 0, inf)
    for name in ("generator.epochs", "generator.batch_size", "generator.timesteps", "generator.sampling_steps",
                 "client.epochs", "client.batch_size", "federation.rounds", "federation.blocks", "federation.actors",
                 "federation.checkpoint_every"):  # fmt: skip
        _within(name, get(c, name), 1, inf)
    for name in ("partition.n_aux", "data.limit"):
        if get(c, name) is not None:
            _within(name, get(c, name), 1, inf)
    if c.sharing.p is not None:
        _within("sharing.p", c.sharing.p, 0, 1, open_high=True)
    if c.sharing.setting == "shuffled_real" and c.sharing.p is None:
        raise UserError("sharing.p must be set for setting shuffled_real: the share of real data that is swapped.")
    if len(c.model.channels) != 2 or min(c.model.channels) < 1:
        raise UserError(f"model.channels must be two positive numbers, got {list(c.model.channels)}.")
    if len(c.generator.channels) < 2 or min(c.generator.channels) < 1 or any(n % 8 for n in c.generator.channels):
        raise UserError(
            f"generator.channels must be two or more multiples of 8 (group norm), got {list(c.generator.channels)}."
        )
    if c.generator.sampling_steps > c.generator.timesteps:
        raise UserError(
            f"generator.sampling_steps must be at most generator.timesteps = {c.generator.timesteps}, "
            f"got {c.generator.sampling_steps}."
        )
    if c.federation.participation * c.partition.n_clients < 1 - 1e-9:
        raise UserError(
            f"federation.participation C = {c.federation.participation:g} of {c.partition.n_clients} clients "
            f"is less than one client; it must be at least {1 / c.partition.n_clients:g}."
        )
    if c.federation.executor == "ray_actors" and c.federation.actors > c.federation.blocks:
        raise UserError(
            f"federation.actors = {c.federation.actors} must be at most federation.blocks = {c.federation.blocks}: "
            "an actor more would have no block to work on."
        )


def flat_dict(config: Experiment) -> dict[str, Any]:
    """Dotted names to values, for W&B and tables."""
    return {name: get(config, name) for name in field_names()}
