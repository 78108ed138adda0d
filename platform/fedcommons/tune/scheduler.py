"""The order in which a sweep works, each cell after its generators, and the values that it shares with its trials."""

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
"""Seconds between two reports of a generator under training: it waits for Tune to take each."""


@dataclass(frozen=True)
class Lacking:
    """What a store of artifacts lacks: a generator of this client, images drawn from it, or both.

    images: the keys of the images. cells: the names of all cells that need some of them. told_by: the names of some of
    these cells, such that each image is needed by one: their configs tell how all the images are made.
    """

    client: int
    images: Collection[str]
    cells: Collection[str]
    told_by: Collection[str]


def make(cells: Collection[Mapping[str, Any]], images: Collection[str]) -> None:
    """Train the generator that these cells need for these images, draw them and keep both.

    cells: each has its ``config`` and, as ``data``, the digest of the data set that its driver has.

    What stops it is reported, not raised: it would stop it again. Where this process has lost its GPU it is raised as
    well, so that Tune starts a new one.
    """
    set_up_process()
    told = time.monotonic()

    def step(number: int, of: int, doing: str) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= EVERY:
            told = now
            tune.report({"step": number, "of": of, "doing": doing})

    try:
        trained = False
        configs = [dotted.from_dict(cell["config"]) for cell in cells]
        prepared = [build.prepare(config) for config in configs]
        for one, cell in zip(prepared, cells, strict=True):
            load_data.require_same(one.dataset, cell["data"])
        needs = [need for one in prepared for need in one.needs]
        store = Store(Path(configs[0].artifacts), storage=configs[0].storage)
        for job in image_cache.missing(store, [need for need in needs if key_of(need.images_facts) in images]):
            image_cache.keep(store, job, image_cache.make(job, step))
            trained = trained or bool(job.epochs)
        tune.report({"trained": trained, "unsent": store.send()})
    except Exception as error:
        tune.report({"failed": sentence(error), "trace": traceback.format_exc()})
        if is_lost():
            raise


class InOrder(Searcher):
    """Tells Ray Tune which trial is next: the first cell that is left, or before it a generator that it needs.

    Trials for later cells come only where a core would have nothing to do until its generators are there.

    cells: their names, with the number of cores that each takes; a generator takes one.  lacking: of all of them.
    """

    def __init__(self, cells: Mapping[str, int], lacking: Collection[Lacking]) -> None:
        super().__init__()
        self.cells, self.lacking = dict(cells), dict(enumerate(lacking))
        self.running: dict[str, int | None] = {}  # trial to its generator; None: of a cell
        self.cores: dict[str, int] = {}  # trial to its cores
        self.failed: dict[str, str] = {}  # cell: why one of its generators was not made
        self.traces: list[str] = []  # of the generators that failed
        self.unsent = ""  # why the storage lacks some generators
        self.trained = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The parameters of the next trial; None: later. Called while no trial waits for a place."""
        for name in list(self.cells):
            needed = [number for number, one in self.lacking.items() if name in one.cells]
            if name in self.failed:
                del self.cells[name]
            elif not needed:
                self.running[trial_id], self.cores[trial_id] = None, self.cells.pop(name)
                return {"cell": name}
            elif left := [number for number in needed if number not in self.running.values()]:
                self.running[trial_id], self.cores[trial_id] = left[0], 1
                one = self.lacking[left[0]]
                return {"generator": {"cells": list(one.told_by), "images": list(one.images)}}
            elif sum(self.cores.values()) >= ray.cluster_resources().get("CPU", 1):
                return None
        return None if self.cells else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A generator is there, or its cells have failed."""
        self.cores.pop(trial_id, None)
        number = self.running.pop(trial_id, None)
        if number is None:
            return
        one = self.lacking.pop(number)
        if error or not result or "trained" not in result:
            why = (result or {}).get("failed", "its process died")
            said = f"the generator of client {one.client} failed: {why}"
            self.failed |= dict.fromkeys(one.cells, said)
            self.traces += [trace for trace in [(result or {}).get("trace")] if trace]
        else:
            self.trained += result["trained"]
            self.unsent = result.get("unsent") or self.unsent

    def __getstate__(self) -> dict:
        return {}  # Tune pickles it into its own record, which nobody reads

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Nothing: a sweep resumes by its cells' folders."""


NAMESPACE = "fedcommons"
"""Of the values in Ray's key-value store."""

DRIVER = ""
"""The name under which trials find the driver's ``hosts.facts``; no cell has it."""


@contextmanager
def shared_values(values: Mapping[str, Any]) -> Iterator[None]:
    """In this context trials of this driver can read these plain values from Ray's key-value store.

    Tune writes down what it gets, and its own ``tune.with_parameters`` keeps values until its driver ends.
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
    """Return the value that the driver shares under this name."""
    from ray.experimental import internal_kv

    return json.loads(internal_kv._internal_kv_get(_key(name), namespace=NAMESPACE))


def _key(name: str) -> str:
    import ray

    return f"{ray.get_runtime_context().get_job_id()}/{name}"
