"""Callbacks: what a run does with each finished round, such as tracking it and saving a checkpoint."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fedcommons.config import registry
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.rejections import records, rejection_summary
from fedcommons.core.worker import RunData, Worker
from fedcommons.errors import ClientError, UserError, Warned, name_of, user_code_context
from fedcommons.federation import checkpoint
from fedcommons.federation.rounds import Standing
from fedcommons.seeding import seed_for, set_default_generator
from fedcommons.storage.atomic_files import sha256, write_text
from fedcommons.tracking.record_schema import HASH
from fedcommons.tracking.remote_run import RunMirror
from fedcommons.tracking.run_folder import RunFolder
from fedcommons.tracking.tracker import Metric, Tracker, for_trackers, replayed

OnRound = Callable[[int, Mapping[str, float | None]], None]

MOST_LISTED = 1000
"""Maximum number of participants that a line of rounds.jsonl lists; more participants have a file of their own."""

Lines = Sequence[Mapping[str, Any]]
"""The lines of rounds.jsonl so far."""


@dataclass(frozen=True)
class RoundResult:
    """The result of a finished round.

    standing: the state after the round. metrics: numbers by name. clients: metrics with one value per client.
    began, trained: ``time.perf_counter()`` before and after training. is_saved: whether a checkpoint is due.
    """

    standing: Standing
    metrics: Mapping[str, float | None]
    clients: Mapping[str, Sequence[float]]
    began: float
    trained: float
    is_saved: bool


@runtime_checkable
class Callback(Protocol):
    """A plug-in of the round loop. A callback stores the values that it needs, and not the experiment.

    The loop calls the callbacks in this order: early stopping, measure, tracking, best model, checkpoint, warnings,
    progress, remote copy. So a round is recorded before it is saved, and saved before ``on_round`` of the user sees it.

    An error of a callback stops the run, and the callbacks after it do not see the round. So a checkpoint that cannot
    be written stops the run. W&B and ``tracking.tracker`` raise no error: a tracker that fails is reported in a warning
    and is not called again.
    """

    def on_begin(self, start: Standing, lines: Lines) -> None:
        """Prepare for the rounds after the state ``start``. If ``lines`` is empty, the run begins with round 0."""

    def measure(self, now: Standing, last: int) -> Mapping[str, float]:
        """Return further metrics of a round. last: number of the run's last round."""
        return {}

    def on_round(self, result: RoundResult) -> None:
        """Use the result of a round."""

    def on_error(self) -> None:
        """Save what a resumed run needs; called if a ``ClientError`` stops the run after the last finished round."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Finish when the run ends. summary: content of summary.json; None if an error stopped the run."""


def require_callbacks(callbacks: Sequence[object]) -> None:
    """Check that all objects are callbacks, each of another class.

    Raises:
        UserError: an object lacks a function of ``Callback``, or two callbacks have the same class name.
    """
    names = set[str]()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"{name_of(callback)} is no callback: it lacks a function of runs/callbacks.py:Callback.")
        if (name := name_of(callback)) in names:
            raise UserError(f"two callbacks have the name {name}, and each needs a name of its own.")
        names.add(name)


@dataclass
class Tracking(Callback):
    """Logs each round and the summary to the run folder, then to other trackers, and records the round's seconds.

    begin_others: begins the other trackers, which then stand in ``others`` and are finished at the run's end.
    """

    record: RunFolder
    begin_others: Callable[[], Iterator[Tracker]]
    others: list[Tracker] = field(default_factory=list)

    def on_begin(self, start: Standing, lines: Lines) -> None:
        for tracker in self.begin_others():
            self.others.append(tracker)
            for number, metrics in replayed(self.record.path):
                tracker.log(number, metrics)

    def on_round(self, result: RoundResult) -> None:
        now, number, late = result.standing, result.standing.round, result.standing.stragglers
        metrics: dict[str, Metric] = {**result.metrics}
        if "stragglers" in metrics:
            metrics |= {"late": list(late), "partial": [i for i, share in late.items() if share]}
        if now.rejected_now:
            metrics["rejected_clients"] = list(now.rejected_now)
        if now.participants is not None:
            metrics |= participants_entry(self.record.path, number, now.participants)
        if result.clients:
            self.record.log_clients(number, result.clients)
        self.record.log(number, metrics)
        seconds = {"train": result.trained - result.began, "observe": time.perf_counter() - result.trained}
        self.record.log_times(number, seconds)
        for tracker in self.others:
            tracker.log(number, for_trackers(metrics, seconds))

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        for tracker in (self.record, *self.others):
            tracker.finish(summary)


