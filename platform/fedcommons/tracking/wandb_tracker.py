"""A tracker for Weights & Biases (W&B): one W&B run per trial, opened inside the trial.

W&B never asks for input here, and failures of W&B do not stop a run. No path of this machine is uploaded by the run.
(The user's command ``wandb sync`` uploads the path of its script, unless WANDB_PROGRAM sets another name.)
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import dotted
from fedcommons.config.experiment import Experiment
from fedcommons.config.registry import label
from fedcommons.config.tracking_fields import Tracking
from fedcommons.errors import Warned
from fedcommons.privacy.mechanisms import columns
from fedcommons.privacy.statement import in_short
from fedcommons.runtime import tempdirs
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_text
from fedcommons.tracking.metric_names import NAMES
from fedcommons.tracking.tracker import Metric
from fedcommons.tracking.wandb_media import Columns, pictures

if TYPE_CHECKING:  # pandas takes a second to import, and a run needs none
    import pandas as pd

VARIABLES = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_NOTES", "WANDB_PROJECT", "WANDB_TAGS")
"""Variables that a sweep's process passes to its trials. The API key is not sent to other machines."""

NAMES_OF_ONE_RUN = ("WANDB_NAME", "WANDB_RUN_ID", "WANDB_SWEEP_ID")
"""Variables that name one W&B run. They are ignored if a command has several runs."""

NAME_AT_WANDB = r"[^/\\#?%:\x00-\x1f\x7f-\x9f]{1,128}"
"""Pattern of names of users, teams and projects at W&B."""

IID = 1e6
"""The alpha that W&B shows for partition ``iid``: a large finite number, as iid is the limit of infinite alpha."""


_ID = "[0-9A-Za-z_-]{1,64}"


