"""Checks of an experiment's fields and their combinations that need no data, no module and no method.

The range of a field is checked where the field is defined, and a component checks its own constants. A failed check is
reported in one sentence before any work. Checks of fields with data, module or method follow in ``runs.build``.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from fedcommons.config import live_objects, pairs, registry, target, user_code, weights_file
from fedcommons.config.dotted import fields_for
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, quote

OF_STEPS = (
    "client.lr_schedule", "client.warmup", "client.momentum", "client.weight_decay", "client.clip_norm",
    "client.accumulate", "client.precision", "client.batched", "client.graphs",
)  # fmt: skip
"""Fields of local training that are refused for a method whose clients make no local steps. Further fields of local
training, such as client.lr, are not refused, as presets set them for all methods."""


def validate(config: Experiment) -> None:
    """Check the fields of an experiment, without loading its data.

    Raises:
        UserError: the config is invalid for every data set.
    """
    c, flat = config, config.flat
    known_fields = fields_for({kind: [name] for kind, name in config.chosen.items()})
    for name, field in known_fields.items():
        if name not in flat:
            if name in registry.OPTIONAL:
                continue
            raise UserError(f"{name} is missing: its component got this field after the experiment was written.")
        if type(flat[name]) not in field.kinds and Any not in field.kinds:
            kinds = " or ".join(kind.__name__ for kind in field.kinds)
            raise UserError(f"{name} takes {kinds}, got {quote(flat[name])}.")
        field.check(name, flat[name])
    for name in flat:
        if name not in known_fields and not name.startswith("source."):
            raise UserError(f"{name} is not a field of the chosen components.")
    require_sources(c.chosen, c.source, c.model.weights)
    if c.data.validation + c.data.public >= 1:
        raise UserError("data.validation + data.public must be below 1, so that images remain for training, got 1.")
    _validate_stop(config)
    if not c.model.weights and (c.model.weights_map is not None or not c.model.weights_strict):
        raise UserError("model.weights_map and model.weights_strict false need a file, model.weights.")
    for name in (trackers := registry.tracker_names(c.tracking.tracker)):
        require_tracker(name)
    if len(set(trackers)) < len(trackers) or len([*filter(registry.is_user_defined, trackers)]) > 1:
        raise UserError(
            "tracking.tracker must list each tracker once, and at most one of your own, got "
            f"{quote(c.tracking.tracker)}."
        )
    if not c.measure.every and (c.measure.samples is not None or c.measure.smoothness or c.measure.measure):
        raise UserError("measure.every must be at least 1 with measure.samples, smoothness or measure (0 is never).")
    if c.measure.measure:
        registry.make("measure", c.measure.measure, c.measure.constants)
    if c.partition.shift == "none" and c.partition.shift_size is not None:
        raise UserError("partition.shift_size needs a partition.shift: noise, rotation or colour.")
    if c.federation.executor == "ray_actors" and c.federation.actors > c.federation.blocks:
        actors, blocks = c.federation.actors, c.federation.blocks
        raise UserError(f"federation.actors must be at most federation.blocks, which is {blocks}, got {actors}.")
    if c.federation.transport == "fast" and c.federation.executor == "serial":
        raise UserError("federation.transport fast needs federation.executor ray_actors, as serial sends no messages.")
    compressed = compressor(c.communication.compress)
    if not c.communication.error_feedback and (compressed is None or compressed[0] != "topk"):
        raise UserError("communication.error_feedback false changes nothing without --communication.compress topk.")
    if c.measure.clients and c.evaluate.clients:
        raise UserError("measure.clients must be false with evaluate.clients true: clients.jsonl records only one.")
    if not c.evaluate.new_clients and c.evaluate.adapt_epochs != type(c.evaluate).adapt_epochs:
        raise UserError("evaluate.adapt_epochs changes nothing without --evaluate.new_clients.")
    for name in ("share", "scale", "target"):
        is_used = c.attack.name == "backdoor" if name == "target" else c.attack.name != "none"
        if not is_used and getattr(c.attack, name) != getattr(type(c.attack), name):
            raise UserError(f"attack.{name} changes nothing with attack.name {c.attack.name}.")
    if c.dp.target_epsilon is not None and not c.dp.local:
        raise UserError("dp.target_epsilon is for local training by DP-SGD: it needs dp.local true.")
    if c.dp.target_epsilon is not None and c.dp.noise_multiplier != type(c.dp).noise_multiplier:
        raise UserError("set either dp.target_epsilon or dp.noise_multiplier, not both.")
    if c.dp.local and c.client.precision == "fp16-mixed":
        raise UserError("client.precision must be fp32, tf32 or bf16 with dp.local: a skipped step reveals data.")
    if c.dp.local and c.client.accumulate > 1:
        steps = c.client.accumulate
        raise UserError(f"client.accumulate must be 1 with dp.local, got {steps}: use a larger client.batch_size.")
    idle = [n for n, f in known_fields.items() if n.startswith("dp.central_") and flat[n] != f.default]
    if idle and not c.dp.central:
        raise UserError(f"{idle[0]} has no effect without dp.central true.")
    if c.dp.central_epsilon is not None and c.dp.central_noise != type(c.dp).central_noise:
        raise UserError("set either dp.central_epsilon or dp.central_noise, not both.")
    if c.client.optimizer == "adam" and c.client.momentum:
        raise UserError(f"client.momentum must be 0 with client.optimizer adam, got {c.client.momentum:g}.")
    pairs.require_allowed(flat)
    is_plain = not c.dp.local and c.client.accumulate == 1
    if c.client.batched and not (is_plain and c.client.precision == "fp32"):
        raise UserError("client.batched needs client.accumulate 1 and client.precision fp32.")
    if c.client.graphs and not (is_plain and not c.client.batched and c.client.precision != "fp16-mixed"):
        raise UserError("client.graphs needs dp.local and client.batched false, client.accumulate 1, no fp16-mixed.")
    if c.dp.at_once > 1 and not (c.dp.local and c.client.precision in ("fp32", "tf32")):
        raise UserError("dp.at_once above 1 needs dp.local true, and client.precision fp32 or tf32.")


def compressor(text: str) -> tuple[str, float] | None:
    """Return name and constant of the compressor in ``communication.compress``: ("topk", share) or ("qsgd", bits).

    Raises:
        UserError: the text is not ``none``, ``topk:SHARE`` or ``qsgd:BITS`` with a constant in its range.
    """
    name, _, number = text.partition(":")
    if text == "none":
        return None
    with suppress(ValueError):
        if name == "topk" and 0 < (share := float(number)) <= 1:
            return name, share
        if name == "qsgd" and 2 <= (bits := int(number)) <= 16:
            return name, bits
    raise UserError(
        "communication.compress must be none, topk:SHARE with a SHARE of the values in (0, 1], or qsgd:BITS with a "
        f"whole number of BITS in [2, 16], got {quote(text)}."
    )


def _validate_stop(config: Experiment) -> None:
    """Check that the run logs the metrics of target and early stopping. Refuse stopping fields without effect."""
    f, usual = config.federation, type(config.federation)
    target.require_measured("target", target.read(config.target).metric, config.flat)
    watched, _ = target.validation_metric(f.stop_metric)
    if f.stop == "patience":
        target.require_measured("federation.stop_metric", watched, config.flat)
        return
    for name in ("stop_patience", "stop_metric"):
        if getattr(f, name) != getattr(usual, name):
            raise UserError(f"federation.{name} changes nothing without --federation.stop patience.")


def require_no_steps(config: Experiment) -> None:
    """Refuse fields of local training that are not at their default, for a method whose clients make no local steps."""
    fields = fields_for({kind: [name] for kind, name in config.chosen.items()})
    for name in OF_STEPS:
        if name in config.flat and config.flat[name] != fields[name].default:
            raise UserError(f"{name} changes nothing for {config.algorithm}, whose clients make no local steps.")


def require_sources(names: Mapping[str, str], digests: Mapping[str, str], weights: str | None = None) -> None:
    """Check that user-defined components and the weights file have not changed since the experiment was created.

    names: kind -> component. digests: kind -> hash of the component's code, and ``weights`` -> hash of the file.

    Raises:
        UserError: code or weights have changed, or two components need different Python modules of the same name.
    """
    for kind, name in names.items():
        if registry.source(name) != digests.get(kind):
            if live_objects.is_live(name):
                raise UserError(
                    f"{kind} {quote(name)} was defined again after this experiment was made: call experiment(...) "
                    "again, and give different classes different names."
                )
            where, *others = name.rpartition(":")[0], *list(registry.files(name))[1:]
            what = f"{where} or what it imports ({', '.join(others)})" if others else where
            is_not = "is not what it was" if others else "is not the file it was"
            raise UserError(f"{kind} {quote(name)}: {what} {is_not} when this experiment was written.")
    if weights and weights_file.digest(weights) != digests.get("weights"):
        raise UserError(f"model.weights {quote(weights)} is not the file it was when this experiment was written.")
    if conflict := _clash(names.values()):
        raise UserError(f"{conflict}: a process can import only one module of this name, so rename one.")


def _clash(names: Iterable[str]) -> str | None:
    """Return a message if two components import different modules of the same name, which a process cannot load."""
    seen: dict[str, tuple[str, user_code.Module]] = {}
    for part in names:
        for name, module in (code.modules if (code := registry.code(part)) else {}).items():
            other, its = seen.setdefault(name, (part, module))
            if its.content != module.content:
                return f"{other} and {part} import different modules called {name} ({its.file}, {module.file})"
    return None


def require_tracker(name: str) -> None:
    """Check that a tracker exists, has the functions of a tracker, and that its package is installed."""
    if name in ("tensorboard", "mlflow", "trackio") and find_spec(name) is None:
        raise UserError(f"tracking.tracker {name} needs a package: pip install 'fedcommons[{name}]'.")
    registry.require_attributes("tracker", name)
