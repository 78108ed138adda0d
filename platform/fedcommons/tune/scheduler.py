"""The order of a sweep's trials (each run after its generators), and the values that a sweep shares with its trials."""

import json
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher

from fedcommons.config import dotted
from fedcommons.core.worker import set_up_process
from fedcommons.errors import sentence
from fedcommons.generators import image_cache
from fedcommons.runs import build, load_data
from fedcommons.runtime.gpu_memory import is_lost
from fedcommons.storage.artifact_store import Store, key_of

EVERY = 5.0
"""Seconds between two progress reports of a generator's training, which waits until Tune accepts a report."""


@dataclass(frozen=True)
class MissingArtifact:
    """A missing artifact of the store: a client's generator, synthetic images of this generator, or both.

    images: the keys of the images. cells: the names of all runs that need some of the images. told_by: names of some of
    these runs, so that each image is needed by one of them: their configs describe all the images.
    """

    client: int
    images: Collection[str]
    cells: Collection[str]
    told_by: Collection[str]


def make(cells: Collection[Mapping[str, Any]], images: Collection[str]) -> None:
    """Train the generator of the images ``images``, sample the images, and store generator and images.

    cells: runs that need the images, each with its ``config`` and, as ``data``, the hash of its data set at the driver.

    An error is reported to Tune and not raised, as a second attempt would fail again. If this process has lost its GPU,
    the error is also raised, so that Tune starts a new process.
    """
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
        prepared = [build.prepare(config) for config in configs]
        for ready, cell in zip(prepared, cells, strict=True):
            load_data.require_same(ready.dataset, cell["data"])
        needs = [need for ready in prepared for need in ready.requests]
        store = Store(Path(configs[0].artifacts), storage=configs[0].storage)
        for job in image_cache.missing(store, [need for need in needs if key_of(need.images_facts) in images]):
            image_cache.keep(store, job, image_cache.make(job, step))
            trained = trained or bool(job.epochs)
        tune.report({"trained": trained, "unsent": store.upload()})
    except Exception as error:
        tune.report({"failed": sentence(error), "trace": traceback.format_exc()})
        if is_lost():
            raise


class InOrder(Searcher):
    """The search algorithm that gives Ray Tune its trials in order: the first remaining run, or a generator it needs.

    A trial for a later run comes earlier only if a core would otherwise wait for the first run's generators.

    cells: number of cores of each run, by name; a generator takes one core.  lacking: missing artifacts of all runs.
    """

    def __init__(self, cells: Mapping[str, int], missing: Collection[MissingArtifact]) -> None:
        super().__init__()
        self.cells, self.missing = dict(cells), dict(enumerate(missing))
        self.running: dict[str, int | None] = {}  # by trial: number of its generator; None: the trial is a run
        self.cores: dict[str, int] = {}  # by trial: its number of cores
        self.failed: dict[str, str] = {}  # by run: why the training of one of its generators failed
        self.traces: list[str] = []  # tracebacks of failed generators
        self.unsent = ""  # why the storage lacks some generators
        self.n_trained = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the parameters of the next trial; None: later. Tune calls this while no trial is pending."""
        for name in list(self.cells):
            needed = [number for number, generator in self.missing.items() if name in generator.cells]
            if name in self.failed:
                del self.cells[name]
            elif not needed:
                self.running[trial_id], self.cores[trial_id] = None, self.cells.pop(name)
                return {"cell": name}
            elif waiting := [number for number in needed if number not in self.running.values()]:
                self.running[trial_id], self.cores[trial_id] = waiting[0], 1
                generator = self.missing[waiting[0]]
                return {"generator": {"cells": list(generator.told_by), "images": list(generator.images)}}
            elif sum(self.cores.values()) >= ray.cluster_resources().get("CPU", 1):
                return None
        return None if self.cells else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record that a trial ended; if its generator failed, mark all runs that need this generator as failed."""
        self.cores.pop(trial_id, None)
        number = self.running.pop(trial_id, None)
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
        return {}  # Tune pickles the search algorithm into its own record, which is unused

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Do nothing: a sweep resumes from its runs' folders."""


NAMESPACE = "fedcommons"
"""Namespace of the shared values in Ray's key-value store."""

DRIVER = ""
"""The name of the driver's ``hosts.facts`` among the shared values; no run has this name."""


@contextmanager
def shared_values(values: Mapping[str, Any]) -> Iterator[None]:
    """Share plain values with the trials of this driver by Ray's key-value store, while the context is open.

    They are not parameters of trials, as Tune records these, and ``tune.with_parameters`` stores values until its
    driver ends.
    """
    from ray.experimental import internal_kv

    keys = {_key(name): json.dumps(value) for name, value in values.items()}
    try:
        for key, value in keys.items():
            internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)
        yield
    finally:
        for key in keys:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def shared_value(name: str) -> Any:
    """Return the value that the driver shares under the name ``name``."""
    from ray.experimental import internal_kv

    return json.loads(internal_kv._internal_kv_get(_key(name), namespace=NAMESPACE))


def _key(name: str) -> str:
    import ray

    return f"{ray.get_runtime_context().get_job_id()}/{name}"
