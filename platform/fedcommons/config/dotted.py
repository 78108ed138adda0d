"""Conversion between experiments and flat mappings from dotted names (``partition.alpha``, ``fedprox.mu``) to values.

An experiment has only the fields of the chosen components. Therefore a new method, or a new field with a default value,
changes neither the hash nor the name of an existing experiment.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from fedcommons.config import hints, registry
from fedcommons.config.experiment import Experiment, from_flat
from fedcommons.config.fields import Field, fields_of
from fedcommons.config.registry import KINDS, OPTIONAL
from fedcommons.config.schema import SECTIONS
from fedcommons.config.section import UNSET, Constants
from fedcommons.errors import UserError, quote, unknown

IGNORED_BY_RESULTS = (
    "artifacts", "storage", "storage_name", "data.dir", "data.download", "federation.executor", "federation.actors",
    "federation.gpus_per_actor", "federation.transport", "federation.checkpoint_every", "federation.memory_mb",
    "source.tracker",
)  # fmt: skip
"""Fields that may change when a run is resumed, because no result depends on these fields, as on ``tracking.*``."""

SHORT_NAMES = {
    "alpha": "partition.alpha", "p": "sharing.p", "rho": "generator.rho", "sigma": "dp.noise_multiplier",
    "lr": "client.lr", "rounds": "federation.rounds", "clients": "partition.n_clients", "epochs": "client.epochs",
    "batch_size": "client.batch_size", "dataset": "data.name", "data": "data.name", "data_dir": "data.dir",
    "download": "data.download", "model": "model.name", "partition": "partition.name", "sharing": "sharing.setting",
    "setting": "sharing.setting", "generator": "generator.name", "wandb": "tracking.wandb",
}  # fmt: skip
"""Short option name -> dotted name of the field. Every command accepts the short names; most are papers' symbols."""

NO_SHARING = "none"
"""Name that users may write for the sharing strategy ``real`` (no sharing). Configs and run folders store ``real``."""

NO_SHARING_SHOWN = "no sharing"
"""What tables, pictures and the terminal show for the sharing strategy ``real``."""


def is_ignored(name: str) -> bool:
    """Return whether the run's results are independent of the field ``name``.

    Results are independent of the fields ``IGNORED_BY_RESULTS``, of the tracker, and of the tracker's constants and
    code. Results depend on the measure, because its numbers are part of the run's record, which a resumption must
    reproduce.
    """
    return name in IGNORED_BY_RESULTS or name.startswith("tracking.")


@cache
def common_fields() -> Mapping[str, Field]:
    """Return dotted name -> ``Field`` for all fields of the sections, without the constants of components."""
    result = fields_of(Experiment, {"constants", "source", "inactive", *SECTIONS})
    for section, kind in SECTIONS.items():
        result |= {f"{section}.{n}": f for n, f in fields_of(kind, ("constants",)).items()}
    return result


def fields_for(chosen: Mapping[str, Sequence[str]], reread: bool = True) -> dict[str, Field]:
    """Return dotted name -> ``Field`` for experiments with the components ``chosen`` (kind -> names).

    The section ``generator`` is included only if a generator is chosen. reread: see ``registry.source``.

    Raises:
        UserError: a user-defined component has the name of a section, or a constant with the name of a common field.
    """
    return dict(_read_fields(tuple((k, n, registry.source(n, reread)) for k, names in chosen.items() for n in names)))


@lru_cache(maxsize=256)
def _read_fields(parts: tuple[tuple[str, str, str | None], ...]) -> Mapping[str, Field]:
    """Return the fields for components (kind, name, hash of the code), see ``registry.read_constants``."""
    left_out = () if any(kind == "generator" for kind, _, _ in parts) else "generator."
    result = {n: f for n, f in common_fields().items() if not n.startswith(left_out)}
    for kind, name, digest in parts:
        if (section := registry.section(kind, name)) in SECTIONS and kind == "algorithm":
            raise UserError(f"algorithm {name} needs another name: {section} is a section of every experiment.")
        its_fields = {f"{section}.{n}": f for n, f in registry.read_constants(kind, name, digest).items()}
        if clashes := [n for n in its_fields if n in common_fields()]:
            clash = f"its constant needs another name than the common field {clashes[0]}"
            raise UserError(f"{KINDS[kind].field} {quote(name)}: {clash}.")
        result |= its_fields
    return result


