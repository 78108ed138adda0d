"""Model files: save trained models as named tensors, and load the file of initial weights.

``model.safetensors`` is the server model of the last round, ``best.safetensors`` the server model of the round with
the best validation value. Both files contain the module's whole ``state_dict``, with its untrained tensors, and can be
read by ``safetensors.torch.load_file(path)``. Their metadata name the round and describe the data, so that the module
can be built again without the data.

A model's initial weights are a safetensors file or a state dict saved by torch. The file's tensors must be the module's
state (parameters, also frozen ones, and buffers) with the same names and shapes. The tensors of a plain network may
also have the network's own names. In a Lightning checkpoint the tensors are under ``state_dict``.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from pytorch_lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedcommons.config.weights_file import content, digest_of
from fedcommons.core.client_worker import module_with
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError, quote
from fedcommons.federation.rounds import Standing
from fedcommons.runs.callbacks import Callback, Lines, RoundResult
from fedcommons.runs.early_stopping import best_round
from fedcommons.runtime import memory_limit
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_bytes

LAST, BEST, BEFORE = "model.safetensors", "best.safetensors", "best-before-last.safetensors"
"""Files of the last model, the best model, and the best model before the last round. ``BEFORE`` is written if the last
round is the best and is evaluated only because it is the last. A run continued with more rounds restores that model."""


def write(path: Path, module: LightningModule, round: int, data: Dataset) -> None:
    """Write the module's state after round ``round``, and a description of the data set ``data`` without examples."""
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in module.state_dict().items()}
    arrays = {"x": data.train.x, "y": data.train.y}
    form = {"round": round, "name": data.name, "n_classes": data.n_classes, "mean": data.mean, "std": data.std}
    form |= {} if data.normalised_by is None else {"normalised_by": data.normalised_by}
    form |= {name: [str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for name, t in arrays.items()}
    # A single metadata entry, as several entries have no fixed order, and a resumed run must write the same bytes.
    write_bytes(path, save(tensors, {"fedcommons": json.dumps(form)}))


def read(path: Path) -> tuple[dict[str, torch.Tensor], int, Dataset] | None:
    """Return the tensors by name, the round, and the data set without examples; None if there is no such file.

    Raises:
        UserError: the file is damaged, or is not a regular file.
    """
    try:
        with safe_read.open_file(path, memory_limit.memory()) as file:
            if file is None:
                return None
            content = file.read()
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        form = json.loads(metadata["fedcommons"])
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


_DTYPES = {str(dt).removeprefix("torch."): dt for dt in (torch.uint8, torch.int64, torch.float32, torch.float64)}


@dataclass
class BestModel(Callback):
    """The model of the best round so far, which is written to a file with each checkpoint.

    watched: metrics with their better direction ("max" or "min"); the first metric that the run logs is used.
    every: models are evaluated in rounds divisible by ``every`` and in the last round. data: see ``write``.
    """

    folder: Path
    watched: Sequence[tuple[str, str]]
    every: int
    build: Callable[[], LightningModule]
    data: Dataset
    value: float | None = None
    best: Standing | None = None
    before: Standing | None = None  # the best state before ``best``, if no file has this state yet

    def on_begin(self, start: Standing, lines: Lines) -> None:
        """Restore the best value. Replace ``BEST`` by ``BEFORE``, or delete it, if its round runs again."""
        chosen = next((pair for pair in self.watched if any(pair[0] in line for line in lines)), None)
        if chosen and (number := best_round(lines, *chosen)):
            self.value = lines[number][chosen[0]]
        path, before = self.folder / BEST, self.folder / BEFORE
        if (saved := read(path)) and saved[1] > (start.round if lines else -1):
            before.replace(path) if before.is_file() else path.unlink()

    def on_round(self, result: RoundResult) -> None:
        metric, way = next((pair for pair in self.watched if pair[0] in result.metrics), ("", ""))
        value, best, sign = result.metrics.get(metric), self.value, 1 if way == "max" else -1
        is_better = value is not None and isfinite(value) and (best is None or sign * value > sign * best)
        if result.standing.round and result.standing.has_model and is_better:
            self.before, self.best, self.value = self.best, result.standing, value
        if result.is_saved:
            self.on_error()

    def on_error(self) -> None:
        """Write the best model, if it is better than the model in the file."""
        if self.best is None:
            return
        if self.best.round % self.every and self.before:
            self._write(BEFORE, self.before)
        elif self.best.round % self.every and (self.folder / BEST).is_file():
            write_bytes(self.folder / BEFORE, (self.folder / BEST).read_bytes())
        self._write(BEST, self.best)
        self.best = None

    def _write(self, name: str, now: Standing) -> None:
        write(self.folder / name, module_with(self.build(), now.model, now.buffers), now.round, self.data)


def to_onnx(module: LightningModule, data: Dataset, path: Path) -> None:
    """Write the module's ``forward`` as ONNX, for batches of any size; data: states shape and type of the input.

    Raises:
        UserError: torch cannot export the module.
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
    except Exception as error:  # torch's exporter may raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--export onnx: torch cannot write this module: {reason[:120]}") from error


MAX_SIZE_RATIO = 4
"""Largest size of a weights file as a multiple of the model's size; a checkpoint also has the optimizer's state."""

NETWORK_PREFIX = "network."
"""Prefix of a plain network's tensor names in the module that trains the network."""


def load_weights(module: nn.Module, name: str, digest: str | None) -> None:
    """Copy the weights of a file into the module; if the module is on the meta device, only check the weights.

    name: the file's path. digest: the hash that the file must have.

    Raises:
        UserError: the file cannot be read or has changed; or its names, shapes or types differ from the module's.
    """
    state = module.state_dict()
    most = MAX_SIZE_RATIO * sum(t.nbytes for t in state.values()) + 2**20
    data = content(name, most)
    if digest_of(data) != digest:
        raise UserError(f"model.weights {quote(name)} is not the file it was when this experiment was written.")
    tensors = _read(name, data, most)
    if not any(key.startswith(NETWORK_PREFIX) for key in tensors) and all(
        key.startswith(NETWORK_PREFIX) for key in state
    ):
        tensors = {NETWORK_PREFIX + key: tensor for key, tensor in tensors.items()}
    missing, extra = [n for n in state if n not in tensors], sorted(n for n in tensors if n not in state)
    if missing or extra:
        differences = [f"it lacks {_some(missing)}"] * bool(missing) + [f"it also has {_some(extra)}"] * bool(extra)
        raise UserError(f"model.weights {quote(name)} has other names than the model: {', and '.join(differences)}.")
    for key, tensor in state.items():
        loaded = tensors[key]
        if loaded.shape != tensor.shape or loaded.is_floating_point() != tensor.is_floating_point():
            raise UserError(
                f"model.weights {quote(name)}: {key} is {loaded.dtype} {tuple(loaded.shape)}, and the model's is "
                f"{tensor.dtype} {tuple(tensor.shape)}."
            )
        if not loaded.isfinite().all():
            raise UserError(f"model.weights {quote(name)}: {key} has values that are not finite.")
        if not tensor.is_meta:
            tensor.copy_(loaded)


def _read(name: str, data: bytes, most: float) -> Mapping[str, Tensor]:
    try:
        if name.endswith(".safetensors"):
            return load(data)
        with ZipFile(BytesIO(data)) as packed:  # a compressed zip, not written by torch.save, may be huge
            size = sum(entry.file_size for entry in packed.infolist())
        if size > most:
            raise UserError(f"model.weights {quote(name)} unpacks to {size:,} bytes, and at most {most:,} are read.")
        loaded = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except BadZipFile:
        raise UserError(
            f"model.weights {quote(name)} is neither .safetensors nor a file that torch.save wrote."
        ) from None
    except Exception as error:  # a user's file may raise any error
        kind = type(error).__name__
        raise UserError(f"model.weights {quote(name)} cannot be read as weights ({kind}).") from error
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not (isinstance(loaded, dict) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in loaded.items())):
        raise UserError(f"model.weights {quote(name)} holds {type(loaded).__name__}, and must hold tensors by name.")
    return loaded


def _some(names: Collection[str]) -> str:
    """Return the first three names and the number of further names, as text."""
    first = ", ".join(list(names)[:3])
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else first
