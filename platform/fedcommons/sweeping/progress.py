"""What Ray Tune tells of its trials, for the display; apart from ``sweep``, as Ray takes a second to import."""

from typing import Any

from ray.tune import Callback

from fedcommons.sweeping.display import Display


class Progress(Callback):
    """Passes Tune's events on to the display."""

    def __init__(self, display: Display, n_cells: int) -> None:
        self.display, self.n_cells, self.done = display, n_cells, 0

    def __getstate__(self) -> dict:
        return {}  # Tune pickles its callbacks into its own record, which nobody reads; a terminal cannot be pickled

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        if "failed" in result:
            return
        given = trial.config["cell"]
        text = f"rounds, accuracy {result['test/accuracy']:.3f}"
        self.display.step(given["name"], result["round"], given["config"]["federation"]["rounds"], text)

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial)

    def _end(self, trial: Any) -> None:
        self.done += 1
        self.display.drop(trial.config["cell"]["name"])
        self.display.title(f"{self.done} of {self.n_cells} cells done")
