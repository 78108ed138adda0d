"""torchvision's data sets of labelled images by name (``torchvision:SVHN``), read from torchvision's files."""

import os
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.datasets import UNREADABLE
from fedcommons.errors import UserError

N_CLASSES: dict[str, int | None] = {
    "CIFAR10": None, "CIFAR100": None, "Country211": None, "DTD": None, "EMNIST": None, "EuroSAT": None, "FER2013": 7,
    "FGVCAircraft": None, "FashionMNIST": None, "Flowers102": 102, "Food101": None, "GTSRB": 43, "Imagenette": None,
    "KMNIST": None, "MNIST": None, "OxfordIIITPet": None, "PCAM": 2, "QMNIST": None, "RenderedSST2": None,
    "SEMEION": 10, "STL10": 10, "SUN397": None, "SVHN": 10, "StanfordCars": None, "USPS": 10,
}  # fmt: skip
"""Data set -> number of classes; None: torchvision's object lists the classes in its attribute ``classes``."""

TEST = {"Imagenette": "val"}
"""Data set -> value of its parameter ``split`` for the test images, where it is not ``test``."""

_PASSED = {"root", "train", "split", "what", "transform", "target_transform", "transforms", "download", "loader"}
"""Parameters of torchvision's classes that are no constants: they are passed here or are not needed."""


def names() -> list[str]:
    """Return the names of the data sets."""
    return [*N_CLASSES]


def component(name: str) -> Callable[..., Any]:
    """Return the data set component of torchvision's class ``name``.

    Its constants are ``side`` and the class's own parameters, such as ``folds`` of STL10. EMNIST's
    parameter ``split`` (group of classes) is the constant ``subset``, as ``data.split`` is a field of all data sets.
    """
    from torchvision import datasets

    kind: Any = getattr(datasets, name)
    parameters, named = signature(kind).parameters, Parameter.KEYWORD_ONLY
    has_groups = "split" in parameters and parameters["split"].default is Parameter.empty
    constants = [Parameter("side", named, default=None, annotation=Annotated[int | None, "[1, 4096]"])]
    if has_groups:
        choice = Annotated[str, " | ".join(kind.splits)]
        constants.append(Parameter("subset", named, default="balanced", annotation=choice))
    for parameter in parameters.values():
        if parameter.name not in _PASSED and parameter.kind is not Parameter.VAR_KEYWORD:
            hint = int | None if parameter.default is None else type(parameter.default)
            constants.append(parameter.replace(kind=named, annotation=hint))
    sides: list[dict[str, Any]] = [{}]
    if "train" in parameters or has_groups:
        sides = [{"train": True}, {"train": False}]
    elif "split" in parameters:
        sides = [{"split": parameters["split"].default}, {"split": TEST.get(name, "test")}]

    def loader(dir: Path, download: bool, side: int | None = None, **options: Any) -> dict[str, Any]:
        if has_groups:
            options["split"] = options.pop("subset", "balanced")
        if "download" in parameters or "kwargs" in parameters:  # FER2013 has no such parameter
            options["download"] = download
        what, folder = f"data set torchvision:{name}", os.path.realpath(dir)
        try:
            sets = [kind(dir, **options, **part) for part in sides]
            read = [_examples(part, side) for part in sets]
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
        except UNREADABLE as error:
            reason = " ".join(str(error).partition("You can use download")[0].split())[:200].rstrip(".")
            state = "could not be downloaded to, or is damaged in," if download else "is missing or damaged in"
            raise UserError(
                f"{what} {state} {folder} ({reason}): delete its files there, if any, and use --download."
            ) from error
        both = {"train": read[0], "test": read[1]} if len(read) == 2 else dict(zip("xy", read[0], strict=True))
        return {**both, "n_classes": N_CLASSES[name] or len(sets[0].classes)}

    loader.__doc__ = f"""torchvision's {name}.

    Args:
        side: resize the images so that the shorter side has this many pixels, and crop the middle square; null: images
            as they are, which must then have equal shapes
        subset: group of classes (torchvision's parameter split)
    """
    passed = [Parameter(which, Parameter.POSITIONAL_OR_KEYWORD) for which in ("dir", "download")]
    vars(loader)["__signature__"] = Signature([*passed, *constants])
    loader.__annotations__ = {constant.name: constant.annotation for constant in constants}
    return loader


def _examples(part: Any, side: int | None) -> tuple[Tensor, Tensor]:
    """Return the images (n, C, H, W) uint8 and the classes (n,) of one of torchvision's data sets.

    Raises:
        UserError: the images have several shapes, and ``side`` is None.
    """
    from torchvision.transforms.v2 import functional as resizing

    images, labels = [], []
    for i in range(len(part)):
        image, label = part[i]
        image = image if image.mode == "L" else image.convert("L" if image.mode == "1" else "RGB")
        if side:
            image = resizing.center_crop(resizing.resize(image, [side], antialias=True), [side, side])
        images.append(torch.from_numpy(np.array(image)))
        labels.append(int(label))
        if images[-1].shape != images[0].shape:
            raise UserError(
                f"its images have different shapes, such as {tuple(images[0].shape)} and {tuple(images[-1].shape)}: "
                "--data.side 32 resizes them."
            )
    x = torch.stack(images)
    return (x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()), torch.tensor(labels)
