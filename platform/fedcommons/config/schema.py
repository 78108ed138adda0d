"""The sections of an experiment: frozen dataclasses whose fields have a range and a line of help.

This module defines the fields that every run has. A component (algorithm, data set, partition, sharing strategy,
generator, model, learning rate schedule, straggler rule, tracker, measure) defines its own constants.
Names follow the symbols of the papers: alpha, p, rho, C (participation), E (epochs), B (batch_size).
If a field names a component, ``cli`` adds the valid names to its help.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fedcommons.config import registry


class Constants(Mapping[str, Any]):
    """A component's constants by name; hashable, so that functions of constants can be cached."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Constants({self._values})"


def _constant(section: Any, name: str) -> Any:
    """Return a constant of the section's chosen component, as if the constant were a field of the section."""
    if name.startswith("_") or name == "constants" or name not in section.constants:
        raise AttributeError(
            f"{type(section).__name__} has no field {name}, and its part has {list(section.constants)}"
        )
    return section.constants[name]


NONE, UNSET = Constants(), Constants()
"""``NONE``: no constants. ``UNSET``: a placeholder that ``complete`` replaces with the component's defaults."""


def complete(section: Any, kind: str, name: str | None) -> None:
    """Set unset constants of a section to the component's defaults. name: None if there is no component."""
    if section.constants is UNSET:
        values = {n: f.default for n, f in registry.constants(kind, name).items()} if name else {}
        object.__setattr__(section, "constants", Constants(values))


@dataclass(frozen=True)
class Data:
    """The data set, and the share of its images that is held out for validation."""

    name: str = "digits"
    """data set"""
    dir: str | None = None
    """folder with the data sets in torchvision's layout; default: the variable FEDCOMMONS_DATA, else ./data"""
    download: bool = False
    """fetch the data set into that folder if it is not there"""
    validation: Annotated[float, "[0, 0.5]"] = 0.1
    """share of the training images held out for validation, before partitioning"""
    validation_from: Annotated[str, "random | last"] = "random"
    """random: drawn from all training images; last: the last of the training file (Fedssyn's released code)"""
    limit: Annotated[int | None, "[1, 1e9]"] = None
    """number of training images to keep, drawn at random; default: all"""
    client_test: Annotated[float, "[0, 0.5]"] = 0.0
    """share of each client's images, one at least, that is its own test set and that nobody trains on; 0: none, but for
    clients that are whole groups of a data set whose test images have groups: these are theirs"""
    augment: bool | None = None
    """random flip and crop in training; default: for CIFAR only"""
    standardise: bool = True
    """models see pixels less the data set's mean, over its deviation; false: pixels in [0, 1] as they are"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "data", self.name)


@dataclass(frozen=True)
class Partition:
    """The assignment of training images to clients."""

    name: str = "dirichlet_classes"
    """how the training images are dealt to clients"""
    n_clients: Annotated[int, "[1, 1e9]"] = 10
    """N, the number of clients; dirichlet_plain and dirichlet_clients_all drop those that they leave without images,
    by_group and by_factor make as many as there are groups"""
    shift: Annotated[str, "none | noise | rotation | colour"] = "none"
    """what makes clients' images differ, the last client's most: Gaussian noise, a rotation, a change of colours"""
    shift_size: Annotated[float | None, "(0, 360]"] = None
    """of the last client: noise, variance of pixels in [0, 1] (default 0.1); rotation, degrees (90); colour, largest
    relative change of a channel (0.5)"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "partition", self.name)


