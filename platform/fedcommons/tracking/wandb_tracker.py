"""Weights & Biases beside the run folder: one W&B run per trial, opened inside the trial.

W&B never asks for input here, and its failures do not stop a run. No path of this machine is uploaded. (W&B's own
command ``wandb sync`` tells its path, unless the variable WANDB_PROGRAM has another name for it.)
"""

import netrc
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlparse

from fedcommons.config import dotted
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import label
from fedcommons.errors import Warned
from fedcommons.privacy.mechanisms import columns
from fedcommons.privacy.statement import in_short
from fedcommons.runtime import tempdirs
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_text
from fedcommons.tracking.tracker import Metric
from fedcommons.tracking.wandb_media import Columns, pictures

IID = 1e6
"""The alpha by which W&B draws runs whose clients have data of one distribution: Dirichlet's limit, and no infinity."""


class WandbTracker:
    """A W&B run in the run folder, its id kept in wandb-id.txt so that a resumed run continues it.

    config: nested as in config.yaml, of the chosen parts only, and ``effective/alpha``, ``effective/p``,
    ``effective/rho``, ``effective/noise_multiplier``, ``effective/lr`` (see ``flat.effective``; ``p``: the share of
    shared data that resulted). A run without generators or DP-SGD has 0 there, and one with iid clients ``IID``: W&B's
    parallel coordinates leave out runs that lack a value; other partitions without an alpha do. ``preset``: that of
    the command line. tags: the preset, the chosen parts, and dp with DP-SGD. group: the sweep's name; of a run alone
    data set and partition.
    summary: the numbers and texts of summary.json, the mean over rounds of each convergence parameter
    (``zeta_hat_sq_mean``), ``rounds_used`` (to the target, or all where it was not reached), ``target_reached``,
    ``privacy/overall`` (epsilon of all messages, or none) and the other values and notes of ``statement.in_short``, and
    where the pool was audited the numbers of all clients together, as ``audit/pixels/closer``. A run that ended
    without reaching its target has ``target_reached`` false and no ``rounds_to_target``, so that this column holds
    numbers only.
    pictures: see ``wandb_media``, with the last round; ``pool``: images for them.
    ``say`` is told in one sentence what W&B cannot do; after a failure nothing more is logged.
    """

    def __init__(
        self, folder: Path, config: Experiment, p: float, say: Callable[[str], None], pool: Columns = ()
    ) -> None:
        self.say, self.run = say, None
        self.folder, self.pool, self.last = folder, pool, 0
        mode = config.tracking.wandb
        # Set by a process that started this one, a sweep's: W&B would keep our run in that one's service, where the run
        # of a trial that was killed stays open, so that the trial after it, with the same id, would write nothing.
        os.environ.pop("WANDB_SERVICE", None)
        try:
            with tempdirs.tempdir():
                import wandb
            if mode == "online" and not logged_in():
                say("W&B: no login found (set WANDB_API_KEY or run `wandb login`), so this run is kept offline.")
                mode = "offline"
            try:
                self.run = _init(folder, config, p, mode)
            except wandb.Error as error:
                if mode != "online":
                    raise
                say(f"W&B: {' '.join(str(error).split())}; this run is kept offline.")
                wandb.teardown()  # its service holds the run's id since it failed
                self.run = _init(folder, config, p, "offline")
            self.run.define_metric("round")
            self.run.define_metric("*", step_metric="round")
        except Exception as error:
            self._give_up(error)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``; numbers of clients stay in the run folder."""
        if self.run is None:
            return
        try:
            known = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            self.run.log({"round": round, **known}, step=round)
            self.last = round
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if self.run is None:
            return
        try:
            if summary is not None:
                self._log_pictures(summary)
                self.run.summary.update(in_summary(summary))
            self.run.finish(exit_code=0 if summary is not None else 1)
        except Exception as error:
            self._give_up(error)

    def _log_pictures(self, summary: Mapping[str, Any]) -> None:
        """Into the last round's row; a run without them is a whole run all the same."""
        import wandb

        try:
            found = pictures(self.folder, summary, self.pool)
            images = {name: wandb.Image(picture) for name, picture in found.items()}
        except Exception as error:
            self.say(Warned(f"W&B: {type(error).__name__}: {error}; the run is kept there without its pictures."))
            return
        if self.run and images:
            self.run.log(images, step=self.last)

    def _give_up(self, error: Exception) -> None:
        self.run = None
        self.say(Warned(f"W&B: {type(error).__name__}: {error}; the run goes on without it."))


