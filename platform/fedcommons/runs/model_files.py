"""The trained model as a file of named tensors, and the file of weights that a model starts from.

``model.safetensors`` is the server model of the last round, ``best.safetensors`` that of the round with the best
validation value. They hold all that the module's ``state_dict`` has, also what is not trained, and are read by
``safetensors.torch.load_file(path)``. Their metadata name the round and describe the data, so that the module can be
built again without the data.

A model starts from safetensors or from a state dict that torch has saved. The file's tensors are the module's state
(parameters, frozen ones too, and buffers) by the same names and shapes. A plain network's tensors may have the names
that the network gives them. A Lightning checkpoint has the tensors under ``state_dict``.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedcommons.config.weights_file import content, digest_of
from fedcommons.core.client_worker import module_with
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError, shown
from fedcommons.federation.rounds import Standing
from fedcommons.runs.early_stopping import best_round
from fedcommons.runtime import memory_limit
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_bytes

LAST, BEST, BEFORE = "model.safetensors", "best.safetensors", "best-before-last.safetensors"
"""``BEFORE``: what was best until a last round that is evaluated only as it is the last one, and is the best. A run
that goes on with more rounds has it again."""

Build = Callable[[], LightningModule]


def write(path: Path, module: LightningModule, round: int, data: Dataset) -> None:
    """Write the module's state, as of this round; data: what it is trained on, of which the form is written down."""
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in module.state_dict().items()}
    one = {"x": data.train.x, "y": data.train.y}
    form = {"round": round, "name": data.name, "n_classes": data.n_classes, "mean": data.mean, "std": data.std}
    form |= {name: [str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for name, t in one.items()}
    # one entry, as several have no order, and the bytes of a run are the same whenever it was resumed
    write_bytes(path, save(tensors, {"fedcommons": json.dumps(form)}))


def read(path: Path) -> tuple[dict[str, torch.Tensor], int, Dataset] | None:
    """The tensors, the round and the data set without its examples; None where there is no such file.

    Raises:
        UserError: it is damaged, or no regular file.
    """
    try:
        with safe_read.opened(path, memory_limit.memory()) as file:
            if file is None:
                return None
            content = file.read()
        tensors = load(content)
        told = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        form = json.loads(told["fedcommons"])
        (kind, shape), (kind_y, shape_y) = form["x"], form["y"]
        empty = Examples(torch.empty(0, *shape, dtype=_DTYPES[kind]), torch.empty(0, *shape_y, dtype=_DTYPES[kind_y]))
        data = Dataset(
            name=form["name"], n_classes=form["n_classes"], mean=tuple(form["mean"]), std=tuple(form["std"]),
            augment=False, train=empty, validation=empty, test=empty,
        )  # fmt: skip
        return tensors, int(form["round"]), data
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}.") from None
    except (ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}.") from None


_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.uint8, torch.int64, torch.float32, torch.float64)}


class Best:
    """Keeps the model of the best round, and writes it with the next checkpoint: a killed run finds it again.

    lines: of the rounds so far. watched: the metric and which way is better; by default the accuracy on validation
    data, or the loss where there is none.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], watched: tuple[str, str] | None) -> None:
        self.watched = [watched] if watched else [("validation/accuracy", "max"), ("validation/loss", "min")]
        self.value: float | None = None
        self.held: Standing | None = None
        self.before: Standing | None = None  # held until an extra round was better
        self.is_extra = False
        here = next((one for one in self.watched if any(one[0] in line for line in lines)), None)
        if here and (number := best_round(lines, *here)):
            self.value = lines[number][here[0]]

    def see(self, now: Standing, metrics: Mapping[str, Any], *, is_extra: bool = False) -> None:
        """Keep this round's model if it is the best; a round without the metric, or one that is not finite, is not.

        is_extra: it is evaluated only as it is the last one.
        """
        here = next((one for one in self.watched if one[0] in metrics), None)
        value = metrics.get(here[0]) if here else None
        if not here or not now.round or "model" not in now.state or value is None or not abs(value) < float("inf"):
            return
        if self.value is None or (value > self.value if here[1] == "max" else value < self.value):
            self.before, self.is_extra = self.held, is_extra
            self.value, self.held = value, now

    def write(self, folder: Path, build: Build, data: Dataset) -> None:
        """Write what is kept, if anything is."""
        if self.held is None:
            return
        if self.is_extra and self.before is not None:
            self._write(folder / BEFORE, self.before, build, data)
        elif self.is_extra and (folder / BEST).is_file():
            write_bytes(folder / BEFORE, (folder / BEST).read_bytes())
        self._write(folder / BEST, self.held, build, data)
        self.held = None

    @staticmethod
    def _write(path: Path, now: Standing, build: Build, data: Dataset) -> None:
        write(path, module_with(build(), now.model, now.buffers), now.round, data)

    @staticmethod
    def rewind(folder: Path, last: int) -> None:
        """Forget what was written of a round after the last one that there is still."""
        if (found := read(folder / BEST)) is None or found[1] <= last:
            return
        if (folder / BEFORE).is_file():
            (folder / BEFORE).replace(folder / BEST)
        else:
            (folder / BEST).unlink()


def to_onnx(module: LightningModule, data: Dataset, path: Path) -> None:
    """Write the module's ``forward`` as ONNX, for batches of any size; data: what it takes.

    Raises:
        UserError: torch cannot.
    """
    x = torch.zeros(2, *data.shape, dtype=data.train.x.dtype)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                module.eval(), (x,), dynamo=True, verbose=False, input_names=["x"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )  # fmt: skip
        assert program is not None
        program.save(path)
    except Exception as error:  # of torch's exporter anything may come
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--export onnx: torch cannot write this module: {why[:120]}") from error


BESIDE = 4
"""So many times the bytes of the model a file may have: a checkpoint has the optimizer's state besides."""

INSIDE = "network."
"""The name of a plain network in the module that trains it."""


def load_weights(module: nn.Module, name: str, digest: str | None) -> None:
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
