"""Starting a model from a file of weights: safetensors, or a state dict that torch has saved.

The file's tensors are the module's state (parameters, frozen ones too, and buffers) by the same names and shapes. Of a
plain network they may be named as the network names them. A Lightning checkpoint has them under ``state_dict``.
"""

from collections.abc import Collection, Mapping
from io import BytesIO
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from fedcommons.config.weights_file import content, digest_of
from fedcommons.errors import UserError, shown

BESIDE = 4
"""So many times the bytes of the model a file may have: a checkpoint has the optimizer's state besides."""

INSIDE = "network."
"""The name of a plain network in the module that trains it."""


def load(module: nn.Module, name: str, digest: str | None) -> None:
    """Copy the file's weights into the module; on the meta device see only that they could be.

    Raises:
        UserError: the file cannot be read or is another one; or its names, shapes or types are not the module's.
    """
    state = module.state_dict()
    most = BESIDE * sum(t.nbytes for t in state.values()) + 2**20
    data = content(name, most)
    if digest_of(data) != digest:
        raise UserError(f"model.weights {shown(name)} is not the file it was when this experiment was written.")
    found = _read(name, data, most)
    if not any(one.startswith(INSIDE) for one in found) and all(one.startswith(INSIDE) for one in state):
        found = {INSIDE + one: tensor for one, tensor in found.items()}
    lacking, besides = [n for n in state if n not in found], sorted(n for n in found if n not in state)
    if lacking or besides:
        told = [f"it lacks {_some(lacking)}"] * bool(lacking) + [f"it has {_some(besides)} besides"] * bool(besides)
        raise UserError(f"model.weights {shown(name)} has other names than the model: {', and '.join(told)}.")
    for one, tensor in state.items():
        given = found[one]
        if given.shape != tensor.shape or given.is_floating_point() != tensor.is_floating_point():
            raise UserError(
                f"model.weights {shown(name)}: {one} is {given.dtype} {tuple(given.shape)}, and the model's is "
                f"{tensor.dtype} {tuple(tensor.shape)}."
            )
        if not given.isfinite().all():
            raise UserError(f"model.weights {shown(name)}: {one} has values that are not finite.")
        if not tensor.is_meta:
            tensor.copy_(given)


def _read(name: str, data: bytes, most: float) -> Mapping[str, Tensor]:
    try:
        if name.endswith(".safetensors"):
            from safetensors.torch import load as read

            return read(data)
        with ZipFile(BytesIO(data)) as packed:  # torch packs what it saves, uncompressed
            size = sum(one.file_size for one in packed.infolist())
        if size > most:
            raise UserError(f"model.weights {shown(name)} unpacks to {size:,} bytes, and at most {most:,} are read.")
        given = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except BadZipFile:
        raise UserError(
            f"model.weights {shown(name)} is neither .safetensors nor a file that torch.save wrote."
        ) from None
    except Exception as error:  # of what somebody may have put there
        kind = type(error).__name__
        raise UserError(f"model.weights {shown(name)} cannot be read as weights ({kind}).") from error
    given = given.get("state_dict", given) if isinstance(given, dict) else given
    if not (isinstance(given, dict) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in given.items())):
        raise UserError(f"model.weights {shown(name)} holds {type(given).__name__}, and must hold tensors by name.")
    return given


def _some(names: Collection[str]) -> str:
    """The first three, and how many there are besides."""
    first = ", ".join(list(names)[:3])
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else first