class WandbTracker:
    """A W&B run in the run folder. Its id is stored in wandb-id.txt, so that a resumed run continues the W&B run.

    described: see ``describe``. mode: "online" or "offline". say: called with one sentence if the run is kept offline,
    or has no pictures. pool: synthetic images for the pictures (see ``wandb_media``), which are logged with
    the last round. is_required: raise W&B's error instead of keeping the run offline.
    """

    def __init__(
        self, folder: Path, described: Mapping[str, Any], mode: str, say: Callable[[str], None], pool: Columns = (),
        is_required: bool = False,
    ) -> None:  # fmt: skip
        self.say, self.folder, self.pool, self.last = say, folder, pool, 0
        self.has_model = described["model"]
        # With this variable, W&B would use the sweep's W&B service, where the run of a killed trial stays open.
        # The next trial with the same id would then write nothing.
        os.environ.pop("WANDB_SERVICE", None)
        with tempdirs.tempdir():
            import wandb
        if mode == "online" and not logged_in():
            say("W&B: there is no login (set WANDB_API_KEY or run `wandb login`), so this run is kept offline.")
            mode = "offline"
        try:
            self.run = _init(folder, described, mode, run_id(folder))
        except wandb.Error as error:
            if mode != "online":
                raise
            wandb.teardown()  # without this, W&B's service still holds the run's id
            if is_required:
                raise
            say(f"W&B: {' '.join(str(error).split())}; this run is kept offline.")
            self.run = _init(folder, described, "offline", run_id(folder))
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        self.run.log({"round": round, **metrics}, step=round)
        self.last = round

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        try:
            if summary is not None:
                if images := self._images(summary):
                    self.run.log(images, step=self.last)
                self.run.summary.update(in_summary(summary))
                if self.has_model:
                    self._log_model()
        finally:
            self.run.finish(exit_code=0 if summary is not None else 1)
            _remove_links(self.folder)

    def _log_model(self) -> None:
        import wandb

        artifact = wandb.Artifact(f"model-{self.run.id}", type="model")
        artifact.add_file(str(self.folder / "model.safetensors"), policy="immutable")  # W&B makes no copy of its own
        self.run.log_artifact(artifact)

    def _images(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        import wandb

        try:
            drawn_pictures = pictures(self.folder, summary, self.pool)
            return {name: wandb.Image(picture) for name, picture in drawn_pictures.items()}
        except Exception as error:
            self.say(Warned(f"W&B: {type(error).__name__}: {error}; W&B shows this run without pictures."))
            return {}


def log_table(folder: Path, frame: "pd.DataFrame", place: Mapping[str, str], mode: str) -> None:
    """Log the table of the sweep in ``folder`` as a separate W&B run, by the id in its file. place: entity, project."""
    import wandb

    described = {
        "project": os.environ.get("WANDB_PROJECT") or Tracking.project, "group": folder.resolve().name,
        "job_type": "table", "system": False, **place,
    }  # fmt: skip
    run = _init(folder, described, mode, run_id(folder))
    rows: list[Any] = frame.to_numpy().tolist()
    rows = [[_without_folders(list(v) if isinstance(v, tuple) else v) for v in row] for row in rows]
    with run:
        run.log({"runs": wandb.Table(columns=[*frame], data=rows, allow_mixed_types=True)})
    _remove_links(folder)


def _remove_links(folder: Path) -> None:
    """Remove W&B's links to its log in a removed temporary folder; `ray up` fails at links to no file."""
    for link in folder.glob("wandb/*run-*/logs/debug-core.log"):
        if link.is_symlink():
            link.unlink()


def wandb_mode(mode: str) -> str:
    """Return the mode of W&B: "off" if WANDB_MODE is "disabled" and ``mode`` the default, else ``mode``."""
    return "off" if mode == Tracking.wandb and os.environ.get("WANDB_MODE") == "disabled" else mode


def describe(config: Experiment, p: float) -> dict[str, Any]:
    """Return the arguments of ``wandb.init`` that describe a run, and the switches ``model`` and ``system``.

    WANDB_PROJECT, WANDB_RUN_GROUP and WANDB_NOTES apply if the field is not set. p: resulting share of
    shared data.

    W&B's config has the fields of config.yaml without the section ``tracking`` and folders of this machine, and the
    values that the run used, such as ``effective/alpha`` (see ``dotted.effective``). W&B's parallel coordinates omit
    runs without a value. So rho is 0 without generators, the noise multiplier is 0 without DP-SGD, and alpha is ``IID``
    for partition iid. With a target epsilon, the noise multiplier differs between clients and stands in the summary.
    """
    fields, tracking = dotted.to_dict(config), config.tracking
    del fields["artifacts"], fields["data"]["dir"], fields["tracking"]
    for name in ("storage", "storage_name"):
        fields.pop(name, None)
    effective = {"rho": 0.0, "sigma": 0.0, **dotted.effective(config.flat, p)}
    if config.partition.name == "iid":
        effective["alpha"] = IID
    sigma = effective.pop("sigma")
    if config.dp.target_epsilon is None:
        effective["noise_multiplier"] = sigma
    preset_field = {"preset": tracking.preset} if tracking.preset else {}
    components = [label(name) for kind, name in config.chosen.items() if kind != "tracker"]
    defaults = ("independent", "constant")  # most runs use these components, so they are no tags
    tags = [_without_folders(tracking.preset), *(name for name in components if name not in defaults)]
    tags += os.environ.get("WANDB_TAGS", "").split(",")
    project = tracking.project if tracking.project != Tracking.project else os.environ.get("WANDB_PROJECT")
    group = tracking.group or os.environ.get("WANDB_RUN_GROUP")
    return {
        "job_type": "federation",
        "project": project or Tracking.project,
        "group": group or f"{label(config.data.name)}-{label(config.partition.name)}",
        "entity": os.environ.get("WANDB_ENTITY") or None,
        "notes": tracking.notes or os.environ.get("WANDB_NOTES"),
        "model": tracking.model,
        "system": tracking.system,
        "tags": list(dict.fromkeys(filter(None, [*tags, "dp" if config.dp.local else None]))),
        "config": _without_folders(fields | preset_field) | {f"effective/{name}": v for name, v in effective.items()},
    }


def in_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that W&B's summary has in addition to each metric's last value.

    They are the numbers and texts of summary.json, the mean over rounds of each convergence parameter, the privacy
    statement in short, the audit of synthetic images, ``target_reached`` and ``rounds_used`` (rounds to the target, or
    all rounds if it was missed). If the target was missed, ``rounds_to_target`` is absent, as it must be a number.
    """
    entries = {k: _without_folders(v) for k, v in summary.items() if isinstance(v, int | float | str) and k != "rounds"}
    courses = {name: [value for _, value in summary.get(name, ()) if value is not None] for name in NAMES}
    means = {f"{name}_mean": fmean(values) for name, values in courses.items() if values}
    statement = summary["privacy"]
    noise = columns(statement.get("mechanisms", {}))
    private = {f"privacy/{name}": value for name, value in {**in_short(statement), **noise}.items()}
    audit = {f"audit/{name}": value for name, value in _numbers(summary.get("audit", {}))}
    to_target = summary.get("rounds_to_target")
    used = summary["rounds"] if to_target is None else to_target
    return {**entries, **means, **private, **audit, "target_reached": to_target is not None, "rounds_used": used}


def _without_folders(value: Any) -> Any:
    """Return the value with each path and import path in it cut to the part after the last slash."""
    if isinstance(value, dict):
        return {name: _without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _numbers(nested: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each number in nested mappings; the name joins the keys with slashes."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{rest}", number) for rest, number in _numbers(value))
        elif isinstance(value, int | float):
            yield name, value


@tempdirs.tempdir()
def _init(folder: Path, described: Mapping[str, Any], mode: str, run_id: str):
    import wandb

    entries = {name: value for name, value in described.items() if name not in ("model", "system")}
    has_system = described["system"] if described["system"] is not None else mode == "online"
    return wandb.init(
        **entries,
        name=os.environ.get("WANDB_NAME") or folder.name,
        id=run_id,
        resume="allow" if mode == "online" else None,
        mode=mode,  # pyright: ignore[reportArgumentType]
        dir=folder.absolute(),  # W&B's process may have another working folder
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=30,
            save_code=False,
            disable_git=True,  # a git URL may contain a password; environment.json has the commit
            x_disable_stats=not has_system,
            x_disable_meta=True,  # W&B's metadata would contain the arguments, host and folder of the command
            host="",
            program="fedcommons",  # by default W&B stores the script's path
        ),
    )


@tempdirs.tempdir()
def logged_in() -> bool:
    """Return whether W&B has a key for its server (WANDB_API_KEY or a netrc file), so that it need not ask the user."""
    import wandb
    from requests.utils import get_netrc_auth  # a package that W&B needs

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.setup().settings.base_url))


def flaw_of_login(url: str | None = None) -> tuple[str, bool]:
    """Return why this machine's runs cannot be sent to W&B's server, and whether its login must be repaired.

    The text is "" if the server accepts the login. If the server does not answer within 10 s, the login may be valid.
    url: the server, also for later calls in this process; None: that of this machine's W&B.
    """
    if url:
        os.environ["WANDB_BASE_URL"] = url
    if not logged_in():
        return "there is no login (set WANDB_API_KEY or run `wandb login`)", True
    with tempdirs.tempdir():
        import wandb
    try:
        wandb.login(verify=True)
    except (wandb.Error, ValueError) as error:  # ValueError: WANDB_BASE_URL is no URL
        if isinstance(error, ValueError) or _answers(server := wandb.setup().settings.base_url):
            return " ".join(str(error).split()).rstrip("."), True
        return f"{server} does not answer", False
    finally:
        wandb.teardown()
    return "", False


def _answers(server: str) -> bool:
    """Return whether a web server answers within 10 s, whatever it answers."""
    import requests  # a package that W&B needs

    with suppress(requests.RequestException):
        requests.head(server, timeout=10)
        return True
    return False


def recorded_id(folder: Path) -> str | None:
    """Return the W&B run's id in wandb-id.txt; None if the file is missing or malformed."""
    with suppress(safe_read.UnreadableError):
        if re.fullmatch(_ID, text := (safe_read.text_of(folder / "wandb-id.txt") or "").strip()):
            return text
    return None


def run_id(folder: Path) -> str:
    """Return the recorded id; without one, store and return WANDB_RUN_ID, which W&B's agents set, or a new id."""
    if old := recorded_id(folder):
        return old
    new = os.environ.get("WANDB_RUN_ID", "")
    new = new if re.fullmatch(_ID, new) else secrets.token_hex(4)
    write_text(folder / "wandb-id.txt", new + "\n")
    return new
