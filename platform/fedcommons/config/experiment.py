"""The description of one experiment: frozen dataclasses, each field explained in a line (they are the ``--help``).

Names follow the papers' symbols where a paper has one: alpha, p, rho, C (participation), E (epochs), B (batch_size).
``checks.check`` refuses what cannot be run, before any work, in one sentence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedcommons.errors import shown, unknown

DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")
PARTITIONS = ("iid", "dirichlet_classes", "dirichlet_niid", "dirichlet_clients", "single_class")
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
    validation_from: str = "random"
    """random: drawn from all training images; last: the last of the training file (Fedssyn's released code)"""
    limit: int | None = None
    """keep only so many training images (drawn at random); default: all"""
    augment: bool | None = None
    """random flip and crop in training; default: for CIFAR only"""


@dataclass(frozen=True)
class Partition:
    """Who holds which training images."""

    name: str = "dirichlet_classes"
    """iid, dirichlet_classes (Fedssyn), dirichlet_niid (NIID-Bench), dirichlet_clients (FedDyn) or single_class"""
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
    batch_norm: bool = False
    """BatchNorm after the cnn's convolutions"""
    projection: int | None = None
    """outputs of a projection head before the last layer (MOON: 256); default: none"""


@dataclass(frozen=True)
class Client:
    """Local training: minibatch steps on the cross entropy."""

    optimizer: str = "sgd"
    """sgd or adam"""
    lr: float = 0.05
    """learning rate, constant"""
    momentum: float = 0.0
    """momentum of SGD, in [0, 1); its state is new in every round"""
    weight_decay: float = 0.0
    """weight decay, >= 0"""
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
    buffers: str = "average"
    """BatchNorm's statistics: average (they travel with the model) or keep (each client keeps its own)"""
    memory_mb: float = 1024.0
    """clients' memory held in RAM between rounds, in 10^6 bytes; what is beyond rests in files of the run folder"""
    max_norm: float | None = None
    """largest L2 norm of a client's update, all it sends to be summed; a larger one is rejected; default: none"""


@dataclass(frozen=True)
class Straggler:
    """Clients that do not answer in time."""

    q: float = 0.0
    """probability that a drawn client's answer does not arrive, in [0, 1)"""


@dataclass(frozen=True)
class FedProx:
    """FedProx."""

    mu: float = 0.01
    """weight of the proximal term (mu/2) ||y - x||^2, >= 0"""


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD."""

    option: int = 2
    """new control: 1 (gradient at the server model) or 2 (from the local steps)"""


@dataclass(frozen=True)
class FedPVR:
    """FedPVR."""

    layers: str | None = None
    """corrected layers: patterns such as network.head.*, separated by commas; default: all linear layers"""


@dataclass(frozen=True)
class FedDyn:
    """FedDyn."""

    alpha: float = 0.01
    """weight of the dynamic regulariser, > 0"""
    clip: float | None = 10.0
    """largest norm of a step's gradient; null: not clipped"""
    squared: bool = True
    """squared proximal term (the paper); false: as Fedssyn's released code has it"""


@dataclass(frozen=True)
class Moon:
    """MOON."""

    mu: float = 1.0
    """weight of the contrastive loss, >= 0"""
    temperature: float = 0.5
    """temperature of the contrastive loss, > 0"""


@dataclass(frozen=True)
class FedMix:
    """FedMix."""

    mix: float = 0.05
    """lambda, share of the other clients' mean, in [0, 1]"""
    mean_size: int = 64
    """M, images in a mean; 1 shares every image as it is"""
    box: bool = False
    """the extra factor 1 - lambda of the paper's algorithm box"""


@dataclass(frozen=True)
class DP:
    """Differential privacy."""

    local: bool = False
    """train clients by DP-SGD: per-example clipping, noise, Poisson batches"""
    noise_multiplier: float = 1.0
    """sigma, standard deviation of the noise over the clipping norm, > 0"""
    clip: float = 5.0
    """C, largest norm of an example's gradient"""
    delta: float = 1e-5
    """delta of the guarantee, in (0, 1)"""


@dataclass(frozen=True)
class Measure:
    """Convergence parameters at the server model."""

    every: int = 10
    """rounds between measurements of zeta^2, sigma^2 and, with a pool, delta^2; 0: never"""
    samples: int | None = None
    """examples of each client that are measured, at least 16, with standard errors; default: all"""
    smoothness: bool = False
    """measure L_max, L_p and the pool's L too, by Lanczos' iteration: hundreds of passes over the data"""


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
    """fedavg, fedprox, scaffold, fedpvr, feddyn, fednova, moon or fedmix"""
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
    straggler: Straggler = field(default_factory=Straggler)
    fedprox: FedProx = field(default_factory=FedProx)
    scaffold: Scaffold = field(default_factory=Scaffold)
    fedpvr: FedPVR = field(default_factory=FedPVR)
    feddyn: FedDyn = field(default_factory=FedDyn)
    moon: Moon = field(default_factory=Moon)
    fedmix: FedMix = field(default_factory=FedMix)
    dp: DP = field(default_factory=DP)
    measure: Measure = field(default_factory=Measure)
    tracking: Tracking = field(default_factory=Tracking)


SHORT_NAMES = {
    "alpha": "partition.alpha",
    "p": "sharing.p",
    "rho": "generator.rho",
    "sigma": "dp.noise_multiplier",
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
    """The experiment of a config.yaml that ``to_dict`` wrote (fields left out keep their defaults).

    Raises:
        UserError: a key that no field has, as a later version may have written it.
        ValueError: a value of another type than its field's.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{k}": tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        else:
            flat[name] = value
    found = override(Experiment(), flat)
    for name, value in flat.items():
        kinds = kinds_of(name)
        if type(value) not in kinds:
            raise ValueError(f"{name} is {shown(value)} and no {' or '.join(kind.__name__ for kind in kinds)}")
    return found


def kinds_of(name: str) -> tuple[type, ...]:
    """The types that values of this field have."""
    section, _, leaf = name.rpartition(".")
    hint = get_type_hints(get_type_hints(Experiment)[section] if section else Experiment)[leaf]
    kinds = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
    return (*kinds, int) if float in kinds else kinds


IGNORED_BY_RESULTS = (
    "artifacts", "data.dir", "data.download", "federation.executor", "federation.actors", "federation.gpus_per_actor",
    "federation.checkpoint_every", "federation.memory_mb", "tracking.wandb", "tracking.project", "tracking.group",
)  # fmt: skip
"""Fields that may change between a run and its resumption: none of them decides a bit of the results."""


ADDED = ("federation.max_norm",)
"""Fields that came after cells had names: in no name at their default, so that finished cells keep theirs."""


def same_results(a: Experiment, b: Experiment) -> list[str]:
    """Names of the fields that decide results and differ."""
    return [n for n in field_names() if n not in IGNORED_BY_RESULTS and get(a, n) != get(b, n)]


def deciding(config: Experiment) -> dict[str, Any]:
    """Dotted names to values of the fields that decide results, without those ``ADDED`` that are at their default."""
    left_out = {*IGNORED_BY_RESULTS, *(n for n in ADDED if get(config, n) == get(Experiment(), n))}
    return {n: get(config, n) for n in field_names() if n not in left_out}


def flat_dict(config: Experiment) -> dict[str, Any]:
    """Dotted names to values, for W&B and tables."""
    return {name: get(config, name) for name in field_names()}
