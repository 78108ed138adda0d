"""The registry of components: finds the class or function that a configuration names, and its constants.

A component is a class or function whose constants are fields of the configuration (see ``fields``). A configuration
names a component of the package by its name in ``KINDS``, and one of torchvision by ``torchvision:NAME``
(``torchvision_names``). It names a user-defined component by an import path: ``package.module:Name``, or
``my_method.py:Name``, relative to the folder in which the command was started. Ray's workers find the component by the
same text. Components named ``__main__:Name`` are objects (see ``live_objects``).
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcommons.config import hints, live_objects, torchvision_names, user_code, user_loader
from fedcommons.config.fields import Field, fields_of
from fedcommons.config.static_fields import fields_in
from fedcommons.config.torchvision_names import is_torchvisions
from fedcommons.deprecated import adopt_old_methods
from fedcommons.errors import UserError, before_any_work, name_of, nearest, quote, user_code_context

HERE = "FEDCOMMONS_PARTS"
"""Environment variable that passes the folder in which the command was started to Ray's workers."""


@dataclass(frozen=True)
class Kind:
    """A kind of component, such as algorithm, partition or generator.

    field: dotted name of the field that names the component. components: name -> import path of the package's
    components. passed: arguments that the platform always passes. required: arguments that the platform passes if the
    component's parameter has no default. is_optional: the field may be None, for no component. has: attributes that a
    component must have; () if the component is a function whose result is checked instead. reserved: names of optional
    functions of a component, which a constant of the same name would hide.
    """

    field: str
    components: Mapping[str, str]
    passed: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    is_optional: bool = False
    has: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """Return the first part of ``field``: the section of the component's constants, except for algorithms."""
        return self.field.partition(".")[0]


_DATA, _PARTITIONS = "fedcommons.data.datasets", "fedcommons.data.partition"
_METHODS, _NETWORKS = "fedcommons.algorithms", "lightning_modules.networks"
_TRACKERS = "fedcommons.tracking"
_PARTITION_NAMES = (
    "iid", "dirichlet_classes", "dirichlet_niid", "dirichlet_clients", "dirichlet_clients_all", "dirichlet_plain",
    "single_class", "shards", "quantity", "labels_lognormal",
)  # fmt: skip
_STRAGGLERS, _GENERATORS = "fedcommons.federation.stragglers", "fedcommons.generators"
_METHOD_PLACES = (
    "fedavg:FedAvg", "fedprox:FedProx", "scaffold:SCAFFOLD", "fedpvr:FedPVR", "feddyn:FedDyn", "fednova:FedNova",
    "moon:MOON", "fedmix:FedMix", "fedvae:FedVAE", "feddpms:FedDPMS", "gradient_coding:GradientCoding", "feddm:FedDM",
    "dense:DENSE", "coboosting:CoBoosting", "ditto:Ditto", "fedbn:FedBN", "fedper:FedPer", "fedproto:FedProto",
    "fedrep:FedRep", "fedbabu:FedBABU", "apfl:APFL", "pfedme:PFedMe", "perfedavg:PerFedAvg", "one_shot:OneShot",
    "fedddpm:FedDDPM", "fedgen:FedGEN", "fedcvae:FedCVAE", "fedlap:FedLAP", "feddf:FedDF", "ifca:IFCA",
    "fedbuff:FedBuff", "qfedavg:QFedAvg",
)  # fmt: skip
"""FILE:CLASS of each method whose file has the method's name."""

_SERVER_OPTIMIZERS = ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi")

