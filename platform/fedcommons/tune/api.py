"""Experiments from Python: run one, or read its rounds and model once it is finished; run many side by side on Ray."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from pytorch_lightning import LightningModule
from torch import Tensor

from fedcommons.cli.display import Display, log
from fedcommons.config import registry
from fedcommons.config.dotted import is_ignored, part_of
from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import Algorithm, Personal
from fedcommons.core.client_worker import module_with
from fedcommons.core.worker import only_thread
from fedcommons.data.examples import Dataset
from fedcommons.errors import ClientError, UserError, shown
from fedcommons.federation import checkpoint
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.personal_evaluation import personal_model
from fedcommons.federation.rounds import Standing
from fedcommons.reports.frames import folder_path, load_rounds, load_runs
from fedcommons.runs import experiment as runs
from fedcommons.runs import exports, load_data, model_files, worker
from fedcommons.tracking.run_folder import is_run, read_config, read_summary
from fedcommons.tune.gpu_share import with_share
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import MOST, Trial, cell, open_sweep, require_few, run_cells, todo


@dataclass(frozen=True)
class Result:
    """A finished run. summary: what ``summary.json`` holds.

    may_run: parts of somebody's own that may be executed to build its models, by name; None: all.
    """

    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    may_run: Collection[str] | None = None

    @property
    def rounds(self) -> pd.DataFrame:
        """A row a round; see ``load_rounds``."""
        return load_rounds(self.folder)

    @property
    def model(self) -> LightningModule:
        """The server model of the last round, a new copy, on the CPU, in evaluation mode.

        Raises:
            UserError: its file and its checkpoint were removed or are damaged, the method has no server model, or the
                module is somebody's own and may not be executed, or is not what it was.
        """
        if (found := model_files.read(self.folder / model_files.LAST)) and found[1] == self.summary["rounds"]:
            return self._loaded(found)
        end = self._end()
        model = end.model  # a method that has none says so
        return module_with(self._untrained(), model, end.buffers).eval()

    @property
    def best(self) -> LightningModule:
        """The same of the round with the best value on validation data: accuracy, or the loss where there is none.

        Raises:
            UserError: there is no such file, as of a run without validation data; and as ``model``.
        """
        if found := model_files.read(self.folder / model_files.BEST):
            return self._loaded(found)
        raise UserError(f"{self.folder} has no {model_files.BEST}: no round had a value on validation data.")

    def export(self, form: str = "onnx") -> Path:
        """Write ``model.onnx``, the model of the last round for batches of any size, into the folder; its path.

        Raises:
            UserError: another form is asked for, a package is missing, torch cannot; and as ``model``.
        """
        exports.require(form)
        if not (found := model_files.read(self.folder / model_files.LAST)):
            raise UserError(f"{self.folder} has no {model_files.LAST} to export.")
        model_files.to_onnx(self._loaded(found), found[2], path := self.folder / "model.onnx")
        return path

    def personal(self, client: int) -> LightningModule:
        """A client's own model after the last round, as ``model``, of a method that has such models (``Personal``).

        Raises:
            UserError: its checkpoint was removed or is damaged, there is no such client, or the method has none.
        """
        self._require_allowed("algorithm")
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
        """The module, whatever its trained weights are; what is frozen is as it was."""
        if found := model_files.read(self.folder / model_files.LAST):
            return self._loaded(found)
        self._require_allowed("model")
        if self.may_run is None:
            return worker.build_module(self.experiment, load_data.load(self.experiment.data))
        raise UserError(  # what a folder names of data is not read
            f"{self.folder} has no {model_files.LAST}, which says what its data look like."
        )

    def _loaded(self, found: tuple[dict[str, Tensor], int, Dataset]) -> LightningModule:
        self._require_allowed("model")
        tensors, _, data = found
        e = self.experiment
        module = worker.build_module(replace(e, model=replace(e.model, weights=None)), data)  # all are in the file
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            raise UserError(f"{self.folder} has weights of another module: {' '.join(str(error).split())}") from None
        return module.eval()

    def _require_allowed(self, kind: str) -> None:
        """See that a part of somebody's own may be executed, and is what it was in the run."""
        name = self.experiment.chosen[kind]
        if not registry.is_own(name) or self.may_run is None:
            return
        if name not in self.may_run:
            raise UserError(
                f"{self.folder} has a {kind} of its own, {shown(name)}; to have it executed, name it: "
                f"load(folder, may_run=[{shown(name)}])."
            )
        if registry.source(name) != self.experiment.source.get(kind):
            raise UserError(f"{kind} {shown(name)} is not the code that {self.folder} was run with.")


