"""The quality of a configuration's pool: its table, its numbers and a grid of pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedcommons.artifacts import Store
from fedcommons.audits.quality import Quality, pool_quality
from fedcommons.config import cli, presets
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.core.worker import default_device, fresh_torch, set_up_process
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.reports.images import image_grid
from fedcommons.runs.build import OnStep, prepare, synthetic_images
from fedcommons.runs.worker import build_module
from fedcommons.sharing import synthetic_pool
from fedcommons.sweeping import planned

SHOWN = 3
"""Images of each class in a row of the picture."""


def work(options: cli.Options, say: Callable[[str], None], on_step: OnStep | None = None) -> None:
    """Make the pool where it is not stored, judge it, and write all into ``--out``; with ``--dry-run`` only the price.

    Raises:
        UserError: no client draws an image, or the model names no head.
    """
    c, prepared, store = options.config, prepare(options.config), Store(Path(options.config.artifacts), say)
    needs, jobs = prepared.needs, synthetic_pool.missing(store, prepared.needs)
    if not any(need.n for need in needs):
        raise UserError("no client draws an image, so there are none to judge: use a larger sharing.p.")
    if "head" not in dir(build_module(c, prepared.dataset, "meta")):
        raise UserError(f"model.name {c.model.name} names no head, whose inputs are the features of quality.")
    if options.dry_run:
        seconds = planned.duration(planned.generators(jobs))
        say(f"{len(jobs)} generators to train, about {seconds} here on one core, then two classifiers.")
        return
    out, data = Path(options.out), prepared.dataset
    with fresh_torch():
        set_up_process()
        made = [m.examples for m in synthetic_images(prepared, store, jobs, say, on_step)]
        pool = Examples(torch.cat([m.x for m in made]), torch.cat([m.y for m in made]))
        loop = LocalSGD(options.epochs, c.client.batch_size, onednn=c.client.onednn)
        trainer = Work(build_module(c, data), default_device(), loop)
        found = pool_quality(
            trainer, prepared.train, pool, data.test, c.seed, k=options.neighbours, most=options.images
        )
    smoke, text = options.preset == "smoke", table(found, options.neighbours, options.epochs)
    write_text(out / "quality.md", f"**{presets.SMOKE}**\n\n{text}" if smoke else text)
    of_kinds = {"pool": dict(found.pool), "test images": dict(found.unseen)}
    record = {**of_kinds, "accuracy_of_pool": found.accuracy, "points": found.points, "trained": found.trained}
    write_json(out / "quality.json", record)
    rows = [(name, _of_each_class(of, data.classes)) for name, of in (("real", prepared.train), ("pool", pool))]
    each = [(f"client {need.client}", _of_each_class(m, data.classes)) for need, m in zip(needs, made, strict=True)]
    image_grid(out / "quality.png", [*rows, *each[:12]], [f"class {y}" for y in range(data.classes)], "", smoke)
    say("\n" + text)


def table(found: Quality, k: int, epochs: int) -> str:
    """The pool beside test images in its place."""
    names = ("precision", "recall", "density", "coverage", "kernel_distance", "fidelity")
    lines = [
        [said, *(f"{of[name]:.3f}" for name in names), accuracy]
        for said, of, accuracy in (
            ("pool", found.pool, f"{found.accuracy:.3f}"),
            ("test images", found.unseen, "-"),
        )
    ]
    head = ["images", *(name.replace("_", " ") for name in names), "accuracy"]
    notes = [
        f"{found.points:,} images of each kind against as many real training images, {k} nearest neighbours, in the "
        "inputs of the head of a classifier of real training images. Test images stand in the pool's place: what fresh "
        "real images have.",
        "Fidelity: share of images that this classifier gives their label; of test images this is its accuracy. "
        "Accuracy: on all test images, of a classifier trained on the pool. Both classifiers: the run's model, "
        f"{epochs} epochs on {found.trained:,} images.",
    ]
    return tables.markdown(head, lines) + tables.numbered(notes)


def _of_each_class(of: Examples, n_classes: int) -> list[np.ndarray | None]:
    """The first images of each class; None where there are fewer."""
    found: list[np.ndarray | None] = []
    for label in range(n_classes):
        there = of.x[(of.y == label).nonzero().flatten()[:SHOWN]]
        found += [*(x.numpy() for x in there), *[None] * (SHOWN - len(there))]
    return found
