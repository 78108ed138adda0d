"""An experiment as dotted names and values: ``partition.alpha``, ``fedprox.mu`` and so on.

It has the fields of the chosen parts only. So a new method, or a new field with a default, changes no hash and no name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from fedcommons.config import registry, weights_file
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field, fields_of
from fedcommons.config.registry import KINDS, OPTIONAL
from fedcommons.config.schema import (  # fmt: skip
    DP,
    Client,
    Constants,
    Data,
    Evaluate,
    Federation,
    Generator,
    Measure,
    Model,
    Partition,
    Sharing,
    Straggler,
    Tracking,
)
from fedcommons.errors import UserError, shown, unknown

SECTIONS = {
    "data": Data, "partition": Partition, "sharing": Sharing, "generator": Generator, "model": Model, "client": Client,
    "federation": Federation, "straggler": Straggler, "dp": DP, "evaluate": Evaluate, "measure": Measure,
    "tracking": Tracking,
}  # fmt: skip

IGNORED_BY_RESULTS = (
    "artifacts", "storage", "data.dir", "data.download", "federation.executor", "federation.actors",
    "federation.gpus_per_actor", "federation.checkpoint_every", "federation.memory_mb", "tracking.wandb",
    "tracking.project", "tracking.group",
)  # fmt: skip
"""Fields of every run that may change between it and its resumption, because no result depends on them."""

SHORT_NAMES = {
    "alpha": "partition.alpha", "p": "sharing.p", "rho": "generator.rho", "sigma": "dp.noise_multiplier",
    "lr": "client.lr", "dataset": "data.name", "data": "data.name", "data_dir": "data.dir", "download": "data.download",
    "model": "model.name", "partition": "partition.name", "sharing": "sharing.setting", "setting": "sharing.setting",
    "generator": "generator.name", "wandb": "tracking.wandb",
}  # fmt: skip
"""Short names of fields, which every sweep accepts: most are the symbols of the papers."""

_HELD = {"constants", "source", "beside", *SECTIONS}


def is_ignored(name: str) -> bool:
    """Whether no result depends on a field: those of ``IGNORED_BY_RESULTS``, and a tracker, its constants and its code.

    A measure is none of these: its numbers stand in the record, which is the same after a resumption.
    """
    return name in IGNORED_BY_RESULTS or name.startswith("tracking.") or name == "source.tracker"


@cache
def own_fields() -> Mapping[str, Field]:
    """The fields of every run, and those of the section ``generator``."""
    found = dict(fields_of(Experiment, _HELD))
    for section, kind in SECTIONS.items():
        found |= {f"{section}.{n}": f for n, f in fields_of(kind, ("constants",)).items()}
    return found


def fields_for(chosen: Mapping[str, Sequence[str]], reread: bool = True) -> dict[str, Field]:
    """The fields of experiments with these parts (kind to names); without a generator, no field of generators.

    reread: see ``parts.source``.
    """
    found = {n: f for n, f in own_fields().items() if chosen.get("generator") or not n.startswith("generator.")}
    for kind, names in chosen.items():
        for name in names:
            section = registry.section(kind, name)
            if kind == "algorithm" and section in SECTIONS:
                raise UserError(f"algorithm {name} needs another name: {section} is a section of every experiment.")
            constants = registry.constants(kind, name, reread)
            if registry.is_own(name) and (taken := [n for n in constants if f"{section}.{n}" in own_fields()]):
                raise UserError(
                    f"{KINDS[kind].field} {shown(name)}: its constant {taken[0]} needs another name, as every "
                    f"experiment has a field {section}.{taken[0]}."
                )
            found |= {f"{section}.{n}": f for n, f in constants.items()}
    return found


def full_name(
    name: str, known: Collection[str], chosen: Mapping[str, Sequence[str]], short: Mapping[str, str] = SHORT_NAMES
) -> str:
    """The full name of a field given by a short name, or under its part's name (``resnetgn.width``)."""
    section, _, leaf = name.rpartition(".")
    for kind, parts_ in chosen.items() if name not in known else ():
        if section in map(registry.label, parts_) and f"{KINDS[kind].section}.{leaf}" in known:
            return f"{KINDS[kind].section}.{leaf}"
    return name if name in known else short.get(name, name)


def full_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """These values by the full names of the fields that are meant."""
    given = {SHORT_NAMES.get(name, name): value for name, value in values.items()}
    chosen = {kind: [name] for kind, name in _names(given).items()}
    known = fields_for(chosen)
    return {full_name(name, known, chosen): value for name, value in given.items()}


def generates(setting: str) -> bool:
    """Whether every client trains a generator for this sharing stage."""
    return registry.defines("sharing", setting, "needs")


