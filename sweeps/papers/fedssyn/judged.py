"""Report of the quality of pools of synthetic images: table and CSV over seeds, image grid of the first seed."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcommons.audits.quality import Quality, pool_quality
from fedcommons.cli import parse
from fedcommons.config import registry
from fedcommons.config.experiment import Experiment
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import default_device, fresh_torch, set_up_process
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators import image_cache
from fedcommons.reports import tables
from fedcommons.reports.plots import image_grid
from fedcommons.runs.assemble import OnStep, contributions, synthetic_images
from fedcommons.runs.build import build, module_of
from fedcommons.runs.spec import RunSpec
from fedcommons.seeding import numpy_generator
from fedcommons.storage.artifact_store import Store
from fedcommons.tune import dry_run, grid
from fedcommons.tune.study import Report

IMAGES = 3
"""Number of images of each class in a row of the picture."""

MEASURES = ("precision", "recall", "density", "coverage", "kernel_distance", "fidelity")

POOL = ("generator", "rho", "epochs")
"""Columns that identify a pool: its generator, the share rho of images that the generator saw, and its epochs."""


def _checked(config: Experiment) -> RunSpec:
    """Return the prepared experiment, whose clients generate images and whose model has a head."""
    prepared = build(config)
    if not any(need.n for need in prepared.requests):
        raise UserError("no client draws an image, so there are none to judge: use a larger sharing.p.")
    if "head" not in dir(module_of(config)(prepared.dataset, "meta")):
        raise UserError(f"model.name {config.model.name} has no attribute head, whose inputs would be the features.")
    return prepared


def price(options: parse.Options, say: Callable[[str], None]) -> None:
    store = Store(Path(options.config.artifacts), say, options.config.storage)
    jobs = image_cache.missing(store, [need for config in options.pools for need in _checked(config).requests])
    seconds = dry_run.duration(dry_run.generators(jobs))
    say(f"{len(jobs)} generators to train, about {seconds} here on one core, then two classifiers per pool.")


def work(options: parse.Options, say: Callable[[str], None], on_step: OnStep | None = None) -> None:
    """Generate the pools that are not stored, measure the quality of each pool, and write the report into ``--out``."""
    store, records, pictures = Store(Path(options.config.artifacts), say, options.config.storage), [], []
    for seed, of_seed in groupby(options.pools, key=lambda config: config.seed):
        ready = [_checked(config) for config in of_seed]
        with fresh_torch():
            set_up_process()
            jobs = image_cache.missing(store, [need for p in ready for need in p.requests])
            synthetic_images(ready[0], store, jobs, say, on_step)
            for number, prepared in enumerate(ready, 1):
                say(f"seed {seed}: judging pool {number}/{len(ready)}")
                images = [m.examples for m in contributions(prepared, store)]
                pool = Examples(torch.cat([m.x for m in images]), torch.cat([m.y for m in images]))
                records.append({**_named(prepared.record), "seed": seed, **_plain(_judged(prepared, pool, options))})
                if seed == options.pools[0].seed:
                    pictures.append((prepared, images, pool[numpy_generator(seed, "pictures").permutation(len(pool))]))
    text, smoke = table(records, options.neighbours, options.epochs), grid.is_smoke(options)
    report = Report(text, records, None, {"quality.png": lambda path: _draw(pictures, path, smoke)})
    say("\n" + report.write("quality", options, Path(options.out)))


def _judged(prepared: RunSpec, pool: Examples, options: parse.Options) -> Quality:
    c, data = prepared.record, prepared.dataset
    loop = LocalSGD(options.epochs, c.client.batch_size, onednn=c.client.onednn)
    trainer = Work(module_of(c)(data), default_device(), loop)
    return pool_quality(
        trainer, prepared.train, pool, data.test, c.seed, k=options.neighbours, most=options.images
    )  # fmt: skip


def _named(config: Experiment) -> dict[str, Any]:
    """Return the values of the columns ``POOL``, which identify the experiment's pool."""
    flat = config.flat
    made_by = registry.label(flat["generator.name"])
    return {"generator": made_by, "rho": flat["generator.rho"], "epochs": flat.get("generator.epochs")}