def participants_entry(folder: Path, round: int, clients: Sequence[int]) -> dict[str, Any]:
    """Return the entry of rounds.jsonl that states a round's participants: their numbers, or the hash of a file.

    The file ``participants/round-NNNNNN.json`` in the run folder is written for more than ``MOST_LISTED`` participants.
    """
    if len(clients) <= MOST_LISTED:
        return {"participants": list(clients)}
    (folder / "participants").mkdir(exist_ok=True)
    content = json.dumps(list(clients)) + "\n"
    write_text(folder / "participants" / f"round-{round:06d}.json", content)
    return {HASH: sha256(content.encode())}


@dataclass
class Checkpoints(Callback):
    """Saves the state after each round with a due checkpoint and, if a client fails, after the last finished round."""

    record: RunFolder
    last: Standing = field(init=False)

    def on_begin(self, start: Standing, lines: Lines) -> None:
        self.last = start

    def on_round(self, result: RoundResult) -> None:
        self.last = result.standing
        if result.is_saved:
            self.on_error()

    def on_error(self) -> None:
        checkpoint.save(self.record.checkpoints, self.last, self.record.digest())


@dataclass
class Warnings(Callback):
    """Reports the first rejected update, and each metric that is not finite for the first time."""

    say: Callable[[str], None]
    has_rejected: bool = False
    lost: set[str] = field(default_factory=set)

    def on_begin(self, start: Standing, lines: Lines) -> None:
        self.has_rejected = bool(start.rejected)

    def on_round(self, result: RoundResult) -> None:
        rejected, place = result.standing.rejected, f"round {result.standing.round}"
        if rejected and not self.has_rejected:
            text = rejection_summary(records(rejected))
            self.say(Warned(f"{place}: {text}; later rejections are only counted"))
        self.has_rejected = bool(rejected)
        lost = {name for name, value in result.metrics.items() if value is not None and not isfinite(value)}
        if new := lost - self.lost:
            self.say(Warned(f"{place}: not finite, so recorded as null: {', '.join(sorted(new))}; diverged?"))
        self.lost |= lost


@dataclass(frozen=True)
class Progress(Callback):
    """Calls the user's ``on_round``."""

    call: OnRound

    def on_round(self, result: RoundResult) -> None:
        self.call(result.standing.round, result.metrics)


@dataclass(frozen=True)
class RemoteCopy(Callback):
    """Uploads the run folder after each regular checkpoint, while the next rounds run."""

    mirror: RunMirror

    def on_round(self, result: RoundResult) -> None:
        if result.is_saved:
            self.mirror.begin_upload()

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        try:
            self.mirror.wait()
        except ClientError as error:
            if summary is not None:
                raise
            self.mirror.say(Warned(f"{error}"))  # the error that stopped the run is raised


class Measure(Protocol):
    """A measure: a frozen dataclass of constants that can be called.

    It is called in round 0, every ``measure.every`` rounds and in the last round. Each call is a single job of one
    worker, so the numbers do not depend on the number of workers.
    """

    def __call__(self, work: Work, data: RunData, round: int, seed: int) -> Mapping[str, float]:
        """Return numbers by name, which are recorded as ``measure/NAME``.

        work: ``work.module`` is the server model after round ``round``, in evaluation mode. The measure may train or
        change the module, as every job loads its weights again. data: a copy of the run's data, on the module's device.
        seed: depends on the experiment's seed and the round; torch's default generator is seeded with it.
        """
        ...


@dataclass(frozen=True)
class OwnMeasure(Callback):
    """Lets a worker compute a measure in round 0, every ``every`` rounds and in the last round.

    at: returns the task to evaluate the server model of a state. component: name and constants of the measure.
    """

    executor: Executor
    at: Callable[[Standing], ModelTask]
    component: tuple[str, Mapping[str, Any]]
    every: int

    def measure(self, now: Standing, last: int) -> dict[str, float]:
        """Return the numbers as ``measure/NAME``; a measure that fails is a ``ClientError``."""
        if now.round % self.every and now.round != last:
            return {}
        at = replace(self.at(now), buffers=now.buffers)
        (numbers,) = self.executor.map(measured_here, at, [self.component])
        return {f"measure/{name}": value for name, value in numbers.items()}


def measured_here(worker: Worker, at: ModelTask, component: tuple[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of a measure by name, computed in this worker on the model of ``at``.

    component: name and constants of the measure, which this process imports and builds.
    """
    (name, constants), seed = component, seed_for(at.seed, "measure")
    at.load(worker.work)
    set_default_generator(seed)
    data = deepcopy(worker.data)  # the measure may write into its copy; the worker's data stay unchanged
    with user_code_context(registry.component_label("measure", name), "", f"round {at.round}"):
        numbers = registry.make("measure", name, constants)(worker.work, data, at.round, seed)
        if not isinstance(numbers, Mapping):
            raise ValueError(f"it must return numbers by name, got {type(numbers).__name__}")
        return {str(n): float(v.detach() if isinstance(v, Tensor) else v) for n, v in numbers.items()}