KINDS: Mapping[str, Kind] = {
    "algorithm": Kind(
        "algorithm",
        {
            **{place.partition(":")[0]: f"{_METHODS}.{place}" for place in _METHOD_PLACES},
            **{name.lower(): f"{_METHODS}.server_optimizers:{name}" for name in _SERVER_OPTIMIZERS},
        },
        has=("start", "down", "client", "merge"),
        reserved=("share", "check", "participants", "personal", "adapt"),
    ),
    "data": Kind(
        "data.name",
        {name: f"{_DATA}:{name}" for name in ("digits", "mnist", "fmnist", "cifar10", "cifar100")}
        | {name: f"fedcommons.data.sprites:{name}" for name in ("dsprites", "procedural_sprites")},
        frozenset({"dir", "download", "split_seed"}),
        frozenset({"seed"}),
    ),
    "partition": Kind(
        "partition.name",
        {name: f"{_PARTITIONS}:{name}" for name in _PARTITION_NAMES}
        | {name: f"fedcommons.data.groups:{name}" for name in ("by_group", "by_factor")},
        frozenset({"labels", "n_clients", "n_classes", "rng", "seed"}),
        frozenset({"groups", "factors", "rows", "x"}),
    ),
    "sharing": Kind(
        "sharing.setting",
        {
            "real": "fedcommons.sharing.real:Real",
            "shuffled_synthetic": "fedcommons.sharing.synthetic:ShuffledSynthetic",
            "local_synthetic": "fedcommons.sharing.synthetic:LocalSynthetic",
            "shuffled_real": "fedcommons.sharing.real:ShuffledReal",
            "raw_copies": "fedcommons.sharing.raw_copies:RawCopies",
            "server_synthetic": "fedcommons.sharing.synthetic:ServerSynthetic",
            "merf": "fedcommons.sharing.merf:MERF",
            "ndpdc": "fedcommons.sharing.ndpdc:NDPDC",
            "dpcda": "fedcommons.sharing.dpcda:DPCDA",
        },
        has=("make", "release", "assign"),
    ),
    "generator": Kind(
        "generator.name",
        {
            "ddpm": f"{_GENERATORS}.ddpm:DDPM",
            "private_ddpm": f"{_GENERATORS}.ddpm:PrivateDDPM",
            "beta_vae": f"{_GENERATORS}.beta_vae:BetaVAE",
            "cvae": f"{_GENERATORS}.cvae:CVAE",
            "gan": f"{_GENERATORS}.gan:GAN",
            "private_cvae": f"{_GENERATORS}.cvae:PrivateCVAE",
            "private_gan": f"{_GENERATORS}.gan:PrivateGAN",
        },
        has=("sampling", "epochs", "fit", "sample"),
    ),
    "straggler": Kind(
        "straggler.rule",
        {
            "independent": f"{_STRAGGLERS}:Independent",
            "per_client": f"{_STRAGGLERS}:PerClient",
            "groups": f"{_STRAGGLERS}:Groups",
            "deadline": f"{_STRAGGLERS}:Deadline",
            "fastest": f"{_STRAGGLERS}:Fastest",
            "slow": f"{_STRAGGLERS}:Slow",
        },
        has=("__call__",),
    ),
    "schedule": Kind(
        "client.lr_schedule",
        {name: f"fedcommons.core.schedules:{name}" for name in ("constant", "cosine", "step")},
        frozenset({"round", "rounds"}),
    ),
    "model": Kind(
        "model.name",
        {
            "cnn": f"{_NETWORKS}.cnn:CNN",
            "vgg11": f"{_NETWORKS}.vgg:VGG11",
            "linear": f"{_NETWORKS}.linear:Linear",
            "mlp": f"{_NETWORKS}.mlp:MLP",
            "conv5": f"{_NETWORKS}.conv5:Conv5",
            "convnet": f"{_NETWORKS}.convnet:ConvNet",
            "resnet18": f"{_NETWORKS}.resnet:ResNet18",
            "encoder": f"{_NETWORKS}.encoder:Encoder",
            "vae": "lightning_modules.vae:vae",
            "ddpm": "lightning_modules.federated_ddpm:FederatedDDPM",
        },
        frozenset({"shape", "n_classes", "mean", "std", "lr", "momentum", "weight_decay", "optimizer"}),
    ),
    "tracker": Kind(
        "tracking.tracker",
        {
            "csv": f"{_TRACKERS}.csv_tracker:CsvTracker",
            "tensorboard": f"{_TRACKERS}.tensorboard_tracker:TensorBoardTracker",
            "mlflow": f"{_TRACKERS}.mlflow_tracker:MlflowTracker",
            "trackio": f"{_TRACKERS}.trackio_tracker:TrackioTracker",
        },
        frozenset({"folder", "config"}),
        is_optional=True,
        has=("log", "finish"),
    ),
    "measure": Kind("measure.measure", {}, is_optional=True, has=("__call__",)),
}

