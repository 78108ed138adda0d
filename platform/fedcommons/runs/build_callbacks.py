"""Build the callbacks of a run from its config."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedcommons.config import registry
from fedcommons.config.fields import select_arguments
from fedcommons.core.executor import Executor
from fedcommons.runs import callbacks
from fedcommons.runs.build import Assembled
from fedcommons.runs.callbacks import Callback, OnRound
from fedcommons.runs.early_stopping import stop_of
from fedcommons.runs.model_files import BestModel
from fedcommons.runs.user_metric import OwnMeasure
from fedcommons.runs.worker import build_module
from fedcommons.tracking.remote_run import RunMirror
from fedcommons.tracking.run_folder import RunFolder
from fedcommons.tracking.tracker import OwnTracker, Tracker


def callbacks_of(
    ready: Assembled,
    executor: Executor,
    record: RunFolder,
    mirror: RunMirror | None,
    on_round: OnRound | None,
    say: Callable[[str], None],
) -> list[Callback]:
    """Return the callbacks of a run in their order (see ``Callback``)."""
    c, stop, m = ready.config, stop_of(ready.config), ready.config.measure
    watched = [("validation/accuracy", "max"), ("validation/loss", "min")]
    watched = [(stop.watched, stop.way)] if stop.rule == "patience" else watched
    build = partial(build_module, c, ready.facts)
    built: list[Callback] = [stop]
    if m.measure:
        built += [OwnMeasure(executor, m.measure, m.constants, m.every, c.seed, ready.steps, c.evaluate.chunk)]
    built += [
        callbacks.Tracking(record, _trackers(ready, record.path, say)),
        BestModel(record.path, watched, c.evaluate.every, build, ready.facts),
        callbacks.Checkpoints(record),
        callbacks.Warnings(say),
    ]
    built += [callbacks.Progress(on_round)] if on_round else []
    built += [callbacks.RemoteCopy(mirror)] if mirror else []
    callbacks.require_callbacks(built)
    return built


def _trackers(ready: Assembled, folder: Path, say: Callable[[str], None]) -> list[Tracker]:
    """Return W&B, unless it is off, and the tracker of ``tracking.tracker``, if set."""
    trackers: list[Tracker] = []
    config = ready.config
    if config.tracking.wandb != "off":
        from fedcommons.tracking.wandb_media import pool_images
        from fedcommons.tracking.wandb_tracker import WandbTracker, describe

        shown, n_real = (), len(ready.prepared.train)
        if pool := ready.data.pool:
            x, y = pool.store.x[n_real:].numpy(), pool.store.y[n_real:].numpy()
            shown = pool_images(x, y, pool.rows.flat.numpy() - n_real)
        trackers.append(WandbTracker(folder, describe(config, ready.shared.p), config.tracking.wandb, say, shown))
    if name := config.tracking.tracker:
        part = registry.find("tracker", name)
        arguments = select_arguments(part, {"folder": folder, "config": config.flat})
        make = partial(part, **arguments, **config.tracking.constants)
        trackers.append(OwnTracker(name, partial(registry.build_part, "tracker", name, make), say))
    return trackers
