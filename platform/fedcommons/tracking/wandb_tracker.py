"""Weights & Biases as one more listener: one run per trial, opened inside the trial; it never asks and fails no run."""

import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import flat_dict
from fedcommons.files import write_text

HERE = ("artifacts", "data.dir")
"""Fields that say where things lie on this machine: nobody else's business."""


class WandbTracker:
    """A W&B run in the run folder, its id kept in wandb-id.txt so that a resumed run continues it.

    ``say`` is told in one sentence whatever W&B cannot do; from then on the tracker is silent.
    """

    def __init__(self, folder: Path, config: Experiment, say: Callable[[str], None]) -> None:
        self.say, self.run = say, None
        mode = config.tracking.wandb
        # Set by a process that started this one, a sweep's: W&B would keep our run in that one's service, where the run
        # of a trial that was killed stays open, so that the trial after it, with the same id, would write nothing.
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb

            if mode == "online" and not logged_in():
                say("W&B: no login found (set WANDB_API_KEY or run `wandb login`), so this run is kept offline.")
                mode = "offline"
            try:
                self.run = _init(folder, config, mode)
            except wandb.Error as error:
                if mode != "online":
                    raise
                say(f"W&B: {error}; this run is kept offline.")
                self.run = _init(folder, config, "offline")
            self.run.define_metric("round")
            self.run.define_metric("*", step_metric="round")
        except Exception as error:
            self._give_up(error)

    def log(self, round: int, metrics: Mapping[str, float | None]) -> None:
        """See ``Tracker``."""
        if self.run is None:
            return
        try:
            known = {name: value for name, value in metrics.items() if value is not None}
            self.run.log({"round": round, **known}, step=round)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if self.run is None:
            return
        try:
            if summary is not None:
                self.run.summary.update({k: v for k, v in summary.items() if isinstance(v, int | float | str)})
            self.run.finish(exit_code=0 if summary is not None else 1)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.run = None
        self.say(f"W&B: {type(error).__name__}: {error}; the run goes on without it.")


def _init(folder: Path, config: Experiment, mode: str):
    import wandb

    return wandb.init(
        project=config.tracking.project,
        group=config.tracking.group,
        name=folder.name,
        id=_run_id(folder),
        resume="allow" if mode == "online" else None,
        mode=mode,  # pyright: ignore[reportArgumentType]
        dir=folder,
        config={n: v for n, v in flat_dict(config).items() if n not in HERE and not n.startswith("tracking.")},
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=30,
            save_code=False,
            disable_git=True,  # the commit is in environment.json, and a remote may name a host or hold a password
            x_disable_stats=True,
            x_disable_meta=True,  # the program and its arguments, the host, the folder
            host="",
        ),
    )


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
    path = folder / "wandb-id.txt"
    if not path.exists():
        write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()
