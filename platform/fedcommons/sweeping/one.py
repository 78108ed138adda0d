"""One experiment from Python: run it, or read it where it is finished, and look at its rounds and its model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pytorch_lightning import LightningModule

from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import part_of
from fedcommons.core.algorithm import Algorithm, Personal
from fedcommons.core.work import module_with
from fedcommons.errors import UserError, shown
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.personal import personal_model
from fedcommons.federation.rounds import Standing
from fedcommons.reports.frames import folder_path, load_rounds
from fedcommons.runs import experiment as runs
from fedcommons.runs import inputs, worker
from fedcommons.sweeping.display import log


@dataclass(frozen=True)
class Result:
    """A finished run. summary: what ``summary.json`` holds."""

    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]

    @property
    def rounds(self) -> pd.DataFrame:
        """A row a round; see ``load_rounds``."""
        return load_rounds(self.folder)

    @property
    def model(self) -> LightningModule:
        """The server model of the last round, a new copy, on the CPU, in evaluation mode.

        Raises:
            UserError: its checkpoint was removed or is damaged, or the method has no server model.
        """
        end = self._end()
        return module_with(self._untrained(), end.model, end.buffers).eval()

    def personal(self, client: int) -> LightningModule:
        """A client's own model after the last round, as ``model``, of a method that has such models (``Personal``).

        Raises:
            UserError: its checkpoint was removed or is damaged, there is no such client, or the method has none.
        """
        algorithm: Algorithm = part_of(self.experiment, "algorithm")
        n = self.summary["n_clients"]
        if not isinstance(algorithm, Personal):
            raise UserError(f"algorithm {self.experiment.algorithm} has no personal models: its clients share one.")
        if not 0 <= client < n:
            raise UserError(f"client must lie in [0, {n - 1}] in this run, got {shown(client)}.")
        keeps = self.experiment.federation.buffers == "keep"
        return module_with(
            self._untrained(), *personal_model(algorithm, self._end(), client, keep_buffers=keeps)
        ).eval()

    def _end(self) -> Standing:
        end = checkpoint.load_latest(self.folder / "checkpoints", ClientMemory(folder=self.folder / "memory"))
        if end is None or end.round != self.summary["rounds"]:
            raise UserError(f"{self.folder} has no checkpoint of round {self.summary['rounds']}.")
        return end

    def _untrained(self) -> LightningModule:
        return worker.build_module(self.experiment, inputs.load(self.experiment.data))


def run(
    experiment: Experiment,
    folder: str | Path,
    *,
    say: Callable[[str], None] = log,
    on_round: Callable[[int, Mapping[str, float | None]], None] | None = None,
) -> Result:
    """Run the experiment in ``folder``, or read it there: what was broken off goes on, what is finished is not run.

    say: told what the run has to say; by default it goes to the logger ``fedcommons``, which nobody sees unless asked:
    ``say=print``. on_round: called after each round with its number and metrics, first with 0, the
    untrained model. Settings of the process (torch's precision, threads and random state, signal handlers, Matplotlib's
    backend) change nothing and are afterwards as they were. It may be called in any thread, also in one with an event
    loop, and within another run in the same thread.

    Raises:
        UserError: what is asked for cannot be met, the folder holds another experiment, or another thread of this
            process is in an experiment: they would draw from the same random state.
        ClientError: a client failed; the traceback is in ``folder/error.txt``.
    """
    if not isinstance(experiment, Experiment):
        raise UserError(f"run takes an experiment, got {shown(experiment)}.")
    path = folder_path(folder)
    return Result(path, experiment, runs.run(experiment, path, resume=True, say=say, on_round=on_round))