def in_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B's summary of a run holds besides the last value of each metric; see ``WandbTracker``."""
    kept = {k: _without_folders(v) for k, v in summary.items() if isinstance(v, int | float | str) and k != "rounds"}
    courses = {k: [v for _, v in found if v is not None] for k, found in summary.items() if _is_course(found)}
    means = {f"{name}_mean": fmean(values) for name, values in courses.items() if values}
    said = summary["privacy"]
    noise = columns(said.get("mechanisms", {}))
    private = {f"privacy/{name}": value for name, value in {**in_short(said), **noise}.items()}
    audit = {f"audit/{name}": value for name, value in _numbers(summary.get("audit", {}))}
    to_target = summary.get("rounds_to_target")
    used = summary["rounds"] if to_target is None else to_target
    return {**kept, **means, **private, **audit, "target_reached": to_target is not None, "rounds_used": used}


def _is_course(found: Any) -> bool:
    """Whether a value of the summary is pairs of a round and a number: a convergence parameter."""
    return isinstance(found, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in found)


def _config(config: Experiment, p: float) -> dict[str, Any]:
    """What W&B is told of an experiment: nothing about this machine's folders, nor W&B's own settings."""
    fields = dotted.to_dict(config)
    del fields["artifacts"], fields["data"]["dir"], fields["tracking"]
    fields.pop("storage", None)
    effective = {"rho": 0.0, "sigma": 0.0, **dotted.effective(config.flat, p)}
    if config.partition.name == "iid":
        effective["alpha"] = IID
    sigma = effective.pop("sigma")
    if config.dp.target_epsilon is None:  # else clients differ in it: the summary has the range
        effective["noise_multiplier"] = sigma
    known = {"preset": preset} if (preset := config.tracking.preset) else {}
    return _without_folders(fields | known) | {f"effective/{name}": value for name, value in effective.items()}


def _without_folders(value: Any) -> Any:
    """The value, with every text that holds a slash cut to its last component: paths, and import paths of own parts."""
    if isinstance(value, dict):
        return {name: _without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings, each with the names that lead to it, separated by slashes."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{rest}", number) for rest, number in _numbers(value))
        elif isinstance(value, int | float):
            yield name, value


def _tags(config: Experiment) -> list[str]:
    """What runs are filtered by: preset, data set, algorithm, sharing setting and the other parts."""
    found = {kind: name for kind, name in config.chosen.items() if kind != "tracker"}
    names = [label(name) for name in found.values() if name not in ("independent", "constant")]  # of every run
    preset = _without_folders(config.tracking.preset)
    return list(dict.fromkeys(filter(None, [preset, *names, "dp" if config.dp.local else None])))


@tempdirs.tempdir()
def _init(folder: Path, config: Experiment, p: float, mode: str):
    import wandb

    return wandb.init(
        project=config.tracking.project,
        group=config.tracking.group or f"{label(config.data.name)}-{label(config.partition.name)}",
        name=folder.name,
        id=_run_id(folder),
        resume="allow" if mode == "online" else None,
        mode=mode,  # pyright: ignore[reportArgumentType]
        dir=folder.absolute(),  # W&B's process keeps the working folder that it was started in
        config=_config(config, p),
        tags=_tags(config),
        job_type="federation",
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=30,
            save_code=False,
            disable_git=True,  # the commit is in environment.json, and a remote may name a host or hold a password
            x_disable_stats=True,
            x_disable_meta=True,  # the program and its arguments, the host, the folder
            host="",
            program="fedcommons",  # else the script's path
        ),
    )


@tempdirs.tempdir()
def logged_in() -> bool:
    """Whether there is a key for W&B's server, looked for where W&B looks, without asking."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(wandb.setup().settings.base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(folder: Path) -> str:
    """The id in wandb-id.txt; a new one if there is none, or it is none of ours."""
    path = folder / "wandb-id.txt"
    with suppress(safe_read.UnreadableError):
        if re.fullmatch("[0-9a-z]{8}", found := (safe_read.text_of(path) or "").strip()):
            return found
    new = secrets.token_hex(4)
    write_text(path, new + "\n")
    return new
