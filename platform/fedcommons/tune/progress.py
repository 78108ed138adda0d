"""Show the progress of Ray Tune's trials. ``sweep`` imports this module inside a function, as Ray is slow to import."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.tune import Callback

from fedcommons.cli.display import Display, duration
from fedcommons.errors import ClientError, UserError

PLACE_S = 600.0
"""Seconds after which a sweep without any running trial is stopped."""


@dataclass
class Pile:
    """The progress of one kind of work in a sweep. Its unit is a generator or a round.

    total, done: number of all units, and of finished units, also of earlier, interrupted sweeps. timed: number of units
    whose duration was measured. seconds: sum of these durations.
    """

    total: int
    done: int = 0
    seconds: float = 0.0
    timed: int = 0

    @property
    def remaining_s(self) -> float | None:
        """Return the estimated seconds of the remaining units on one process; None if no unit has been timed."""
        if self.done >= self.total:
            return 0.0
        return self.seconds / self.timed * (self.total - self.done) if self.timed else None


class Progress(Callback):
    """The callback that shows Tune's events on the display.

    rounds: number of rounds of each run, by trial name. on_end: called after each run. clock: returns the time in
    seconds. fetch: called with a trial name; if another machine ran the trial, it copies the run's folder to this
    machine. ready: the time at which the last generator was finished; 0 before.
    """

    def __init__(
        self, display: Display, rounds: Mapping[str, int], n_generators: int, on_end: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter, fetch: Callable[[str], None] = lambda name: None,
    ) -> None:  # fmt: skip
        self.display, self.on_end, self.rounds, self.clock, self.fetch = display, on_end, rounds, clock, fetch
        self.done, self.ready, self.placed = 0, 0.0, None
        self.generators, self.played = Pile(n_generators), Pile(sum(rounds.values()))
        self.last: dict[str, tuple[float, int]] = {}  # by trial ID: time and round of the last report
        self.names: dict[str, str] = {}  # by trial ID: name of its generator on the display
        self.most = 1  # largest number of parallel trials so far
        self.ended = set[str]()  # names of the runs that ended or that a scheduler stopped

    def __getstate__(self) -> dict:
        return {}  # Tune pickles its callbacks into a record that is not used; a display cannot be pickled

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """Stop the sweep if no trial gets resources from Ray: nodes have left, or other programs use all resources.

        Raises:
            ClientError: no trial has run for ``PLACE_S``.
        """
        now = self.clock()
        if self.placed is None or any(trial.status == "RUNNING" for trial in trials):
            self.placed = now
        elif now - self.placed >= PLACE_S:
            raise ClientError(
                f"no run has got resources from Ray for {duration(PLACE_S)}: nodes have left, or other programs use "
                "their resources; finished runs are kept, and --resume continues the sweep."
            )

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.last.setdefault(trial.trial_id, (self.clock(), 0))
        self.most = max(self.most, len(self.last))

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if "step" in result:
            name = self.names.setdefault(trial.trial_id, f"generator {len(self.names) + 1}/{self.generators.total}")
            self.display.step(name, result["step"], result["of"], result["doing"], ends=False)
        if "failed" in result or "cell" not in trial.config:
            return
        name = trial.config["cell"]
        self._play(trial.trial_id, result["round"])
        accuracy = result.get("test/accuracy")
        text = "rounds" if accuracy is None else f"rounds, accuracy {accuracy:.3f}"
        self.display.step(name, result["round"], self.rounds[name], text)
        self._say()

    def _play(self, trial: str, number: int) -> None:
        """Record that a trial has finished round ``number``; rounds before the resume of a run are not timed."""
        now = self.clock()
        then, before = self.last.get(trial, (now, 0))
        self.last[trial] = now, number
        self.played.done += number - before
        self.played.seconds += now - then
        self.played.timed += number > before

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        then, number = self.last.pop(trial.trial_id, (self.clock(), 0))
        if "generator" in trial.config:
            self.generators.done += 1
            self.generators.timed += 1
            self.ready = self.clock()
            self.generators.seconds += self.ready - then
            self.display.drop(self.names.get(trial.trial_id, ""))
            self.display.step("generators", self.generators.done, self.generators.total, "trained and sampled")
            return
        self.done += 1
        self.ended.add(trial.config["cell"])
        self.played.done += self.rounds[trial.config["cell"]] - number  # omitted rounds of a stopped run count as done
        self.display.drop(trial.config["cell"])
        self._say()
        with suppress(UserError, ClientError, OSError):  # the sweep tries again at its end, and reports the error
            self.fetch(trial.config["cell"])
        self.on_end()

    on_trial_error = on_trial_complete

    @property
    def remaining_s(self) -> float | None:
        """Return the estimated seconds until the sweep ends, at the highest parallelism so far; None: unknown."""
        piles = self.generators.remaining_s, self.played.remaining_s
        return None if None in piles else sum(filter(None, piles)) / self.most

    def _say(self) -> None:
        remaining = f", about {duration(self.remaining_s)} left in all" if self.remaining_s else ""
        self.display.title(f"{self.done} of {len(self.rounds)} cells done{remaining}")
