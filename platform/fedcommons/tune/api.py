"""The Python interface: run an experiment, run a sweep on Ray, load the metrics and models of a finished run."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from pytorch_lightning import LightningModule
from torch import Tensor

from fedcommons.cli.display import Display, log
from fedcommons.config import live_objects, registry
from fedcommons.config.dotted import is_ignored, part_of, values_of
from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import Adapts, Algorithm, Personal
from fedcommons.core.client_worker import module_with
from fedcommons.core.worker import only_thread
from fedcommons.data.examples import Dataset
from fedcommons.errors import ClientError, UserError, quote
from fedcommons.federation import checkpoint
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.personal_evaluation import personal_model
from fedcommons.federation.rounds import Standing
from fedcommons.reports.frames import folder_path, load_rounds, load_runs
from fedcommons.runs import build, continuation, exports, model_files
from fedcommons.runs import experiment as runs
from fedcommons.runtime import tempdirs
from fedcommons.tracking.run_folder import is_run, read_config, read_summary
from fedcommons.tune.gpu_share import with_share
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import MOST, Trial, cell, open_sweep, require_few, run_cells, todo

if TYPE_CHECKING:  # pandas takes half a second to import, and a run needs none
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """A finished run, with its metrics and models. summary: the content of ``summary.json``.

    may_run: names of the user-defined components that may be executed to build the run's models; None: all of them.
    """

    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    may_run: Collection[str] | None = None

    @property
    def rounds(self) -> "pd.DataFrame":
        """Return the metrics as a table with one row per round; see ``load_rounds``."""
        return load_rounds(self.folder)

    @property
    def model(self) -> LightningModule:
        """Return a new copy of the server model of the last round, on the CPU, in evaluation mode.

        Raises:
            UserError: the model's file and checkpoint were removed or are damaged, or the method has no server model.
                The error is also raised if the module is user-defined and may not be executed or has changed.
        """
        if (saved := model_files.read(self.folder / model_files.LAST)) and saved[1] == self.summary["rounds"]:
            return self._loaded(saved)
        end = self._end()
        model = end.model  # raises an error if the method has no server model
        return module_with(self._untrained(), model, end.buffers).eval()

    @property
    def best(self) -> LightningModule:
        """Return the server model of the round with the best validation accuracy.

        If validation logs no accuracy, the metric is the loss. If ``federation.stop`` is "patience", the metric is
        ``federation.stop_metric``.

        Raises:
            UserError: there is no best model, for example without validation data, or ``model`` raises an error.
        """
        if saved := model_files.read(self.folder / model_files.BEST):
            return self._loaded(saved)
        raise UserError(f"{self.folder} has no {model_files.BEST}: no round had a value on validation data.")

    @property
    def dataset(self) -> Dataset:
        """Return the run's data set; ``.test.x`` and ``.test.y`` are the test examples as ``model`` takes them.

        A result of ``load`` reads the data set in the folder FEDCOMMONS_DATA or ./data, and downloads nothing.

        Raises:
            UserError: the data set is not in this folder, or is user-defined and may not be executed or has changed.
        """
        self._require_allowed("data")
        return build.dataset_of(self.experiment, in_usual_folder=self.may_run is not None)

    def export(self, form: str = "onnx") -> Path:
        """Write the server model of the last round to ``model.onnx`` in the run folder; return the path of this file.

        The exported model accepts batches of any size. form: the file format, always "onnx".

        Raises:
            UserError: ``form`` is unknown, a package is missing, torch cannot export the model, or ``model`` fails.
        """
        exports.require(form)
        if not (saved := model_files.read(self.folder / model_files.LAST)):
            raise UserError(f"{self.folder} has no {model_files.LAST} to export.")
        model_files.to_onnx(self._loaded(saved), saved[2], path := self.folder / "model.onnx")
        return path

    def personal(self, client: int) -> LightningModule:
        """Return the personal model of client number ``client`` after the last round, on the CPU, in evaluation mode.

        For a method whose clients train their personal models at evaluation (``Adapts``), this is the model before that
        training, and a warning says so.

        Raises:
            UserError: the method has no personal models, there is no such client, or the last checkpoint was removed or
                is damaged.
        """
        self._require_allowed("algorithm")
        algorithm: Algorithm = part_of(self.experiment, "algorithm")
        n = self.summary["n_clients"]
        if not isinstance(algorithm, Personal):
            raise UserError(
                f"algorithm {self.experiment.chosen['algorithm']} has no personal models: its clients share one."
            )
        if not 0 <= client < n:
            raise UserError(f"client must lie in [0, {n - 1}] in this run, got {quote(client)}.")
        if isinstance(algorithm, Adapts):
            name = self.experiment.chosen["algorithm"]
            warn(f"{name}: the personal model is this model after training on the client's examples", stacklevel=2)
        keeps = build.keeps_buffers(self.experiment)
        return module_with(
            self._untrained(), *personal_model(algorithm, self._end(), client, keep_buffers=keeps)
        ).eval()

    def _end(self) -> Standing:
        end = checkpoint.load_latest(self.folder / "checkpoints", ClientMemory(folder=self.folder / "memory"))
        if end is None or end.round != self.summary["rounds"]:
            raise UserError(f"{self.folder} has no checkpoint of round {self.summary['rounds']}.")
        return end

    def _untrained(self) -> LightningModule:
        """Return the run's module with its frozen weights; the trainable weights are still to be loaded."""
        if saved := model_files.read(self.folder / model_files.LAST):
            return self._loaded(saved)
        self._require_allowed("model")
        if self.may_run is None:
            return build.module_of(self.experiment)(build.dataset_of(self.experiment))
        raise UserError(  # the user has not named the data set's path, so the data set is not read
            f"{self.folder} has no {model_files.LAST}, which describes its data."
        )

    def _loaded(self, saved: tuple[dict[str, Tensor], int, Dataset]) -> LightningModule:
        self._require_allowed("model")
        tensors, _, data = saved
        module = build.module_of(self.experiment, with_weights=False)(data)  # ``tensors`` replace the initial weights
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            raise UserError(f"{self.folder} has weights of another module: {' '.join(str(error).split())}") from None
        return module.eval()

    def _require_allowed(self, kind: str) -> None:
        """Check that a user-defined component may be executed, and that its code is the same as in the run."""
        name = self.experiment.chosen[kind]
        if not registry.is_user_defined(name) or (self.may_run is None and not live_objects.is_live(name)):
            return
        if self.may_run is not None and name not in self.may_run:
            raise UserError(
                f"{self.folder} has a user-defined {kind}, {quote(name)}; to have it executed, name it: "
                f"load(folder, may_run=[{quote(name)}])."
            )
        if registry.source(name) != self.experiment.source.get(kind):
            raise UserError(f"{kind} {quote(name)} is not the code that {self.folder} was run with.")