def full_name(
    name: str, names: Collection[str], chosen: Mapping[str, Sequence[str]], short: Mapping[str, str] = SHORT_NAMES
) -> str:
    """Return the dotted name of the field that ``name`` means; an unknown ``name`` is returned unchanged.

    name: dotted name, short name, or component and constant (``resnetgn.width`` for ``model.width``). names: dotted
    names of all fields. chosen: kind of component -> names of the chosen components. short: short name -> dotted name.
    """
    section, _, leaf = name.rpartition(".")
    for kind, parts_ in chosen.items() if name not in names else ():
        if section in map(registry.label, parts_) and f"{KINDS[kind].section}.{leaf}" in names:
            return f"{KINDS[kind].section}.{leaf}"
    return name if name in names else short.get(name, name)


def full_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with each short name replaced by the field's dotted name."""
    by_field = {SHORT_NAMES.get(name, name): value for name, value in values.items()}
    if by_field.get("sharing.setting") == NO_SHARING:
        by_field["sharing.setting"] = "real"
    chosen = {kind: [name] for kind, name in _names(by_field).items()}
    valid_fields = fields_for(chosen)
    return {full_name(name, valid_fields, chosen): value for name, value in by_field.items()}


def generates(setting: str) -> bool:
    """Return whether every client trains a generator under the sharing strategy ``setting``."""
    if setting in KINDS["sharing"].components:
        return setting in registry.GENERATING
    registry.source(setting)  # the file is read again, as it may have changed
    return hasattr(registry.find("sharing", setting), "requests")


def choose(values: Mapping[str, Any], inactive: Collection[str] = ()) -> Experiment:
    """Return the experiment with these values; values of components that are not chosen become ``inactive`` values.

    Args:
        values: dotted name -> value; missing fields get their defaults.
        inactive: names of fields that are accepted although no component of the package has them, because they belong
            to user-defined components that are not chosen.

    Raises:
        UserError: a component does not exist, a name in ``values`` is no field of any component, or a value is out of
            its range.
    """
    valid_fields = fields_for({kind: [name] for kind, name in _names(values).items()})
    rest = {n: v for n, v in values.items() if n not in valid_fields and not n.startswith("source.")}
    _require_owned([name for name in rest if name not in inactive], valid_fields)
    flat = {n: values.get(n, f.default) for n, f in valid_fields.items()}
    for name, field in valid_fields.items():
        if type(flat[name]) in field.kinds:  # values of a wrong type are reported later, with all other errors
            field.check(name, flat[name])
    return from_flat(flat, UNSET, rest)


def override(config: Experiment, values: Mapping[str, Any]) -> Experiment:
    """Return a copy of ``config`` with ``values`` (dotted name -> value) replaced.

    A newly chosen component starts with the defaults of its constants.

    Raises:
        UserError: the resulting experiment lacks a field that ``values`` sets.
    """
    old, now = config.flat, _names({**config.flat, **values})
    old_values = {n: v for n, v in old.items() if not _replaced(n, config, now)}
    result = choose({**config.inactive, **old_values, **values}, config.inactive)
    require_fields(values, result)
    return result


def require_fields(values: Mapping[str, Any], config: Experiment) -> None:
    """Check that the experiment has the fields ``values`` (dotted name -> value).

    Raises:
        UserError: a field is missing. The message names the component that has the field, or else the nearest field.
    """
    for name, value in values.items():
        if name not in config.flat and not (name in OPTIONAL and value is None):
            chosen = {kind: [component] for kind, component in config.chosen.items()}
            raise unchosen_field_error(name, chosen) or unknown("config key", name, config.flat)


