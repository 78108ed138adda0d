"""Central models, the reference lines of figure 3: trained on all data in one place, by a Lightning Trainer.

central_real: trained on all real training images. central_synthetic: trained on all clients' synthetic images together,
the same images that the federated runs train on.
"""

import logging
import signal
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from fedcommons.config.dotted import deciding
from fedcommons.config.experiment import Experiment
from fedcommons.core.evaluation import CHUNK
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import default_device, fresh_torch, set_up_process
from fedcommons.data.examples import Dataset, Examples
from fedcommons.data.transforms import flip_and_crop
from fedcommons.errors import UserError
from fedcommons.runs.assemble import contributions
from fedcommons.runs.build import build, module_of
from fedcommons.runs.experiment import PATIENCE
from fedcommons.runs.spec import RunSpec
from fedcommons.seeding import generator, set_default_generator
from fedcommons.storage import file_lock
from fedcommons.storage.artifact_store import Store, key_of
from fedcommons.storage.atomic_files import remove_unfinished, unfinished, write_json
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import cost
from fedcommons.tune.work_counts import work_fields

_DECIDING = {
    "central_real": ("seed", "data.", "model.", "client.", "source.data", "source.model"),
    "central_synthetic": ("seed", "data.", "model.", "client.", "partition.", "generator.", "sharing.p", "source."),
}
"""Source of the training images -> names or prefixes of the config fields that decide the central training."""


@dataclass(frozen=True)
class Central:
    """One central training on the images ``source`` (central_real or central_synthetic); config: all other settings."""

    source: str
    config: Experiment
    epochs: int

    @property
    def facts(self) -> dict[str, Any]:
        """Return all values that decide the result of the training: source, epochs and config fields."""
        fields = {n: v for n, v in deciding(self.config).items() if n.startswith(_DECIDING[self.source])}
        return {"source": self.source, "epochs": self.epochs, **fields}

    @property
    def name(self) -> str:
        """Return the name of the training's folder inside the sweep's folder."""
        value = self.config.flat.get("partition.alpha") if self.source == "central_synthetic" else None
        alpha = [] if value is None else [f"alpha{value:.4g}"]
        return "-".join([self.source, *alpha, f"seed{self.config.seed}", key_of(self.facts)[:6]])


@dataclass
class Batches:
    """Minibatches for a Trainer, augmented as clients' batches are. Seed and number of the epoch decide the order."""

    examples: Examples
    batch_size: int
    seed: int
    drop_last: bool = False
    augment: bool = False
    passes: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = generator(self.seed, "central order", self.passes)
        self.passes += 1
        parts = torch.randperm(len(self.examples), generator=draws).split(self.batch_size)
        for number, part in enumerate(parts):
            if self.drop_last and number and len(part) < self.batch_size:
                break
            x, y = self.examples.x[part], self.examples.y[part]
            yield flip_and_crop(x, draws) if self.augment else x, y


class _Accuracy(Callback):
    """A callback that records the accuracy on ``examples``, in [0, 1], after every epoch."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self.accuracies: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.eval()
        with torch.no_grad():
            right = sum(
                int((pl_module(x.to(pl_module.device)).argmax(1) == y.to(pl_module.device)).sum())
                for x, y in zip(self.examples.x.split(CHUNK), self.examples.y.split(CHUNK), strict=True)
            )
        pl_module.train()
        self.accuracies.append(right / len(self.examples))


def fit(module: LightningModule, batches: Batches, test: Examples, epochs: int, *more: Callback) -> list[float]:
    """Train ``module`` on ``batches`` and return its accuracy on ``test``, in [0, 1], after each epoch."""
    accuracy = _Accuracy(test)
    set_default_generator(batches.seed, "central dropout")
    run_trainer(module, batches, epochs, [accuracy, *more])
    return accuracy.accuracies


def run_trainer(module: LightningModule, batches: Iterable[Any], epochs: int, callbacks: list[Callback]) -> None:
    """Train ``module`` in this process, without screen output, for a number of passes (``epochs``) over ``batches``.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="gpu" if default_device().type == "cuda" else "cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # without this plugin, Lightning refuses to run inside a Slurm job
    )
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.utils._pytree")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning uses a name that torch deprecated
            trainer.fit(module, batches)
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        # Lightning handles Ctrl-C by ignoring SIGINT and raising SystemExit. Restore the handler and KeyboardInterrupt.
        signal.signal(signal.SIGINT, on_ctrl_c)
        raise KeyboardInterrupt from None


