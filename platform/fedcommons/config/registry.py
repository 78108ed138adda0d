"""Parts: what a config chooses by name, or by an import path if it is the user's own.

A part is one file that defines its constants (``fields``) and what it refuses (``check``). It is named by its name in
``KINDS``, as ``package.module:Name``, or as ``my_method.py:Name``, a path relative to the folder in which the command
was given. Ray's workers find it by the same text.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcommons.config import user_code, user_imports, user_loader
from fedcommons.config.fields import Field, fields_of
from fedcommons.config.hints import is_elsewhere
from fedcommons.config.static_fields import fields_in, has
from fedcommons.config.user_code import Code
from fedcommons.errors import (
    UserError,
    before_any_work,
    name_of,
    nearest,
    shown,
    somebodys,
    unknown,
)

HERE = "FEDCOMMONS_PARTS"
"""Environment variable that tells Ray's workers in which folder the command was given."""


@dataclass(frozen=True)
class Kind:
    """A kind of part: the field that names it, where the package's own are, and the arguments that are passed.

    handed: always; required: to a parameter without a default; with one it is a constant, as it was before these were
    passed. is_optional: a run need not have one, and the field is None by default. has: what a part must have, such as
    the functions of its Protocol; () where the class or function is called once, and what it gives is checked.
    """

    field: str
    known: Mapping[str, str]
    handed: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    is_optional: bool = False
    has: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The section of its parts' constants; an algorithm's constants have a section named after the algorithm."""
        return self.field.partition(".")[0]


_DATA, _PARTITIONS = "fedcommons.data.datasets", "fedcommons.data.partition"
_METHODS, _NETWORKS = "fedcommons.algorithms", "lightning_modules.networks"
_TRACKERS = "fedcommons.tracking"
_STRAGGLERS, _GENERATORS = "fedcommons.federation.stragglers", "fedcommons.generators"

KINDS: Mapping[str, Kind] = {
    "algorithm": Kind(
        "algorithm",
        {
            "fedavg": f"{_METHODS}.fedavg:FedAvg",
            "fedprox": f"{_METHODS}.fedprox:FedProx",
            "scaffold": f"{_METHODS}.scaffold:SCAFFOLD",
            "fedpvr": f"{_METHODS}.fedpvr:FedPVR",
            "feddyn": f"{_METHODS}.feddyn:FedDyn",
            "fednova": f"{_METHODS}.fednova:FedNova",
            "moon": f"{_METHODS}.moon:MOON",
            "fedmix": f"{_METHODS}.fedmix:FedMix",
            "fedvae": f"{_METHODS}.fedvae:FedVAE",
            "feddpms": f"{_METHODS}.feddpms:FedDPMS",
            "gradient_coding": f"{_METHODS}.gradient_coding:GradientCoding",
            "feddm": f"{_METHODS}.feddm:FedDM",
            "dense": f"{_METHODS}.dense:DENSE",
            "coboosting": f"{_METHODS}.coboosting:CoBoosting",
            "fedavgm": f"{_METHODS}.server_optimizers:FedAvgM",
            "fedadagrad": f"{_METHODS}.server_optimizers:FedAdagrad",
            "fedadam": f"{_METHODS}.server_optimizers:FedAdam",
            "fedyogi": f"{_METHODS}.server_optimizers:FedYogi",
            "ditto": f"{_METHODS}.ditto:Ditto",
            "fedbn": f"{_METHODS}.fedbn:FedBN",
            "fedper": f"{_METHODS}.fedper:FedPer",
            "fedproto": f"{_METHODS}.fedproto:FedProto",
            "one_shot": f"{_METHODS}.one_shot:OneShot",
            "fedddpm": f"{_METHODS}.fedddpm:FedDDPM",
            "fedgen": f"{_METHODS}.fedgen:FedGEN",
            "fedcvae": f"{_METHODS}.fedcvae:FedCVAE",
        },
        has=("start", "down", "client", "merge"),
    ),
    "data": Kind(
        "data.name",
        {name: f"{_DATA}:{name}" for name in ("digits", "mnist", "fmnist", "cifar10", "cifar100")}
        | {name: f"fedcommons.data.sprites:{name}" for name in ("dsprites", "procedural_sprites")},
        frozenset({"dir", "download"}),
        frozenset({"seed"}),
    ),
    "partition": Kind(
        "partition.name",
        {
            name: f"{_PARTITIONS}:{name}"
            for name in (
                "iid",
                "dirichlet_classes",
                "dirichlet_niid",
                "dirichlet_clients",
                "dirichlet_clients_all",
                "dirichlet_plain",
                "single_class",
                "shards",
                "quantity",
                "labels_lognormal",
            )
        }
        | {name: f"fedcommons.data.groups:{name}" for name in ("by_group", "by_factor")},
        frozenset({"labels", "n_clients", "n_classes", "rng", "seed"}),
        frozenset({"groups", "factors", "rows"}),
    ),
    "sharing": Kind(
        "sharing.setting",
        {
            "real": "fedcommons.sharing.real:Real",
            "shuffled_synthetic": "fedcommons.sharing.shuffled_synthetic:ShuffledSynthetic",
            "local_synthetic": "fedcommons.sharing.local_synthetic:LocalSynthetic",
            "shuffled_real": "fedcommons.sharing.shuffled_real:ShuffledReal",
            "raw_copies": "fedcommons.sharing.raw_copies:RawCopies",
            "server_synthetic": "fedcommons.sharing.server_synthetic:ServerSynthetic",
            "merf": "fedcommons.sharing.merf:MERF",
            "ndpdc": "fedcommons.sharing.ndpdc:NDPDC",
        },
        has=("make", "release", "assign"),
    ),
    "generator": Kind(
        "generator.name",
        {
            "ddpm": f"{_GENERATORS}.ddpm:DDPM",
            "private_ddpm": f"{_GENERATORS}.private_ddpm:PrivateDDPM",
            "beta_vae": f"{_GENERATORS}.beta_vae:BetaVAE",
            "cvae": f"{_GENERATORS}.cvae:CVAE",
            "gan": f"{_GENERATORS}.gan:GAN",
            "private_cvae": f"{_GENERATORS}.private_cvae:PrivateCVAE",
            "private_gan": f"{_GENERATORS}.private_gan:PrivateGAN",
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

OPTIONAL = frozenset({"storage", *(kind.field for kind in KINDS.values() if kind.is_optional)})
"""Fields that an experiment has only where it has such a part, or a storage."""


def find(kind: str, name: str) -> Callable[..., Any]:
    """The class or function with this name or import path.

    Raises:
        UserError: it does not exist.
    """
    known, field = KINDS[kind].known, KINDS[kind].field
    where, _, attribute = known.get(name, name).rpartition(":")
    if name not in known and not is_own(name):
        own = f"an import path of your own, such as my_{kind}.py:Name"
        if is_elsewhere(kind, name):
            ours = ", ".join(sorted(known))
            raise UserError(f"{field} {shown(name)} is not in the package: give {own}. Known: {ours}.")
        raise unknown(field, name, known, f"or {own}" if known else own)
    module = _module(where, f"{field} {shown(name)}")
    with before_any_work(), somebodys(f"{field} {shown(name)}"):  # a module may have a function for what it lacks
        found = getattr(module, attribute, None)
    if not callable(found):
        near = nearest(attribute, [n for n, thing in vars(module).items() if callable(thing)])
        raise UserError(f"{field} {shown(name)}: {where} has no {shown(attribute)}{near}")
    return found


def with_floats(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return these constants of a component, with whole numbers as floats where the type is float."""
    known = constants(kind, name)
    floats = {n for n, value in given.items() if type(value) is int and n in known and known[n].kinds[0] is float}
    return {n: float(value) if n in floats else value for n, value in given.items()}


