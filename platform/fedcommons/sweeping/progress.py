"""What Ray Tune tells of its trials, for the display; apart from ``sweep``, as Ray takes a second to import."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune import Callback

from fedcommons.sweeping.display import Display


class Progress(Callback):
    """Passes Tune's events on to the display; ``on_end`` is called whenever a cell has ended.

    rounds: of each cell, by its name. ready: when the last generator was made, by ``time.perf_counter``; 0 before that.
    """

    def __init__(
        self, display: Display, rounds: Mapping[str, int], n_generators: int, on_end: Callable[[], None]
    ) -> None:
        self.display, self.on_end, self.rounds, self.n_generators = display, on_end, rounds, n_generators
        self.done, self.made, self.ready = 0, 0, 0.0

    def __getstate__(self) -> dict:
        return {}  # Tune pickles its callbacks into its own record, which nobody reads; a terminal cannot be pickled

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if "failed" in result or "cell" not in trial.config:
            return
        name = trial.config["cell"]
        accuracy = result.get("test/accuracy")
        text = "rounds" if accuracy is None else f"rounds, accuracy {accuracy:.3f}"
        self.display.step(name, result["round"], self.rounds[name], text)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def _end(self, trial: Any) -> None:
        if "generator" in trial.config:
            self.made, self.ready = self.made + 1, time.perf_counter()
            self.display.step("generators", self.made, self.n_generators, "trained and sampled")
            if self.made == self.n_generators:
                self.display.drop("generators")
            return
        self.done += 1
        self.display.drop(trial.config["cell"])
        self.display.title(f"{self.done} of {len(self.rounds)} cells done")
        self.on_end()