def load(folder: str | Path, *, may_run: Collection[str] = ()) -> Result:
    """Load a finished run from its folder: its summary, metrics and models. The data set is not needed.

    may_run: names of the user-defined components that may be executed, as in the run's config.yaml, for example
    ``my_nets.py:ResNetGN``. Other user-defined code that the run names is not executed.

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
    folder: str | Path | None = None,
    *,
    say: Callable[[str], None] = log,
    on_round: Callable[[int, Mapping[str, float | None]], None] | None = None,
) -> Result:
    """Run the experiment in ``folder``: an interrupted run continues, and a finished run is only read.

    Settings of the process (torch's precision, threads and random state, signal handlers, Matplotlib's backend) do not
    affect the run and are restored afterwards. The function may be called in any thread, also in a thread with an event
    loop, and within another run in the same thread.

    Args:
        folder: the run folder; None: a temporary folder, which is removed when this process ends.
        say: called with each message of the run, for example ``print``. By default messages go to the logger
            ``fedcommons``, which prints nothing unless it is configured.
        on_round: called after each round with its number and metrics, first with round 0, the untrained model.

    Raises:
        UserError: the experiment cannot be run, or the folder holds another experiment. The error is also raised if
            another thread of this process runs an experiment, as both would draw from the same random state.
        ClientError: a client failed; the traceback is in ``folder/error.txt``.
    """
    if not isinstance(experiment, Experiment):
        raise UserError(f"run takes an experiment, got {quote(experiment)}.")
    path = tempdirs.make() / "run" if folder is None else folder_path(folder)
    return Result(
        path, experiment, runs.run(experiment, path, resume=True, say=say, on_round=on_round, with_share=with_share)
    )


def sweep(experiments: Iterable[Experiment], folder: str | Path, *, show: bool = False) -> "pd.DataFrame":
    """Run each experiment in a separate subfolder of ``folder``; return a table with one row per run (``load_runs``).

    Finished runs are only read, interrupted runs continue, and each generator is trained once for all runs. Ray is
    started if it is not running, and keeps running for the next sweep. show: print progress and messages as the
    command-line program does; if False, messages only go to the logger ``fedcommons``.

    Raises:
        UserError: an experiment cannot be run, an item is no experiment, or another thread of this process runs an
            experiment. In these cases no experiment has been run.
        ClientError: some runs failed. The other runs are finished and can be loaded.
    """
    out, cells = folder_path(folder), named(listed(experiments))
    with only_thread(), Display(quiet=not show) as display:
        for each in cells:
            continuation.never(each.config.source, each.config.chosen, out / each.name)
        SweepMirror(cells, out, display.say).begin(resume=True)
        remaining = todo(cells, out, display)
        with open_sweep(out, resume=True):
            try:
                failures = run_cells(remaining, out, display).failures
            except BaseException:  # also after Ctrl-C, so that the next sweep gets this sweep's resources
                from fedcommons.tune import trials  # Ray takes a second to import

                trials.remove_all()
                raise
    if failures:
        raise ClientError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
    return load_runs(*(out / c.name for c in cells))


def listed(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Return the experiments as a list; ``experiments`` may also be a single experiment.

    Raises:
        UserError: an item is no experiment, or there are too many experiments.
    """
    items = [experiments] if isinstance(experiments, Experiment) else experiments
    some: list[Any] = list(islice(items, MOST + 1)) if isinstance(items, Iterable) else [items]
    require_few(len(some))
    if wrong := [item for item in some if not isinstance(item, Experiment)]:
        raise UserError(f"sweep takes experiments, got {quote(wrong[0])}.")
    return some


def named(experiments: list[Experiment]) -> list[Trial]:
    """Return a trial (name and experiment) per different experiment, named after the fields in which they differ.

    Raises:
        UserError: the list is empty.
    """
    if not experiments:
        raise UserError("a sweep needs at least one experiment.")
    flat = [dict(values_of(experiment)) for experiment in experiments]
    names = dict.fromkeys(n for f in flat for n in f if not is_ignored(n) and not n.startswith("source."))
    labels = {n: n.rpartition(".")[2] for n in names if len({repr(f[n]) for f in flat if n in f}) > 1}
    for name in ("algorithm", "sharing.setting"):  # every trial's name begins with both values, which need no label
        labels.pop(name, None)
    return list({c.name: c for c in (cell(experiment, labels) for experiment in experiments)}.values())
