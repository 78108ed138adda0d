"""Model files: save trained models as named tensors, and load the file of initial weights.

``model.safetensors`` is the server model of the last round, ``best.safetensors`` the server model of the round with
the best validation value. Both files contain the module's whole ``state_dict``, with its untrained tensors, and can be
read by ``safetensors.torch.load_file(path)``. Their metadata name the round and describe the data, so that the module
can be built again without the data.

A model's initial weights are a safetensors file or a state dict saved by torch. The file's tensors must be the module's
state (parameters, also frozen ones, and buffers) with the same names and shapes, unless ``model.weights_strict`` is
false. The tensors of a plain network may also have the network's own names, and tensors of a torchvision network
the names in torchvision. In a Lightning checkpoint the tensors are under ``state_dict``.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from pathlib import Path
from zipfile import ZipFile, is_zipfile

import torch
from pytorch_lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedcommons.config.weights_file import WeightsFile, content, digest_of
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
    form |= {"positions": data.positions} if data.positions else {}
    form |= {"inputs": data.inputs} if data.inputs else {}
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
            augment=False, train=empty, validation=empty, test=empty, positions=form.get("positions"),
            inputs=tuple((name, tuple(shape)) for name, shape in form.get("inputs", ())),
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


def load_weights(module: nn.Module, file: WeightsFile) -> str | None:
    """Copy the weights of a file into the module; if the module is on the meta device, only check the weights.

    Return a message that lists the tensors that were not loaded; None if all were.

    Raises:
        UserError: the file cannot be read or has changed; its names, shapes or types differ from the module's although
            the file is strict; or no tensor fits.
    """
    state, what = module.state_dict(), f"model.weights {quote(file.name)}"
    most = MAX_SIZE_RATIO * sum(t.nbytes for t in state.values()) + 2**20
    data = content(file.name, most)
    if digest_of(data) != file.digest:
        raise UserError(f"{what} is not the file it was when this experiment was written.")
    tensors = _read(file.name, data, most)
    network, by_name, keys = getattr(module, "network", None), dict[str, Tensor](), dict[str, str]()
    for key, tensor in _renamed(what, tensors, file.pairs):
        name = _name_in_model(state, key, network)
        if name in by_name:
            raise UserError(f"{what} has two tensors for {name} of the model.")
        by_name[name], keys[name] = tensor, key
    ignored = tuple(NETWORK_PREFIX + begin for begin in getattr(network, "not_in_file", ()))
    wanted = [name for name in state if not name.startswith(ignored)]
    missing, extra = [n for n in wanted if n not in by_name], sorted(n for n in by_name if n not in state)
    if file.is_strict and (missing or extra):
        differences = [f"it lacks {_some(missing)}"] * bool(missing) + [f"it also has {_some(extra)}"] * bool(extra)
        raise UserError(f"{what} has other names than the model: {', and '.join(differences)}.")
    loaded = set[str]()
    for name in wanted:
        tensor, new = state[name], by_name.get(name)
        if new is None:
            continue
        is_dense = new.layout == torch.strided and not (new.is_nested or new.is_quantized)
        if not is_dense or new.device.type != "cpu":
            raise UserError(
                f"{what}: {name} must be a dense tensor on the CPU, got {new.layout} {new.dtype} on {new.device.type}."
            )
        kinds = [(t.is_floating_point(), t.is_complex()) for t in (new, tensor)]
        if new.shape != tensor.shape or kinds[0] != kinds[1]:
            if file.is_strict:
                is_head = hasattr(network, "not_in_file") and name.startswith(f"{NETWORK_PREFIX}last.")
                advice = "--model.head new draws a new last layer" if is_head else "see --model.weights_strict"
                raise UserError(
                    f"{what}: {name} is {new.dtype} {tuple(new.shape)}, and the model's is {tensor.dtype} "
                    f"{tuple(tensor.shape)}; {advice}."
                )
            continue
        if not new.to(tensor.dtype).isfinite().all():  # after the comparison of shapes, as a small file may expand
            raise UserError(f"{what}: {name} has values that are not finite.")
        loaded.add(name)
        if not tensor.is_meta:
            tensor.copy_(new)
    if not loaded:
        raise UserError(
            f"{what} has no tensor of the model: it has {_some(list(by_name)) or 'none'}, the model {_some(wanted)}."
        )
    initial, unused = [n for n in state if n not in loaded], [keys[n] for n in by_name if n not in loaded]
    if not initial and not unused:
        return None
    return (
        f"{what}: {len(loaded)} tensors were loaded, {len(initial)} of the model keep their initial values "
        f"({_some(initial, LISTED) or 'none'}), and {len(unused)} of the file are not used "
        f"({_some(unused, LISTED) or 'none'})."
    )


LISTED = 12
"""Maximum number of names in the message that lists the tensors which were not loaded."""


def _renamed(
    what: str, tensors: Mapping[str, Tensor], pairs: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor); the first pair (old, new) whose ``old`` is a prefix of the name replaces the prefix.

    Raises:
        UserError: an ``old`` begins no name.
    """
    for old, _ in pairs:
        if not any(key.startswith(old) for key in tensors):
            raise UserError(
                f"model.weights_map: no tensor of {what} begins with {quote(old)}; it has {_some(list(tensors))}."
            )
    for key, tensor in tensors.items():
        old, new = next((pair for pair in pairs if key.startswith(pair[0])), ("", ""))
        yield new + key.removeprefix(old), tensor


def _name_in_model(state: Collection[str], key: str, network: nn.Module | None) -> str:
    """Return the module's name of the tensor that the file calls ``key``; ``key`` if the module lacks the tensor."""
    names = [key, NETWORK_PREFIX + key]
    if name_here := getattr(network, "name_here", None):  # a network of torchvision
        names.append(NETWORK_PREFIX + name_here(key))
    return next((name for name in names if name in state), key)


def _read(name: str, data: bytes, most: float) -> Mapping[str, Tensor]:
    try:
        if name.endswith(".safetensors"):
            return dict(sorted(load(data).items()))  # the library's order is random
        if is_zipfile(BytesIO(data)):  # torch wrote no zip files until version 1.5
            with ZipFile(BytesIO(data)) as packed:  # a compressed zip, not written by torch.save, may be huge
                size = sum(entry.file_size for entry in packed.infolist())
            if size > most:
                size_in_words = f"unpacks to {size:,} bytes, and at most {most:,} are read"
                raise UserError(f"model.weights {quote(name)} {size_in_words}.")
        loaded = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a user's file may raise any error
        kind = type(error).__name__
        raise UserError(
            f"model.weights {quote(name)} cannot be read as weights, .safetensors or a file of torch.save ({kind})."
        ) from error
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not (isinstance(loaded, dict) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in loaded.items())):
        raise UserError(f"model.weights {quote(name)} holds {type(loaded).__name__}, and must hold tensors by name.")
    return loaded


def _some(names: Collection[str], most: int = 3) -> str:
    """Return the first names and the number of further names, as text; ``most``: maximum number of names."""
    first = ", ".join(list(names)[:most])
    return f"{first} and {len(names) - most} more" if len(names) > most else first
