"""Build the callbacks of a run."""

from collections.abc import Callable, Iterator
from functools import partial

from fedcommons.core.executor import Executor
from fedcommons.runs import callbacks
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.callbacks import Callback, OnRound, OwnMeasure
from fedcommons.runs.evaluate import model_task
from fedcommons.runs.model_files import BestModel
from fedcommons.tracking.remote_run import RunMirror
from fedcommons.tracking.run_folder import RunFolder
from fedcommons.tracking.tracker import GuardedTracker, Tracker, build_tracker, numbers
from fedcommons.tracking.wandb_tracker import WandbTracker, describe, wandb_mode


def callbacks_of(
    ready: Assembled,
    executor: Executor,
    record: RunFolder,
    mirror: RunMirror | None,
    on_round: OnRound | None,
    say: Callable[[str], None],
) -> list[Callback]:
    """Return the callbacks of a run in their order (see ``Callback``)."""
    e, stop = ready.spec.evaluation, ready.spec.stop
    watched = [("validation/accuracy", "max"), ("validation/loss", "min")]
    watched = [(stop.watched, stop.way)] if stop.rule == "patience" else watched
    built: list[Callback] = [stop]
    if e.measure:
        built += [OwnMeasure(executor, partial(model_task, ready), e.measure, e.measure_every)]
    built += [
        callbacks.Tracking(record, partial(_trackers, ready, record, say)),
        BestModel(record.path, watched, e.every, ready.module, ready.spec.facts),
        callbacks.Checkpoints(record),
        callbacks.Warnings(say),
    ]
    built += [callbacks.Progress(on_round)] if on_round else []
    built += [callbacks.RemoteCopy(mirror)] if mirror else []
    callbacks.require_callbacks(built)
    return built


def _trackers(ready: Assembled, record: RunFolder, say: Callable[[str], None]) -> Iterator[Tracker]:
    """Begin the run's trackers: W&B unless it is off, and the trackers of ``tracking.tracker``."""
    spec = ready.spec
    if (mode := wandb_mode(spec.wandb)) != "off":
        from fedcommons.tracking.wandb_media import pool_images

        images, n_real = (), len(spec.train)
        if pool := ready.data.pool:
            x, y = pool.store.x[n_real:].numpy(), pool.store.y[n_real:]
            is_soft = spec.dataset.n_classes is not None and y.is_floating_point()
            images = pool_images(x, (y.argmax(1) if is_soft else y).numpy(), pool.rows.flat.numpy() - n_real)
        described = describe(spec.record, ready.shared.p)
        make = partial(WandbTracker, record.path, described, mode, say, images)
        yield GuardedTracker("W&B", make, say, prepare=numbers)
    for name, constants in spec.trackers.items():
        make = partial(build_tracker, name, constants, record.path, record.fields)
        yield GuardedTracker(f"tracking.tracker {name}", make, say)