def load(folder: str | Path, *, may_run: Collection[str] = ()) -> Result:
    """A finished run, from its folder alone: its summary, rounds and models. The data set is not needed.

    may_run: parts of somebody's own that may be executed, by the names that the run has for them, such as
    ``my_nets.py:ResNetGN``. What a file alone names is not executed.

    Raises:
        UserError: the folder holds no finished run.
    """
    path = folder_path(folder)
    summary = read_summary(path) if is_run(path) else None
    if summary is None:
        raise UserError(f"{path} holds no finished run.")
    return Result(path, read_config(path), summary, may_run)


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
    return Result(
        path, experiment, runs.run(experiment, path, resume=True, say=say, on_round=on_round, with_share=with_share)
    )


def sweep(experiments: Iterable[Experiment], folder: str | Path, *, show: bool = False) -> pd.DataFrame:
    """Run each of these in a folder of its own in ``folder``; a row a run, as ``load_runs`` has them.

    Runs that are there already are read, those that were broken off go on; generators are trained once for all. Ray is
    started where it is not running, and stays for the next sweep. show: what the command of a sweep shows; without it
    only the logger ``fedcommons`` is told.

    Raises:
        UserError: what is asked for cannot be met, or is no experiment, or another thread of this process is in an
            experiment; nothing has been run then.
        ClientError: some runs failed; the others are finished and can be loaded.
    """
    out, cells = folder_path(folder), named(listed(experiments))
    with only_thread(), Display(quiet=not show) as display:
        SweepMirror(cells, out, display.say).begin(resume=True)
        left = todo(cells, out, display)
        with open_sweep(out, resume=True, say=lambda text: None):
            try:
                failures = run_cells(left, out, display).failures
            except BaseException:  # Ctrl-C too: the next sweep would wait for what this one holds
                from fedcommons.tune import trials  # Ray takes a second to import

                trials.remove_all()
                raise
    if failures:
        raise ClientError("; ".join(f"{name}: {why}" for name, why in failures.items()))
    return load_runs(*(out / c.name for c in cells))


def listed(experiments: Iterable[Experiment]) -> list[Experiment]:
    """They as a list, one of them alone too.

    Raises:
        UserError: something among them is no experiment, or there are too many.
    """
    found = [experiments] if isinstance(experiments, Experiment) else experiments
    if not isinstance(found, Iterable):
        raise UserError(f"sweep takes experiments, got {shown(found)}.")
    some = list(islice(found, MOST + 1))
    require_few(len(some))
    if wrong := [one for one in some if not isinstance(one, Experiment)]:
        raise UserError(f"sweep takes experiments, got {shown(wrong[0])}.")
    return some


def named(experiments: list[Experiment]) -> list[Trial]:
    """A cell for each experiment, each once, named after the fields in which they differ.

    Raises:
        UserError: there is none.
    """
    if not experiments:
        raise UserError("a sweep needs at least one experiment.")
    flat = [one.flat for one in experiments]
    names = dict.fromkeys(n for f in flat for n in f if not is_ignored(n) and not n.startswith("source."))
    labels = {n: n.rpartition(".")[2] for n in names if len({repr(f[n]) for f in flat if n in f}) > 1}
    for name in ("algorithm", "sharing.setting"):  # every name begins with these
        labels.pop(name, None)
    return list({c.name: c for c in (cell(one, labels) for one in experiments)}.values())