@dataclass(frozen=True)
class Generator:
    """The generator that every client trains on part of its own data, if the sharing strategy needs a generator."""

    name: str = "ddpm"
    """what every client trains to draw images"""
    label_noise: Annotated[float, "[0, 1e6]"] = 0.0
    """standard deviation of the Gaussian noise on each class count that synthetic labels follow; 0: counts as they are,
    which no epsilon covers"""
    rho: Annotated[float, "(0, 1]"] = 0.75
    """share of a client's images that its generator sees"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "generator", self.name)


@dataclass(frozen=True)
class Sharing:
    """The data on which clients train in addition to their own data."""

    setting: str = "real"
    """sharing stage"""
    audit: bool = False
    """compare made images with those that generators saw and with held-out ones, before any is released: audit.json"""
    withhold: Annotated[str, "none | near_copies"] = "none"
    """near_copies: leave out made images that an audit finds too near to one that was seen; then no epsilon holds"""
    constants: Constants = UNSET
    __getattr__ = _constant

    @property
    def is_audited(self) -> bool:
        """Return whether the images are audited (``withhold`` needs an audit too)."""
        return self.audit or self.withhold != "none"

    def __post_init__(self) -> None:
        complete(self, "sharing", self.setting)


@dataclass(frozen=True)
class Model:
    """The model that the clients train together."""

    name: str = "cnn"
    """network or LightningModule"""
    projection: Annotated[int | None, "[1, 1e6]"] = None
    """outputs of a projection head before a network's last layer (MOON: 256); default: none"""
    weights: str | None = None
    """file of the weights to start from: .safetensors, or a state dict that torch.save wrote; default: drawn by seed"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "model", self.name)


@dataclass(frozen=True)
class Client:
    """Local training: minibatch steps on the cross entropy."""

    optimizer: Annotated[str, "sgd | adam"] = "sgd"
    """sgd or adam"""
    lr: Annotated[float, "(0, 1e38]"] = 0.05
    """learning rate"""
    lr_schedule: str = "constant"
    """factor of the learning rate in every round"""
    momentum: Annotated[float, "[0, 1)"] = 0.0
    """momentum of SGD; its state is new in every round"""
    weight_decay: Annotated[float, "[0, 1e38]"] = 0.0
    """weight decay"""
    epochs: Annotated[int, "[1, 1e9]"] = 10
    """E, passes over the client's own data in a round"""
    batch_size: Annotated[int, "[1, 1e9]"] = 32
    """B, images per step"""
    drop_last: bool = False
    """leave out a last batch that is not full (kept where it is the only one)"""
    equal_work: bool = True
    """with n~ synthetic images, train E' = max(1, floor(n_i E/(n_i + n~))) epochs, so steps stay about equal"""
    clip_norm: Annotated[float | None, "(0, inf)"] = None
    """L2 norm at which a step's gradient is clipped; a method's correction is added after; default: no clipping"""
    accumulate: Annotated[int, "[1, 1e9]"] = 1
    """batches whose gradients make one step, as if they were one batch; the last step of an epoch takes what is left"""
    precision: Annotated[str, "fp32 | tf32 | bf16 | fp16-mixed"] = "fp32"
    """of local training: fp32, tf32 (products on GPUs; on a CPU the same as fp32), and by torch's autocast bf16, or
    fp16-mixed, with a loss scale that begins anew"""
    batched: bool = False
    """train the clients of a block at once, as one tensor program: faster on few pixels, and other rounding"""
    graphs: bool = False
    """launch the kernels of a step as one (CUDA graphs): faster with small networks on a GPU; on a CPU as without"""
    onednn: bool = True
    """convolve with oneDNN in training; steps on few pixels are faster without it (presets smoke and small: digits),
    but for batched clients, which always have it"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "schedule", self.lr_schedule)


@dataclass(frozen=True)
class Federation:
    """Rounds, participation, and the processes in which clients run."""

    rounds: Annotated[int, "[1, 1e9]"] = 30
    """R, rounds of communication"""
    participation: Annotated[float, "(0, 1]"] = 1.0
    """C, share of the clients drawn in every round"""
    weighting: Annotated[str, "uniform | samples"] = "uniform"
    """weights of clients in averages: uniform or samples (n_i)"""
    blocks: Annotated[int, "[1, 1e6]"] = 4
    """number of fixed blocks in which a round's clients are summed; it decides rounding, so keep it on every machine"""
    executor: Annotated[str, "serial | ray_actors"] = "serial"
    """serial (this process) or ray_actors; the results are the same bits"""
    actors: Annotated[int, "[1, 1e9]"] = 2
    """actors of ray_actors, at most `blocks`"""
    gpus_per_actor: Annotated[float | str, "[0.0001, 1] or auto"] = 1.0
    """share of a GPU per actor, if there is a GPU; auto: as many on a GPU as needed and as its memory has room for"""
    checkpoint_every: Annotated[int, "[1, 1e9]"] = 5
    """rounds between checkpoints"""
    buffers: Annotated[str, "average | keep"] = "average"
    """BatchNorm's statistics: average (they travel with the model) or keep (each client keeps its own)"""
    memory_mb: Annotated[float, "(0, inf]"] = 1024.0
    """most memory of clients held in RAM between rounds, in 10^6 bytes; the rest is kept in files of the run folder"""
    max_norm: Annotated[float | None, "(0, inf)"] = None
    """largest L2 norm of a client's update (all it sends to be summed); larger ones are rejected; default: none"""
    stop: Annotated[str, "never | target | patience"] = "never"
    """end before round R: as soon as the target is reached, or when validation data show no progress any more"""
    stop_patience: Annotated[int, "[1, 1e9]"] = 10
    """rounds without a better stop_metric after which stop patience ends the run"""
    stop_metric: str = "accuracy"
    """what stop patience watches on validation data: accuracy, loss, or a metric with max or min, such as "f1 max" """

    @property
    def processes(self) -> int:
        """Return the number of processes that train a run's clients."""
        return self.actors if self.executor == "ray_actors" else 1