def make(kind: str, name: str, constants: Mapping[str, Any]) -> Any:
    """The part with these constants; see ``made``."""
    return made(kind, name, partial(find(kind, name), **constants))


def made(kind: str, name: str, build: Callable[[], Any]) -> Any:
    """The part that ``build`` gives.

    Raises:
        UserError: it cannot be built, or lacks what a part of this kind must have.
    """
    what, has = called(kind, name), KINDS[kind].has
    with before_any_work(), somebodys(what):
        part = build()
        lacking = [one for one in has if not hasattr(part, one)]
        if lacking:
            gives = f"gives {name_of(part)}, which has no {', '.join(lacking)}"
            raise UserError(f"{what} {gives}; it must have {', '.join(has)}.")
    return part


def called(kind: str, name: str) -> str:
    """What a part is called in a message: its field and its name, of a path the file alone."""
    return f"{KINDS[kind].field} {name.rpartition('/')[2]}"


def is_own(name: str) -> bool:
    """Whether the name is an import path, so that the part is the user's own."""
    return re.fullmatch(r"[\w./~ -]+:\w+", name) is not None


def label(name: str) -> str:
    """A short name that is fit for a folder: ``fedavgm`` for ``my_lab.py:FedAvgM``."""
    return name.rpartition(":")[2].lower() if is_own(name) else name


def section(kind: str, name: str) -> str:
    """The section of its constants: named after the algorithm, or after the kind for all other parts."""
    return label(name) if kind == "algorithm" else KINDS[kind].section