GENERATING = ("shuffled_synthetic", "local_synthetic", "server_synthetic")
"""Sharing strategies of the package for which every client trains a generator: their classes have ``requests``."""

OPTIONAL = frozenset({"storage", "storage_name", *(kind.field for kind in KINDS.values() if kind.is_optional)})
"""Fields that an experiment has only if they are not None: of the storage, and the fields of optional components."""


def find(kind: str, name: str) -> Callable[..., Any]:
    """Import and return a component's class or function, or raise a UserError."""
    components, field = KINDS[kind].components, KINDS[kind].field
    if live_objects.is_live(name):
        return live_objects.get(field, name).component
    if is_torchvisions(name):
        return torchvision_names.find(kind, field, name)
    where, _, attribute = components.get(name, name).rpartition(":")
    if (is_own := name not in components) and not is_user_defined(name):
        raise hints.unknown_component(kind, field, name, components)
    module = user_loader.module(where, base(), f"{field} {quote(name)}") if is_own else import_module(where)
    with before_any_work(), user_code_context(f"{field} {quote(name)}"):  # the module's __getattr__ is user code
        component = getattr(module, attribute, None)
    if not callable(component):
        near = nearest(attribute, [n for n, thing in vars(module).items() if callable(thing)])
        raise UserError(f"{field} {quote(name)}: {where} has no {quote(attribute)}{near}")
    adopt_old_methods(kind, component)
    return component


def choices(kind: str) -> list[str]:
    """Return the names of the package's components, and ``torchvision:NAME`` if torchvision has components too."""
    return [*KINDS[kind].components, *[f"{torchvision_names.PREFIX}NAME"] * (kind in torchvision_names.LIBRARIES)]