@dataclass(frozen=True)
class Straggler:
    """Clients that do not reply in time."""

    rule: str = "independent"
    """who is late"""
    partial: Annotated[str, "method | take | drop"] = "method"
    """what late clients have done under deadline or slow: take, drop, or as the method asks for (FedProx: take)"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "straggler", self.rule)


@dataclass(frozen=True)
class DP:
    """Differential privacy."""

    local: bool = False
    """train clients by DP-SGD: per-example clipping, noise, Poisson batches"""
    noise_multiplier: Annotated[float, "[0.001, 1e6]"] = 1.0
    """sigma, standard deviation of the noise divided by the clipping norm"""
    target_epsilon: Annotated[float | None, "(0, 1000]"] = None
    """epsilon of each client's local training in all rounds; its noise is solved for, in place of noise_multiplier"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 5.0
    """clipping norm: largest L2 norm of an example's gradient"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (epsilon, delta) guarantee"""
    at_once: Annotated[int, "[1, 1e9]"] = 1
    """examples whose gradients local training computes in one call: 1 is faster on most CPUs, some dozens on a GPU,
    with other rounding; a method's own loss is taken one example at a time"""
    noise: Annotated[str, "seeded | secret"] = "seeded"
    """seeded: reproducible, so that whoever knows the seed can subtract it and no epsilon is earned; secret: from the
    system's randomness, whose salt stays in your state directory"""


@dataclass(frozen=True)
class Evaluate:
    """How often models are evaluated, and whether they are also evaluated on each client's own examples."""

    every: Annotated[int, "[1, 1e9]"] = 1
    """rounds between evaluations; the untrained model and that of the last round always are"""
    chunk: Annotated[int, "[1, 1e9]"] = 1000
    """examples on which a model is evaluated at once; numbers that validation_step logs are averaged over chunks, which
    is wrong for F1 or AUC: there take the size of the largest set, or log torchmetrics objects"""
    clients: bool = False
    """evaluate the server model, and personal models where a method has them, on each client's own test examples (on
    training examples where none are held out, and names say train): clients.jsonl, means and spreads"""


@dataclass(frozen=True)
class Measure:
    """Measurement of convergence parameters at the server model."""

    every: Annotated[int, "[0, 1e9]"] = 10
    """rounds between measurements of zeta^2, sigma^2 and, with a pool, delta^2; 0: never"""
    samples: Annotated[int | None, "[16, 1e9]"] = None
    """number of each client's examples to measure on, with standard errors; default: all, without"""
    smoothness: bool = False
    """also measure L_max, L_p and the pool's L by Lanczos' iteration: hundreds of passes over the data"""
    clients: bool = False
    """evaluate the server model on each client's own training images: clients.jsonl, and the worst client; on test
    images, and with personal models: evaluate.clients"""
    measure: str | None = None
    """import path of a measure of your own, taken in the rounds of `every` besides; default: none"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "measure", self.measure)


@dataclass(frozen=True)
class Tracking:
    """Weights & Biases and other trackers, in addition to the run folder, which is always written."""

    wandb: Annotated[str, "online | offline | off"] = "offline"
    """online (needs a login; else falls back to offline), offline or off"""
    project: str = "fedcommons"
    """project of the W&B run"""
    group: str | None = None
    """group of the W&B run; a sweep sets its own name"""
    preset: str | None = None
    """preset that the fields come from, a tag of the W&B run; --preset sets it"""
    tracker: str | None = None
    """who is told every round besides the run folder and W&B"""
    constants: Constants = UNSET
    __getattr__ = _constant

    def __post_init__(self) -> None:
        complete(self, "tracker", self.tracker)