def recorded(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a run's records, without the noise multipliers that a target epsilon decides."""
    targets = {"dp.noise_multiplier": "dp.target_epsilon", "dp.central_noise": "dp.central_epsilon"}
    return {name: value for name, value in dotted.items() if dotted.get(targets.get(name, "")) is None}


def described(config: Experiment, n_clients: int) -> dict[str, Any]:
    """Return the experiment's main fields as summary.json stores them, such as data set, method, alpha and seed."""
    return {
        "dataset": config.data.name,
        "algorithm": config.algorithm,
        "setting": config.sharing.setting,
        "alpha": config.flat.get("partition.alpha"),
        "n_clients": n_clients,
        "participation": config.federation.participation,
        "seed": config.seed,
        "learning_rate": config.client.lr,
        "target": config.target,
    }


def recorded_config(config: Experiment) -> dict[str, Any]:
    """Return the fields that decide results, by dotted name, as summary.json stores them."""
    fields = recorded(config.flat).items()
    return {n: list(v) if type(v) is tuple else v for n, v in fields if not is_ignored(n)}


def to_dict(config: Experiment) -> dict[str, Any]:
    """Return the experiment as config.yaml stores it; see ``nested``."""
    return nested(recorded(config.flat))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return section -> field -> plain value, with lists instead of tuples. values: dotted name -> value."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        (result.setdefault(section, {}) if section else result)[leaf] = list(value) if type(value) is tuple else value
    return result


def effective(values: Mapping[str, Any], p: float | None) -> dict[str, float]:
    """Return the main hyperparameters that a run used, under the names alpha, p, rho, sigma and lr.

    Unused hyperparameters are left out: alpha (concentration) without a Dirichlet partition, rho (share of images that
    the generator sees) without a generator, sigma (noise multiplier) without DP-SGD or with a target epsilon.
    values: dotted name -> value of the run's fields. p: resulting share of shared data in the training data, or None.
    """
    solved = values.get("dp.target_epsilon") is not None  # sigma then follows from epsilon and differs between clients
    sigma = values["dp.noise_multiplier"] if values["dp.local"] and not solved else None
    alpha, rho = values.get("partition.alpha"), values.get("generator.rho")
    settings = {"alpha": alpha, "p": p, "rho": rho, "sigma": sigma, "lr": values["client.lr"]}
    return {name: value for name, value in settings.items() if value is not None}


def from_dict(values: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a config.yaml that ``to_dict`` wrote; missing fields get their defaults.

    User-defined components are not imported. Their constants are taken from the file without a check.

    Raises:
        UserError: a key is not a field. A later version of the platform may have written the key.
        ValueError: the type of a value is not allowed for its field.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        flat |= {f"{name}.{k}": tuple(v) if isinstance(v, list) else v for k, v in inner} or {name: value}
    names = _chosen_names(flat)
    if wrong := [kind for kind, name in names.items() if not isinstance(name, str)]:
        raise ValueError(f"{KINDS[wrong[0]].field} is {quote(names[wrong[0]])} and no str")
    if not (generates(names["sharing"]) if not registry.is_user_defined(names["sharing"]) else "generator" in values):
        del names["generator"]
    valid_fields = fields_for({kind: [name] for kind, name in names.items() if not registry.is_user_defined(name)})
    if "generator" in names:
        valid_fields |= {n: f for n, f in common_fields().items() if n.startswith("generator.")}
    sections = {registry.section(kind, name) for kind, name in names.items() if registry.is_user_defined(name)}
    settings = {n: valid_fields[n].default for n in valid_fields}
    for name, value in flat.items():
        if name in valid_fields:
            if type(value) not in valid_fields[name].kinds:
                kinds = " or ".join(kind.__name__ for kind in valid_fields[name].kinds)
                raise ValueError(f"{name} is {quote(value)} and no {kinds}")
        elif name.partition(".")[0] not in {*sections, "source"}:
            _require_owned([name], valid_fields)
            continue
        settings[name] = value
    source = {n.removeprefix("source."): settings.pop(n) for n in list(settings) if n.startswith("source.")}
    return from_flat(settings, Constants(source))


def same_results(a: Experiment, b: Experiment) -> list[str]:
    """Return the names of the fields that affect results and differ between ``a`` and ``b``; empty if none differ."""
    first, second = a.flat, b.flat
    missing = object()
    names = [n for n in {**first, **second} if not is_ignored(n)]
    return [n for n in names if first.get(n, missing) != second.get(n, missing)]


def deciding(config: Experiment) -> dict[str, Any]:
    """Return dotted name -> value of the fields on which results depend and whose value is not the default.

    The experiment's hash is computed from these fields, so a new field does not change the hash of an old experiment.
    Therefore the default of a field must never change; add a new field instead.
    """
    valid_fields = fields_for({kind: [name] for kind, name in config.chosen.items()}, reread=False)
    flat = {n: v for n, v in config.flat.items() if not is_ignored(n)}
    return {n: v for n, v in flat.items() if n not in valid_fields or v != valid_fields[n].default}


def fields_with_rules(config: Experiment) -> frozenset[str]:
    """Return the names of the fields whose values the run computes by a rule, such as fields that are null."""
    flat = config.flat
    names = {name for name, value in flat.items() if value is None or (name, value) == ("straggler.partial", "method")}
    return frozenset(names | ({"generator.noise_multiplier"} if flat.get("generator.target_epsilon") else set()))


def values_of(config: Experiment, begins: tuple[str, ...] = ("",)) -> tuple[tuple[str, Any], ...]:
    """Return (dotted name, value) of the fields whose names begin with one of the texts ``begins``."""
    return tuple(pair for pair in config.flat.items() if pair[0].startswith(begins))


def without_rounds(config: Experiment) -> tuple[int, dict[str, Any]]:
    """Return the planned number of rounds, and all other fields that decide results (see ``deciding``)."""
    others = {name: value for name, value in deciding(config).items() if name != "federation.rounds"}
    return config.federation.rounds, others


def part_of(config: Experiment, kind: str) -> Any:
    """Create the component of ``config`` for ``kind``, such as ``algorithm``, with the constants in ``config``."""
    section = config if kind == "algorithm" else getattr(config, kind)
    return registry.make(kind, config.chosen[kind], section.constants)


def parts_of_own(config: Experiment) -> list[str]:
    """Return the command line options of the user-defined components, such as ``--algorithm my_lab.py:FedAvgM``."""
    return [f"--{KINDS[kind].field} {name}" for kind, name in config.chosen.items() if registry.is_user_defined(name)]


def unchosen_field_error(name: str, chosen: Mapping[str, Sequence[str]]) -> UserError | None:
    """Return an error that names the components which have the field ``name``; None if no component has it.

    ``name`` is a field that the chosen components, ``chosen`` (kind -> names), do not have.
    """
    kind, names = registry.owners(name) or ("", [])
    if name.startswith("generator.") and not chosen.get("generator") and (names or name in common_fields()):
        if any(generates(setting) for setting in chosen["sharing"]):
            able = " or ".join(KINDS["generator"].components)
            return UserError(f"{name} needs a generator, but none is chosen: add --generator.name {able}.")
        kind, names = "sharing", [setting for setting in KINDS["sharing"].components if generates(setting)]
    if not names:
        return None
    field = KINDS[kind].field
    return UserError(f"{name} needs --{field} {' or '.join(names)}, and {field} is {', '.join(chosen[kind])}.")


def _names(values: Mapping[str, Any]) -> dict[str, str]:
    """Return kind -> name of the components that ``values`` chooses. Kinds without a component are left out."""
    names = {kind: str(name) for kind, name in _chosen_names(values).items()}
    if not generates(names["sharing"]):
        del names["generator"]
    return names


def _chosen_names(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {kind: values.get(k.field, common_fields()[k.field].default) for kind, k in KINDS.items()}
    names["tracker"] = registry.main_tracker(names["tracker"])
    return {kind: name for kind, name in names.items() if name is not None or not KINDS[kind].is_optional}


def _require_owned(names: Sequence[str], valid_fields: Mapping[str, Field]) -> None:
    """Raise a UserError on the ``names`` that are no field of any component of the package, chosen or not."""
    if wrong := [name for name in names if name not in common_fields() and not registry.owners(name)]:
        raise UserError(" ".join(str(hints.unknown_key(name, valid_fields)) for name in wrong))


def _replaced(name: str, config: Experiment, now: Mapping[str, str]) -> bool:
    """Return whether ``name`` is a constant of a component of ``config`` that is not in ``now`` (kind -> name)."""
    changed = [registry.section(kind, old) for kind, old in config.chosen.items() if now.get(kind) != old]
    is_constant = name not in common_fields() and name.startswith(tuple(f"{section}." for section in changed))
    return is_constant or (name.startswith("generator.") and "generator" not in now)
