"""The order of a sweep's trials (each run after its generators), and values that the driver passes to the trials."""

import json
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.experimental import internal_kv
from ray.tune.search import Searcher

from fedcommons.config import dotted
from fedcommons.errors import sentence
from fedcommons.storage.artifact_store import Store

EVERY = 5.0
"""Seconds between two progress reports of a generator's training; each report pauses the training for a moment."""


@dataclass(frozen=True)
class MissingArtifact:
    """Synthetic images of a client's generator that the artifact store lacks; the generator may be missing too.

    images: the keys of the images in the store. cells: names of all runs that need some of the images.
    described_by: names of a subset of these runs, whose configs together describe all the images.
    """

    client: int
    images: Collection[str]
    cells: Collection[str]
    described_by: Collection[str]


def make(cells: Collection[Mapping[str, Any]], images: Collection[str]) -> None:
    """Train a generator unless it is stored, sample the images with the keys ``images``, and store the results.

    cells: runs that need the images, each with its ``config`` and, as ``data``, the hash of the driver's data set.

    An error is reported to Tune and not raised, as a second attempt would fail again. If this process has lost its GPU,
    the error is also raised, so that Tune starts a new process.
    """
    from fedcommons.core.worker import set_up_process
    from fedcommons.generators import image_cache
    from fedcommons.runs import build, load_data
    from fedcommons.runtime.gpu_memory import is_lost

    set_up_process()
    reported = time.monotonic()

    def step(number: int, total: int, doing: str) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported >= EVERY:
            reported = now
            tune.report({"step": number, "of": total, "doing": doing})

    try:
        trained = False
        configs = [dotted.from_dict(cell["config"]) for cell in cells]
        prepared = [build.build(config) for config in configs]
        for ready, cell in zip(prepared, cells, strict=True):
            load_data.require_same(ready.dataset, cell["data"])
        needs = [need for ready in prepared for need in ready.requests]
        store = Store(Path(configs[0].artifacts), storage=configs[0].storage)
        for job in image_cache.missing(store, [need for need in needs if need.images_key in images]):
            image_cache.keep(store, job, image_cache.make(job, step))
            trained = trained or bool(job.epochs)
        tune.report({"trained": trained, "unsent": store.upload()})
    except Exception as error:
        tune.report({"failed": sentence(error), "trace": traceback.format_exc()})
        if is_lost():
            raise


class InOrder(Searcher):
    """The search algorithm that gives Ray Tune its trials: the first remaining run, or a generator that the run needs.

    If a core is free while the first remaining run waits for its generators, the core starts a trial of a later run.

    cells: number of cores of each run, by name; a generator takes one core. missing: the missing artifacts of all runs.
    """

    def __init__(self, cells: Mapping[str, int], missing: Collection[MissingArtifact]) -> None:
        super().__init__()
        self.cells, self.missing = dict(cells), dict(enumerate(missing))
        self.running: dict[str, tuple[int | None, int]] = {}  # by trial ID: number of its generator or None; its cores
        self.failed: dict[str, str] = {}  # by run: why one of its generators failed
        self.traces: list[str] = []  # tracebacks of failed generators
        self.unsent = ""  # why the upload of a generator failed; empty: no upload failed
        self.n_trained = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the parameters of the next trial; None: no trial can start now; FINISHED: all trials have started."""
        in_training = {number for number, _ in self.running.values()}
        for name in list(self.cells):
            needed = [number for number, generator in self.missing.items() if name in generator.cells]
            if name in self.failed:
                del self.cells[name]
            elif not needed:
                self.running[trial_id] = None, self.cells.pop(name)
                return {"cell": name}
            elif waiting := [number for number in needed if number not in in_training]:
                self.running[trial_id] = waiting[0], 1
                generator = self.missing[waiting[0]]
                return {"generator": {"cells": list(generator.described_by), "images": list(generator.images)}}
            elif sum(cores for _, cores in self.running.values()) >= ray.cluster_resources().get("CPU", 1):
                return None
        return None if self.cells else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record that a trial ended; after a failed generator, mark all runs that need the generator as failed."""
        number, _ = self.running.pop(trial_id, (None, 0))
        if number is None:
            return
        generator = self.missing.pop(number)
        if error or not result or "trained" not in result:
            reason = (result or {}).get("failed", "its process died")
            message = f"the generator of client {generator.client} failed: {reason}"
            self.failed |= dict.fromkeys(generator.cells, message)
            self.traces += [trace for trace in [(result or {}).get("trace")] if trace]
        else:
            self.n_trained += result["trained"]
            self.unsent = result.get("unsent") or self.unsent

    def __getstate__(self) -> dict:
        return {}  # Tune pickles the search algorithm into a record that is not used

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Save nothing, as a sweep resumes from the folders of its runs."""


NAMESPACE = "fedcommons"
"""Namespace of the values in Ray's key-value store."""

DRIVER, OBJECTS = "", " "
"""Names under which the driver shares its ``hosts.facts``, such as code hashes, and its objects; no run has them."""


@contextmanager
def shared_values(values: Mapping[str, Any], objects: Mapping[str, Any]) -> Iterator[None]:
    """Share JSON values with the trials of this driver through Ray's key-value store, while the context is open.

    Tune would record the values if they were parameters of trials. ``tune.with_parameters`` would store the values
    until the driver ends. objects: other values, by name, which Ray's object store contains until the driver ends.
    """
    reference = cloudpickle.dumps(ray.put(objects)).hex() if objects else ""  # pyright: ignore[reportPrivateImportUsage]
    keys = {_key(name): json.dumps(value) for name, value in {**values, OBJECTS: reference}.items()}
    try:
        for key, value in keys.items():
            internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)
        yield
    finally:
        for key in keys:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def shared_value(name: str) -> Any:
    """Return the value that the driver of this trial shares under ``name`` (see ``shared_values``)."""
    return json.loads(internal_kv._internal_kv_get(_key(name), namespace=NAMESPACE))


def shared_objects() -> Mapping[str, Any]:
    """Return the objects that the driver of this trial shares (see ``shared_values``)."""
    reference = shared_value(OBJECTS)
    return ray.get(cloudpickle.loads(bytes.fromhex(reference))) if reference else {}


def _key(name: str) -> str:
    return f"{ray.get_runtime_context().get_job_id()}/{name}"