@fresh_torch()
def run(central: Central, folder: Path) -> dict[str, Any]:
    """Return the summary in ``folder/summary.json``; if it is missing, train the central model and write it."""
    if finished := read_summary(folder):
        return finished
    with file_lock.open_lock(folder, _stranger, "folder of a central model", patience=PATIENCE):
        remove_unfinished(folder, r"summary\.json")
        summary = _train(central)
        write_json(folder / "summary.json", summary)
    return summary


def _stranger(folder: Path) -> str | None:
    names = [name for name in file_lock.strangers(folder) if "summary.json" not in (name, unfinished(name))]
    return names[0] if names else None


def _train(central: Central) -> dict[str, Any]:
    set_up_process()
    c, prepared = central.config, build(central.config)
    synthetic = central.source == "central_synthetic"
    train = _union(prepared) if synthetic else prepared.train
    module = module_of(c)(prepared.dataset)
    _require_logits(module, prepared.dataset)
    batches = Batches(train, c.client.batch_size, c.seed, c.client.drop_last, prepared.dataset.augment)
    validated = [_Accuracy(prepared.dataset.validation)] if len(prepared.dataset.validation) else []
    with onednn(c.client.onednn):
        accuracies = fit(module, batches, prepared.dataset.test, central.epochs, *validated)
    return {
        "dataset": c.data.name,
        "algorithm": "central",
        "setting": central.source,
        "alpha": c.flat.get("partition.alpha") if synthetic else None,
        "n_clients": len(prepared.partition.rows) if synthetic else None,
        "participation": None,
        "seed": c.seed,
        "learning_rate": c.client.lr,
        "epochs": central.epochs,
        "images": len(train),
        "last_accuracy": accuracies[-1],
        "best_accuracy": max(accuracies),
        "validation_accuracy": validated[0].accuracies[-1] if validated else None,
        "accuracies": accuracies,
        "partition": prepared.partition.fingerprint if synthetic else None,
        "facts": central.facts,
    }


def _require_logits(module: LightningModule, dataset: Dataset) -> None:
    """Check that the module's forward returns logits of all classes, from which accuracy is computed."""
    with torch.no_grad():
        output = module.eval()(dataset.test.x[:1])
    module.train()
    if not (isinstance(output, Tensor) and output.shape == (1, dataset.n_classes)):
        raise UserError(
            f"a central model needs logits to measure accuracy, but the forward of {type(module).__name__} returns no "
            f"logits of {dataset.n_classes} classes."
        )


def _union(prepared: RunSpec) -> Examples:
    """Return the union of all clients' synthetic images; each client has as many images as in the federated runs."""
    parts = contributions(prepared, Store(Path(prepared.record.artifacts), storage=prepared.record.storage))
    return Examples(torch.cat([p.examples.x for p in parts]), torch.cat([p.examples.y for p in parts]))


def seconds_of(line: Central, prices: dict[tuple, tuple[float, float]]) -> float:
    """Return the estimated seconds of training a central model, from timed steps and test evaluations.

    prices: results of ``measure``, by the fields on which they depend. The result of a new measurement is added.
    """
    ready = build(line.config)
    if (key := work_fields(line.config)) not in prices:
        prices[key] = measure(line, ready.dataset)
    step, image = prices[key]
    is_synthetic = line.source == "central_synthetic"
    n = sum(need.n for need in ready.requests) if is_synthetic else len(ready.dataset.train)
    steps = -(-n // line.config.client.batch_size)
    return line.epochs * (steps * step + len(ready.dataset.test) * image)


@fresh_torch()
def measure(line: Central, dataset: Dataset) -> tuple[float, float]:
    """Return the seconds of a training step and the seconds of evaluating a test image, measured on one core."""
    c, test = line.config.client, dataset.test
    torch.set_num_threads(1)
    module = module_of(line.config)(dataset)
    some, one_image, chunk = dataset.train[slice(0, 2 * c.batch_size)], test[slice(0, 1)], test[slice(0, CHUNK)]
    batches, steps = Batches(some, c.batch_size, 0, augment=dataset.augment), -(-len(some) // c.batch_size)
    # This is a warm-up, because Lightning imports modules at its first training.
    fit(module, Batches(one_image, 1, 0), one_image, 1)
    start, step = cost.per_epoch(lambda epochs: fit(module, batches, one_image, epochs), steps)
    return step, max(0.0, cost.seconds_of(lambda: fit(module, batches, chunk, 1)) - start - steps * step) / len(chunk)