def choose(values: Mapping[str, Any], beside: Collection[str] = ()) -> Experiment:
    """The experiment that these dotted fields describe. Its ``beside`` gets the fields of parts that are not chosen.

    beside: names that no part of the package has and that are allowed all the same: fields of the user's own parts.

    Raises:
        UserError: a part cannot be found, no part has a field, or a value is out of its range.
    """
    names = _names(values)
    known = fields_for({kind: [name] for kind, name in names.items()})
    for name in values:
        if name not in known and name not in beside and not name.startswith("source."):
            _require_owned(name, known)
    source = {kind: found for kind, name in names.items() if (found := registry.source(name))}
    if file := values.get("model.weights"):
        source["weights"] = weights_file.digest(str(file))
    rest = {n: v for n, v in values.items() if n not in known and not n.startswith("source.")}
    found = {n: values.get(n, f.default) for n, f in known.items()}
    for name, field in known.items():
        if type(found[name]) in field.kinds:  # other types are refused with all else that is wrong, before the run
            field.check(name, found[name])
    return _build(found, source, rest)


def override(config: Experiment, values: Mapping[str, Any]) -> Experiment:
    """A copy of ``config`` with these dotted fields replaced; a newly chosen part starts with its defaults.

    Raises:
        UserError: the experiment with these parts does not have a field.
    """
    old, now = config.flat, _names({**config.flat, **values})
    kept = {n: v for n, v in old.items() if not _replaced(n, config, now)}
    found = choose({**config.beside, **kept, **values}, config.beside)
    for name, value in values.items():
        if name not in found.flat and not (name in OPTIONAL and value is None):
            raise not_chosen(name, found)
    return found