def _plain(q: Quality) -> dict[str, Any]:
    """Return a pool's quality as a line of the CSV; columns ``test_images_...`` have the quality of test images."""
    unseen = {f"test_images_{name}": q.unseen[name] for name in MEASURES}
    return {**{name: q.pool[name] for name in MEASURES}, "accuracy": q.accuracy, **unseen, "points": q.points,
            "trained": q.trained}  # fmt: skip


def table(records: Sequence[Mapping[str, Any]], k: int, epochs: int) -> str:
    """Return the table: a line of means over seeds for each pool, and a line for test images, as a reference."""
    seeds = list(dict.fromkeys(r["seed"] for r in records))
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for r in records:
        groups.setdefault(tuple(r[name] for name in POOL), []).append(r)
    lines = []
    for (made_by, rho, epoch), group in groups.items():
        values = [tables.mean_std([r[name] for r in group], 3) for name in (*MEASURES, "accuracy")]
        lines.append([made_by, f"{100 * rho:g} %", "-" if epoch is None else epoch, *values])
    first = next(iter(groups.values()))
    unseen = [tables.mean_std([r[f"test_images_{name}"] for r in first], 3) for name in MEASURES]
    lines.append(["test images", "-", "-", *unseen, "-"])
    head = [*POOL, *(name.replace("_", " ") for name in MEASURES), "accuracy"]
    points, trained = (
        ", ".join(f"{n:,}" for n in sorted({r[name] for r in records})) for name in ("points", "trained")
    )
    notes = [
        f"{points} images of each pool are compared with an equal number of real training images, by {k} nearest "
        "neighbours. The features are the inputs of the head of a classifier of real training images. In the last line "
        "test images take the place of the first pool; these are the values of fresh real images.",
        "Fidelity: share of images whose label the classifier of real images predicts; for test images its accuracy. "
        "Accuracy: accuracy on all test images of a classifier trained on the pool. Both classifiers are the run's "
        f"model, trained {epochs} epochs on {trained} images.",
        "rho: share of a client's images that its generator saw. Fewer epochs are checkpoints of the same training.",
        f"Seeds: {','.join(map(str, seeds))}; ± is the sample standard deviation.",
    ]
    return tables.markdown(head, lines) + tables.numbered(notes)


def _draw(pictures: Sequence[tuple[RunSpec, list[Examples], Examples]], path: Path, smoke: bool) -> None:
    """Draw a row of real images, then a row for each pool; if there is one pool, also rows for its first 12 clients."""
    prepared, clients, pool = pictures[0]
    classes = prepared.dataset.classes
    rows = [("real", _of_each_class(prepared.train, classes))]
    names = [_named(p.record) for p, _, _ in pictures]
    varied = [name for name in POOL if len({fields[name] for fields in names}) > 1]
    if varied:
        labels = [", ".join(_in_words(name, fields[name]) for name in varied) for fields in names]
        rows += [(label, _of_each_class(union, classes)) for label, (_, _, union) in zip(labels, pictures, strict=True)]
    else:
        rows.append(("pool", _of_each_class(pool, classes)))
        needs = prepared.requests
        each = [(f"client {need.client}", _of_each_class(m, classes)) for need, m in zip(needs, clients, strict=True)]
        rows += each[:12]
    title = f"First {IMAGES} images of each class, real and synthetic, seed {prepared.record.seed}"
    image_grid(path, rows, [f"class {y}" for y in range(classes)], title, smoke)


def _in_words(name: str, value: Any) -> str:
    return f"rho {100 * value:g} %" if name == "rho" else f"{value} epochs" if name == "epochs" else str(value)


def _of_each_class(examples: Examples, n_classes: int) -> list[np.ndarray | None]:
    """Return the first ``IMAGES`` images of each class; None in place of missing images."""
    images: list[np.ndarray | None] = []
    for label in range(n_classes):
        first = examples.x[(examples.y == label).nonzero().flatten()[:IMAGES]]
        images += [*(x.numpy() for x in first), *[None] * (IMAGES - len(first))]
    return images
