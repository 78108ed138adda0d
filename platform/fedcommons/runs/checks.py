"""What no data set could make right in an experiment, refused in one sentence before any work.

What depends on the data is refused where they are loaded and dealt (``build.prepare``).
"""

from collections.abc import Iterable

from fedcommons.algorithms import ALGORITHMS
from fedcommons.config.experiment import DATASETS, GENERATORS, MODELS, PARTITIONS, SETTINGS, Experiment, get
from fedcommons.convergence.estimators import PARTS
from fedcommons.core.weighting import WEIGHTINGS
from fedcommons.errors import UserError, shown, unknown

LEAST = 1e-300
"""alpha below this: its draws would leave float64."""

MOST = 10**9
"""Of what is counted: epochs, rounds, images."""

MOST_HELD = 10**6
"""Of what takes memory each: channels, steps of a schedule, blocks."""


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False):
    inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
    if not inside:  # also for nan
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise UserError(f"{name} must lie in {bounds}, got {shown(value)}.")


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise unknown(name, value, known)


def check(config: Experiment) -> None:
    """Raise ``UserError`` for what no data set could make right; see also ``_check_algorithm``."""
    c, inf = config, float("inf")
    _one_of("algorithm", c.algorithm, ALGORITHMS)
    _one_of("data.name", c.data.name, DATASETS)
    _one_of("partition.name", c.partition.name, PARTITIONS)
    _one_of("sharing.setting", c.sharing.setting, SETTINGS)
    _one_of("model.name", c.model.name, MODELS)
    _one_of("generator.name", c.generator.name, GENERATORS)
    _one_of("generator.schedule", c.generator.schedule, ("linear", "squaredcos_cap_v2"))
    _one_of("generator.sampler", c.generator.sampler, ("ddpm", "ddim"))
    _one_of("federation.weighting", c.federation.weighting, WEIGHTINGS)
    _one_of("federation.executor", c.federation.executor, ("serial", "ray_actors"))
    _one_of("data.validation_from", c.data.validation_from, ("random", "last"))
    _one_of("federation.buffers", c.federation.buffers, ("average", "keep"))
    _one_of("client.optimizer", c.client.optimizer, ("sgd", "adam"))
    _one_of("tracking.wandb", c.tracking.wandb, ("online", "offline", "off"))
    _within("target", c.target, 0, 1, open_low=True)
    _within("seed", c.seed, 0, 2**62)
    _within("data.validation", c.data.validation, 0, 0.5)
    _within("partition.alpha", c.partition.alpha, 0, inf, open_low=True, open_high=True)
    if c.partition.alpha < LEAST:
        raise UserError(f"partition.alpha must be at least {LEAST:g}, got {c.partition.alpha:g}.")
    _within("generator.rho", c.generator.rho, 0, 1, open_low=True)
    _within("generator.lr", c.generator.lr, 0, inf, open_low=True, open_high=True)
    _within("generator.ema_decay", c.generator.ema_decay, 0, 1, open_high=True)
    _within("client.lr", c.client.lr, 0, inf, open_low=True, open_high=True)
    _within("client.momentum", c.client.momentum, 0, 1, open_high=True)
    _within("client.weight_decay", c.client.weight_decay, 0, inf, open_high=True)
    _within("federation.participation", c.federation.participation, 0, 1, open_low=True)
    _within("federation.gpus_per_actor", c.federation.gpus_per_actor, 1e-4, 1)  # Ray counts in 1/10,000
    _within("federation.memory_mb", c.federation.memory_mb, 0, inf, open_low=True)
    if c.federation.max_norm is not None:
        _within("federation.max_norm", c.federation.max_norm, 0, inf, open_low=True, open_high=True)
    _within("straggler.q", c.straggler.q, 0, 1, open_high=True)
    _within("measure.every", c.measure.every, 0, MOST)
    for name in ("partition.n_clients", "generator.epochs", "generator.batch_size", "client.epochs",
                 "client.batch_size", "federation.rounds", "federation.actors",
                 "federation.checkpoint_every"):  # fmt: skip
        _within(name, get(c, name), 1, MOST)
    for name in ("generator.timesteps", "generator.sampling_steps", "federation.blocks"):
        _within(name, get(c, name), 1, MOST_HELD)
    for name, most in (("partition.n_aux", MOST), ("data.limit", MOST), ("model.projection", MOST_HELD)):
        if get(c, name) is not None:
            _within(name, get(c, name), 1, most)
    for name in ("model.channels", "generator.channels"):
        for n in get(c, name):
            _within(name, n, 1, MOST_HELD)
    if not c.measure.every and (c.measure.samples is not None or c.measure.smoothness):
        raise UserError("measure.every must be at least 1 with measure.samples or measure.smoothness: 0 is never.")
    if c.measure.samples is not None:
        _within("measure.samples", c.measure.samples, 2 * PARTS, MOST)
    if c.sharing.p is not None:
        _within("sharing.p", c.sharing.p, 0, 1, open_high=True)
    if c.sharing.setting == "shuffled_real" and c.sharing.p is None:
        raise UserError("sharing.p must be set for setting shuffled_real: the share of real data that is swapped.")
    if len(c.model.channels) != 2:
        raise UserError(f"model.channels must be two positive numbers, got {shown(list(c.model.channels))}.")
    if len(c.generator.channels) < 2 or any(n % 8 for n in c.generator.channels):
        raise UserError(
            "generator.channels must be two or more multiples of 8 (group norm), "
            f"got {shown(list(c.generator.channels))}."
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
    if c.model.batch_norm and c.model.name != "cnn":
        raise UserError(f"model.batch_norm is an option of model.name cnn only, and model.name is {c.model.name}.")
    _check_algorithm(c)


def _check_algorithm(c: Experiment) -> None:
    """Hyper-parameters out of range, and what a method is not defined for."""
    inf = float("inf")
    _within("fedprox.mu", c.fedprox.mu, 0, inf, open_high=True)
    _within("moon.mu", c.moon.mu, 0, inf, open_high=True)
    _within("moon.temperature", c.moon.temperature, 0, inf, open_low=True, open_high=True)
    _within("feddyn.alpha", c.feddyn.alpha, 0, inf, open_low=True, open_high=True)
    if c.feddyn.clip is not None:
        _within("feddyn.clip", c.feddyn.clip, 0, inf, open_low=True)
    _within("fedmix.mix", c.fedmix.mix, 0, 1)
    _within("fedmix.mean_size", c.fedmix.mean_size, 1, MOST)
    _within("scaffold.option", c.scaffold.option, 1, 2)
    _within("dp.noise_multiplier", c.dp.noise_multiplier, 1e-3, inf, open_high=True)
    _within("dp.clip", c.dp.clip, 0, inf, open_low=True, open_high=True)
    _within("dp.delta", c.dp.delta, 0, 1, open_low=True, open_high=True)
    if c.client.optimizer == "adam" and c.client.momentum:
        raise UserError(f"client.momentum must be 0 with client.optimizer adam, got {c.client.momentum:g}.")
    if c.algorithm == "moon" and c.model.name == "linear" and not c.model.projection:
        raise UserError("model.name linear has no features for moon to compare; set model.projection or use cnn.")
    controls = c.algorithm == "fedpvr" or (c.algorithm == "scaffold" and c.scaffold.option == 2)
    if c.algorithm in ("scaffold", "fedpvr", "fednova") and c.client.optimizer != "sgd":
        raise UserError(f"client.optimizer must be sgd for {c.algorithm}, whose formulas count SGD steps.")
    if controls and c.client.momentum:
        other = " or scaffold.option 1" if c.algorithm == "scaffold" else ""
        raise UserError(
            f"client.momentum must be 0 for {c.algorithm}, whose control (x - y_i)/(K eta) is a mean of gradients for "
            f"plain SGD only, got {c.client.momentum:g}; use momentum 0{other}."
        )
    if c.dp.local and c.algorithm == "scaffold" and c.scaffold.option == 1:
        raise UserError("scaffold.option must be 2 with dp.local: option 1 sends a gradient that has no noise.")
    if c.dp.local and c.model.batch_norm:
        raise UserError("model.batch_norm must be false with dp.local: its statistics mix the examples of a batch.")
    if c.model.batch_norm and c.federation.buffers == "keep" and c.measure.every:
        raise UserError("measure.every must be 0 with federation.buffers keep: the server model has no statistics.")