def constants(kind: str, name: str, reread: bool = True) -> Mapping[str, Field]:
    """Its fields by name; ``reread``: see ``source``.

    Raises:
        UserError: there is no such part, or a parameter without a default is not passed by the platform.
    """
    return read_constants(kind, name, source(name, reread))


@lru_cache(maxsize=256)
def read_constants(kind: str, name: str, digest: str | None) -> Mapping[str, Field]:
    """See ``constants``; the file's digest is a part of the cache key, as the file may change while we run."""
    k = KINDS[kind]
    if name in k.known:
        return fields_in(k.known[name], k.handed)
    part = find(kind, name)
    with before_any_work(), somebodys(called(kind, name)):
        try:
            return fields_of(part, k.handed, k.required)
        except ValueError as error:
            raise UserError(f"{k.field} {shown(name)}: {error}.") from None


def defines(kind: str, name: str, method: str) -> bool:
    """Whether the part has this method."""
    known = KINDS[kind].known
    if name in known:
        return has(known[name], method)
    source(name)  # its file may have changed
    return hasattr(find(kind, name), method)


def owners(field: str) -> tuple[str, list[str]] | None:
    """The kind and the names of the package's parts that have this dotted field; None if no part has it."""
    for kind, parts in KINDS.items():
        found = [n for n in parts.known if field in (f"{section(kind, n)}.{c}" for c in constants(kind, n))]
        if found:
            return kind, found
    return None


def having(constant: str) -> list[tuple[str, str, str]]:
    """(kind, name, dotted field) of each of the package's parts that has a constant of this name."""
    return [
        (kind, name, f"{section(kind, name)}.{constant}")
        for kind, k in KINDS.items()
        for name in k.known
        if constant in constants(kind, name)
    ]


def source(name: str, reread: bool = True) -> str | None:
    """A digest of the code of a part of the user's own: of its file and its ``neighbours``; None for all other parts.

    reread: of the files as they are now, else as they were read last. ``find`` gives what was read last, whatever has
    happened to the files since. They are read where an experiment is put together or checked.
    """
    if not is_own(name):
        return None
    where, what = name.rpartition(":")[0], shown(name)
    if code := _read(where, what) if reread else _code(where, what):
        return code.digest
    file = getattr(_module(where, what), "__file__", None)  # of a package that is installed; Python's own have none
    return sha256(Path(file).read_bytes()).hexdigest()[:24] if file else None


def files(name: str) -> Mapping[str, str]:
    """The files of a part of the user's own and a digest of each, as it was read last; empty for all other parts."""
    code = _codes.get(_key(name.rpartition(":")[0])) if is_own(name) else None
    return code.files if code else {}


def clash(names: Iterable[str]) -> str | None:
    """Which two of these parts cannot be in one process, in words; see ``neighbours.clash``."""
    codes = {name: code for name in names if (code := _codes.get(_key(name.rpartition(":")[0])))}
    return user_code.clash(codes)


def base() -> Path:
    """The folder to which relative import paths refer."""
    return Path(os.environ.get(HERE) or os.getcwd())


_codes: dict[tuple[str, str], Code | None] = {}
"""The code of parts of one's own, as it was read last; None of what is no file of the user's."""


def _key(where: str) -> tuple[str, str]:
    return str(base()), where


def _read(where: str, what: str) -> Code | None:
    try:
        if where.endswith(".py"):
            path = base() / Path(where).expanduser()
            if not path.is_file():
                raise UserError(f"{what}: there is no file {path}.")
            code = user_code.of_file(path, base(), what)
        else:
            code = user_code.of_module(where, base(), what)
    except OSError as error:
        raise UserError(f"{what}: {error.filename} cannot be read ({error.strerror}).") from error
    _codes[_key(where)] = code
    return code


def _code(where: str, what: str) -> Code | None:
    """As it was read last."""
    return _codes[_key(where)] if _key(where) in _codes else _read(where, what)


def _module(where: str, what: str) -> ModuleType:
    code = _code(where, what)
    if code:  # only for the user's own: a file that merely lies in that folder is not to be imported
        for folder in ([code.file.parent] if where.endswith(".py") else []) + [base()]:
            user_imports.add_to_path(folder)  # `python sweeps/x.py` has sweeps/ there
    with before_any_work(), somebodys(f"{what}: importing {where} failed"):
        try:
            return user_loader.load(code) if code else importlib.import_module(where)
        except ModuleNotFoundError as error:
            if code and (told := user_code.missing(error, code)):
                raise UserError(f"{what}: {told}") from error
            raise
