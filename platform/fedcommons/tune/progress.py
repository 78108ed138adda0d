"""What Ray Tune tells of its trials, for the display; apart from ``sweep``, as Ray takes a second to import."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray.tune import Callback

from fedcommons.cli.display import Display, duration
from fedcommons.errors import ClientError, UserError

PLACE_S = 600.0
"""Seconds for which a sweep that has begun goes on without a running trial."""


@dataclass
class Pile:
    """Work of one kind, in units: generators, or rounds of all cells.

    of, done: units in all, and those that are done. seconds, timed: what trials took here, and for how many units.
    """

    of: int
    done: int = 0
    seconds: float = 0.0
    timed: int = 0

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes, one trial after another; None where nothing tells."""
        if self.done >= self.of:
            return 0.0
        return self.seconds / self.timed * (self.of - self.done) if self.timed else None


class Progress(Callback):
    """Passes Tune's events on to the display; ``on_end`` is called whenever a cell has ended.

    bring: brings the folder of the cell of this name, which another machine may have. rounds: of each cell, by its
    name. ready: when the last generator was made, by ``clock``; 0 before that. clock:
    seconds from any beginning.
    """

    def __init__(
        self, display: Display, rounds: Mapping[str, int], n_generators: int, on_end: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter, bring: Callable[[str], None] = lambda name: None,
    ) -> None:  # fmt: skip
        self.display, self.on_end, self.rounds, self.clock, self.bring = display, on_end, rounds, clock, bring
        self.done, self.ready, self.placed = 0, 0.0, None
        self.generators, self.played = Pile(n_generators), Pile(sum(rounds.values()))
        self.last: dict[str, tuple[float, int]] = {}  # trial to when it was last heard of, and its round then
        self.names: dict[str, str] = {}  # of generators, by trial
        self.most = 1  # trials at once

    def __getstate__(self) -> dict:
        return {}  # Tune pickles its callbacks into its own record, which nobody reads; a terminal cannot be pickled

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        """Stop a sweep that has lost its places in Ray, as where its nodes have gone or other work has taken them.

        Raises:
            ClientError: no trial runs, and none has run for ``PLACE_S``.
        """
        now = self.clock()
        if self.placed is None or any(trial.status == "RUNNING" for trial in trials):
            self.placed = now
        elif now - self.placed >= PLACE_S:
            raise ClientError(
                f"no run has found a place in Ray for {duration(PLACE_S)}: its nodes have gone, or other work holds "
                "them; what is finished stays, and --resume goes on."
            )

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self.last.setdefault(trial.trial_id, (self.clock(), 0))
        self.most = max(self.most, len(self.last))

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if "step" in result:
            name = self.names.setdefault(trial.trial_id, f"generator {len(self.names) + 1}/{self.generators.of}")
            self.display.step(name, result["step"], result["of"], result["doing"], ends=False)
        if "failed" in result or "cell" not in trial.config:
            return
        name = trial.config["cell"]
        self._play(trial.trial_id, result["round"])
        accuracy = result.get("test/accuracy")
        text = "rounds" if accuracy is None else f"rounds, accuracy {accuracy:.3f}"
        self.display.step(name, result["round"], self.rounds[name], text)
        self._say()

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def _play(self, trial: str, number: int) -> None:
        """A trial has played round ``number``; what a resumed one had played before counts as done and is not timed."""
        now = self.clock()
        then, before = self.last.get(trial, (now, 0))
        self.last[trial] = now, number
        self.played.done += number - before
        self.played.seconds += now - then
        self.played.timed += number > before

    def _end(self, trial: Any) -> None:
        then, number = self.last.pop(trial.trial_id, (self.clock(), 0))
        if "generator" in trial.config:
            self.generators.done += 1
            self.generators.timed += 1
            self.ready = self.clock()
            self.generators.seconds += self.ready - then
            self.display.drop(self.names.get(trial.trial_id, ""))
            self.display.step("generators", self.generators.done, self.generators.of, "trained and sampled")
            return
        self.done += 1
        self.played.done += self.rounds[trial.config["cell"]] - number  # of one that was stopped none are left
        self.display.drop(trial.config["cell"])
        self._say()
        with suppress(UserError, ClientError, OSError):  # it is tried again, and told, at the end
            self.bring(trial.config["cell"])
        self.on_end()

    @property
    def left(self) -> float | None:
        """Seconds until all is done, if as many trials as ever run side by side; None before anything tells."""
        piles = self.generators.left, self.played.left
        return None if None in piles else sum(filter(None, piles)) / self.most

    def _say(self) -> None:
        left = f", about {duration(self.left)} left in all" if self.left else ""
        self.display.title(f"{self.done} of {len(self.rounds)} cells done{left}")