def recorded(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a run's records state: no noise multiplier where a target epsilon decides the noise."""
    left_out = {"dp.noise_multiplier"} if dotted.get("dp.target_epsilon") is not None else set()
    return {name: value for name, value in dotted.items() if name not in left_out}


def to_dict(config: Experiment) -> dict[str, Any]:
    """The fields as nested plain values, tuples as lists, as in config.yaml."""
    nested: dict[str, Any] = {}
    for name, value in recorded(config.flat).items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = list(value) if type(value) is tuple else value
    return nested


def effective(values: Mapping[str, Any], p: float | None) -> dict[str, float]:
    """The alpha, p, rho, sigma and lr that a run really had, by these names; those that it did not use are left out.

    alpha is there if the partition has one, rho if there is a generator, sigma if clients train by DP-SGD.
    values: the run's dotted fields; p: the share of shared data that resulted.
    """
    solved = values.get("dp.target_epsilon") is not None  # each client has a sigma of its own
    sigma = values["dp.noise_multiplier"] if values["dp.local"] and not solved else None
    alpha, rho = values.get("partition.alpha"), values.get("generator.rho")
    found = {"alpha": alpha, "p": p, "rho": rho, "sigma": sigma, "lr": values["client.lr"]}
    return {name: value for name, value in found.items() if value is not None}


def from_dict(values: Mapping[str, Any]) -> Experiment:
    """The experiment of a config.yaml that ``to_dict`` wrote; missing fields have their defaults.

    Own parts are not imported: their constants are taken as they are in the file.

    Raises:
        UserError: a key is no field; a later version may have written it.
        ValueError: a value has another type than its field.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        flat |= {f"{name}.{k}": tuple(v) if isinstance(v, list) else v for k, v in inner} or {name: value}
    named = {kind: flat.get(k.field, own_fields()[k.field].default) for kind, k in KINDS.items()}
    names: dict[str, Any] = {
        kind: name for kind, name in named.items() if name is not None or not KINDS[kind].is_optional
    }
    if wrong := [kind for kind, name in names.items() if not isinstance(name, str)]:
        raise ValueError(f"{KINDS[wrong[0]].field} is {shown(names[wrong[0]])} and no str")
    if not (generates(names["sharing"]) if not registry.is_own(names["sharing"]) else "generator" in values):
        del names["generator"]
    known = fields_for({kind: [name] for kind, name in names.items() if not registry.is_own(name)})
    if "generator" in names:
        known |= {n: f for n, f in own_fields().items() if n.startswith("generator.")}
    sections = {registry.section(kind, name) for kind, name in names.items() if registry.is_own(name)}
    kept = {n: known[n].default for n in known}
    for name, value in flat.items():
        if name in known:
            if type(value) not in known[name].kinds:
                kinds = " or ".join(kind.__name__ for kind in known[name].kinds)
                raise ValueError(f"{name} is {shown(value)} and no {kinds}")
        elif name.partition(".")[0] not in {*sections, "source"}:
            _require_owned(name, known)
            continue
        kept[name] = value
    source = {n.removeprefix("source."): kept.pop(n) for n in list(kept) if n.startswith("source.")}
    return _build(kept, source)


def same_results(a: Experiment, b: Experiment) -> list[str]:
    """Names of the fields that differ and on which results depend; empty if the results must be the same."""
    one, other = a.flat, b.flat
    missing = object()
    names = [n for n in {**one, **other} if not is_ignored(n)]
    return [n for n in names if one.get(n, missing) != other.get(n, missing)]


def deciding(config: Experiment) -> dict[str, Any]:
    """Dotted names to values of the fields that results depend on, without those at their default.

    Hashes are made of this, so a new field changes no old hash. Therefore a default must never change: add a new field
    instead.
    """
    known = fields_for({kind: [name] for kind, name in config.chosen.items()}, reread=False)
    flat = {n: v for n, v in config.flat.items() if not is_ignored(n)}
    return {n: v for n, v in flat.items() if n not in known or v != known[n].default}


def part_of(config: Experiment, kind: str) -> Any:
    """The chosen part of this kind, made with its constants: an algorithm, a sharing stage or a generator."""
    section = config if kind == "algorithm" else getattr(config, kind)
    return registry.make(kind, config.chosen[kind], section.constants)


def parts_of_own(config: Experiment) -> list[str]:
    """The options that name the user's own parts of an experiment, such as ``--algorithm my_lab.py:FedAvgM``."""
    return [f"--{KINDS[kind].field} {name}" for kind, name in config.chosen.items() if registry.is_own(name)]


def not_chosen(name: str, config: Experiment) -> UserError:
    """The error that says why the experiment has no such field."""
    return of_others(name, {k: [n] for k, n in config.chosen.items()}) or unknown("config key", name, config.flat)


def of_others(name: str, chosen: Mapping[str, Sequence[str]]) -> UserError | None:
    """The error for a field of a part that is not chosen; None if no part has such a field."""
    if (
        name.startswith("generator.")
        and not chosen.get("generator")
        and (name in own_fields() or registry.owners(name))
    ):
        if any(generates(one) for one in chosen["sharing"]):
            return UserError(
                f"{name} needs --generator.name {' or '.join(KINDS['generator'].known)}, and it names none."
            )
        settings = ", ".join(chosen["sharing"])
        able = [one for one in KINDS["sharing"].known if generates(one)]
        return UserError(f"{name} needs --sharing.setting {' or '.join(able)}, and sharing.setting is {settings}.")
    if owned := registry.owners(name):
        kind, names = owned
        field = KINDS[kind].field
        return UserError(f"{name} needs --{field} {' or '.join(names)}, and {field} is {', '.join(chosen[kind])}.")
    return None


def _names(values: Mapping[str, Any]) -> dict[str, str]:
    """The name of the part of each kind that these values choose; no kind that a run need not have and has not."""
    found = {kind: values.get(k.field, own_fields()[k.field].default) for kind, k in KINDS.items()}
    names = {kind: str(name) for kind, name in found.items() if name is not None or not KINDS[kind].is_optional}
    if not generates(names["sharing"]):
        del names["generator"]
    return names


def _require_owned(name: str, known: Mapping[str, Field]) -> None:
    """Check that a field that is not of the chosen parts is of some part of the package."""
    if name not in own_fields() and not registry.owners(name):
        raise unknown("config key", name, known)


def _replaced(name: str, config: Experiment, now: Mapping[str, str]) -> bool:
    """Whether a field of ``config`` is a constant of a part that is no longer chosen."""
    return (
        name not in own_fields()
        and any(
            name.startswith(f"{registry.section(kind, old)}.") and now.get(kind) != old
            for kind, old in config.chosen.items()
        )
    ) or (name.startswith("generator.") and "generator" not in now)


def _build(flat: Mapping[str, Any], source: Mapping[str, str], beside: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment with these fields."""
    scalars = {n: v for n, v in flat.items() if "." not in n}
    made: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        held = {n.partition(".")[2]: v for n, v in flat.items() if n.startswith(f"{section}.")}
        own = {f.name for f in fields(kind)} - {"constants"}
        given = {n: v for n, v in held.items() if n in own}
        if "constants" in {f.name for f in fields(kind)}:
            given["constants"] = Constants({n: v for n, v in held.items() if n not in own})
        if held:
            made[section] = kind(**given)
    section = registry.section("algorithm", scalars["algorithm"])
    constants = {n.partition(".")[2]: v for n, v in flat.items() if n.startswith(f"{section}.")}
    made |= {"constants": Constants(constants), "source": Constants(source), "beside": Constants(beside)}
    return Experiment(**scalars, **made)