def with_floats(kind: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with ints converted to floats for those constants of the component whose type is float."""
    fields = constants(kind, name)
    floats = {n for n, value in arguments.items() if type(value) is int and n in fields and fields[n].kinds[0] is float}
    return {n: float(value) if n in floats else value for n, value in arguments.items()}


def make(kind: str, name: str, constants: Mapping[str, Any]) -> Any:
    """Create the component ``name`` from its constants, and check the component's attributes (see ``build_part``)."""
    return build_part(kind, name, partial(find(kind, name), **constants))


def build_part(kind: str, name: str, build: Callable[[], Any]) -> Any:
    """Create a component by calling ``build``, and check that it has the attributes that its kind requires."""
    what, has = component_label(kind, name), KINDS[kind].has
    with before_any_work(), user_code_context(what):
        part = build()
        adopt_old_methods(kind, type(part))
        missing = [attribute for attribute in has if not hasattr(part, attribute)]
        if missing:
            gives = f"returns {name_of(part)}, which has no {', '.join(missing)}"
            raise UserError(f"{what} {gives}; it must have {', '.join(has)}.")
    return part


def require_attributes(kind: str, name: str) -> None:
    """Check that a component that is a class has the attributes that its kind requires, without creating it."""
    part, has = find(kind, name), KINDS[kind].has
    missing = [attribute for attribute in has if isinstance(part, type) and not hasattr(part, attribute)]
    if missing and not hasattr(part, "__getattr__"):
        raise UserError(f"{component_label(kind, name)} has no {', '.join(missing)}; it must have {', '.join(has)}.")


def component_label(kind: str, name: str) -> str:
    """Return the component's name in messages: field and name without folders, ``algorithm my_lab.py:FedAvgM``."""
    return f"{KINDS[kind].field} {name.rpartition('/')[2]}"


def is_user_defined(name: str) -> bool:
    """Return whether the component is user-defined: its name is an import path with a colon."""
    return re.fullmatch(r"[\w./~ -]+:\w+", name) is not None and not is_torchvisions(name)


def main_tracker(names: Any) -> Any:
    """Return the tracker of the comma-separated ``names`` that may have constants: user-defined, else first."""
    listed = tracker_names(names) if isinstance(names, str) else []
    return next(filter(is_user_defined, listed), listed[0] if listed else names)


def tracker_names(names: str | None) -> list[str]:
    """Return the names in the comma-separated list ``tracking.tracker``."""
    return [name.strip() for name in names.split(",")] if names else []


def label(name: str) -> str:
    """Return the component's short name, usable as a folder name: ``fedavgm`` for ``my_lab.py:FedAvgM``."""
    return name.rpartition(":")[2].lower() if is_user_defined(name) or is_torchvisions(name) else name


def section(kind: str, name: str) -> str:
    """Return the section of a component's constants: ``fedprox`` for the algorithm FedProx, else the kind's section."""
    return label(name) if kind == "algorithm" else KINDS[kind].section


def constants(kind: str, name: str) -> Mapping[str, Field]:
    """Return the constants of a component, name -> ``Field``."""
    return read_constants(kind, name, source(name))


@lru_cache(maxsize=256)
def read_constants(kind: str, name: str, digest: str | None) -> Mapping[str, Field]:
    """Return a component's constants, cached per hash of its code (``digest``), so that changed code is read again."""
    k = KINDS[kind]
    if name in k.components:
        return fields_in(k.components[name], k.passed)
    part = find(kind, name)
    with before_any_work(), user_code_context(component_label(kind, name)):
        try:
            return fields_of(part, k.passed, k.required, k.reserved)
        except ValueError as error:
            raise UserError(f"{k.field} {quote(name)}: {error}.") from None


def owners(field: str) -> tuple[str, list[str]] | None:
    """Return (kind, names) of the package's components that have the constant ``field`` (dotted name), or None."""
    pairs = [(kind, name) for kind, name, dotted in having(field.rpartition(".")[2]) if dotted == field]
    return (pairs[0][0], [name for kind, name in pairs if kind == pairs[0][0]]) if pairs else None


def having(constant: str) -> list[tuple[str, str, str]]:
    """Return (kind, name, dotted field) for each component of the package that has a constant called ``constant``."""
    return [
        (kind, name, f"{section(kind, name)}.{constant}")
        for kind, k in KINDS.items()
        for name in k.components
        if constant in constants(kind, name)
    ]


def source(name: str, reread: bool = True) -> str | None:
    """Return the hash of a user-defined component's code (see ``user_code``), or None for any other component.

    reread: True reads the files again, as when an experiment is created or checked. False uses the code that was read
    last, as ``find`` always does, even if the files have changed since.
    """
    if not is_user_defined(name):
        return None
    where, what = name.rpartition(":")[0], quote(name)
    if live_objects.is_live(name):
        return live_objects.get("component", name).code
    if code := user_loader.read(where, base(), what, reread):
        return code.digest
    file = getattr(user_loader.module(where, base(), what), "__file__", None)  # a built-in module has no file
    return sha256(Path(file).read_bytes()).hexdigest()[:24] if file else None


def files(name: str) -> Mapping[str, str]:
    """Return file name -> hash of a user-defined component's code as read last; empty for components of the package."""
    if name in live_objects.objects:
        return {name: live_objects.objects[name].code}
    return its.files if (its := code(name)) else {}


def code(name: str) -> user_code.Code | None:
    """Return a user-defined component's code as read last; None for components of the package."""
    return user_loader.codes.get((base(), name.rpartition(":")[0])) if ":" in name else None


def base() -> Path:
    """Return the folder in which the command was started. Relative import paths refer to this folder."""
    return Path(os.environ.get(HERE) or os.getcwd())


def work_in(folder: str) -> None:
    """Make the command's folder this process' current folder, for relative paths in user code, if it exists here."""
    os.environ[HERE] = folder
    with suppress(OSError):
        os.chdir(folder)
