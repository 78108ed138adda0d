"""A workspace of Weights & Biases (W&B), created by code: panels that compare runs by what ``WandbTracker`` logged."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports.metrics import words
from fedcommons.storage import safe_read
from fedcommons.tracking.run_folder import read_rounds, read_summary
from fedcommons.tracking.wandb_media import KEYS, allowed
from fedcommons.tracking.wandb_tracker import in_summary

if TYPE_CHECKING:  # the package is optional
    from wandb_workspaces import workspaces

AXES = {"alpha": True, "p": False, "rho": False, "noise_multiplier": False, "lr": True}
"""Axes of the parallel coordinates: values that took effect in a run. True: the axis is logarithmic."""

LINES = {
    "Accuracy": [
        ("round", ["test/accuracy"]), ("comm/total_bytes", ["test/accuracy"]), ("round", ["validation/accuracy"]),
        ("round", ["personal/accuracy_mean", "clients/accuracy_mean"]), ("round", ["train/loss"]),
    ],
    "Client dissimilarity": [
        ("round", ["convergence/zeta_hat_sq", "convergence/zeta_lemma1_sq"]),
        ("round", ["convergence/zeta_sq"]), ("round", ["convergence/delta_sq"]),
    ],
    "Gradient noise": [("round", ["convergence/sigma_hat_sq", "convergence/sigma_lemma1_sq"])],
    "Privacy": [
        ("round", ["privacy/epsilon_local_training"]), ("round", ["privacy/epsilon_local_training_if_secret"]),
    ],
    "Bytes": [("round", ["comm/up_bytes"]), ("round", ["comm/down_bytes"]), ("round", ["comm/lost_bytes"])],
}  # fmt: skip
"""Line plots of each section, as pairs of x axis and metrics. A metric that no run has is left out."""

BARS = {
    "Accuracy": ["rounds_to_target", "best_accuracy", "last_accuracy"],
    "Privacy": ["disclosed", "privacy/overall", "privacy/epsilon_of_messages_if_secret", "privacy/pool_epsilon_max",
                "privacy/pool_epsilon_max_if_secret", "audit/pixels/closer"],
}  # fmt: skip
"""Bar plots of each section: names of numbers in the summary; a plot has one bar per run."""

TITLES = {
    "comm/up_bytes": "bytes from clients, per round", "comm/down_bytes": "bytes to clients, per round",
    "comm/lost_bytes": "bytes to stragglers without a reply, per round",
    "privacy/epsilon_local_training": "epsilon of local training",
    "privacy/epsilon_local_training_if_secret": "epsilon of local training, if the noise were secret",
    "privacy/overall": "epsilon of all messages",
    "privacy/epsilon_of_messages_if_secret": "epsilon of all messages, if the noise were secret",
    "privacy/pool_epsilon_max": "epsilon of the pool",
    "privacy/pool_epsilon_max_if_secret": "epsilon of the pool, if the noise were secret",
    "audit/pixels/closer": "synthetic images nearer to training images than to held-out ones",
}  # fmt: skip
"""Titles of panels; they take precedence over the labels in ``metrics.WORDS``."""

WHO = ("preset", "data.name", "partition.name", "algorithm", "sharing.setting")
"""Config fields by which W&B groups runs, in addition to the values of ``AXES``."""

RESULTS = ("zeta_hat_sq_mean", "rounds_used")
"""Results in the summary that are the right-hand axes of the parallel coordinates."""

PICTURES = ("Pools", "Training examples by client and class", "Training examples of clients")
"""Titles of the panels with the pictures ``KEYS``."""


@dataclass(frozen=True)
class Logged:
    """Names of the values that runs logged to W&B."""

    metrics: Collection[str]  # metrics of rounds
    ends: Collection[str]  # summary numbers and pictures that at least one run has
    shared: Collection[str] = ()  # summary numbers and pictures that all runs have


EVERYTHING = Logged(
    {name for lines in LINES.values() for _, y in lines for name in y}, {*chain(*BARS.values()), *RESULTS, *KEYS}
)
"""All names that a panel can show, for use if the names that the runs logged are unknown."""


def logged(folders: Sequence[Path], say: Callable[[str], None]) -> Logged:
    """Return the names that these runs logged. say: called for each other version of fedcommons that wrote runs."""
    metrics, of_each, others = set[str](), list[set[str]](), defaultdict[str, list[Path]](list)
    for folder in folders:
        metrics |= {name for line in read_rounds(folder) for name, value in line.items() if value is not None}
        others[_version(folder)].append(folder)
        if summary := read_summary(folder):
            try:
                values = {**in_summary(summary), **dict.fromkeys(allowed(summary), 0)}
            except KeyError:  # summaries of earlier versions lack some values
                values = summary
            of_each.append({name for name, value in values.items() if isinstance(value, int | float)})
    others.pop(version("fedcommons"), None)
    for made_by, of_it in others.items():
        more = f" and {len(of_it) - 1} more" if len(of_it) > 1 else ""
        note = "a panel leaves out runs that lack the panel's values"
        say(f"{of_it[0]}{more}: written by fedcommons {made_by}, not {version('fedcommons')}; {note}.")
    return Logged(metrics, set().union(*of_each), set.intersection(*of_each) if of_each else ())


def _version(folder: Path) -> str:
    """Return the version of fedcommons that wrote a run, such as ``1.2.0``, or ``(unknown)``."""
    try:
        recorded = safe_read.json_of(folder / "environment.json")["packages"]["fedcommons"]
    except (safe_read.UnreadableError, ValueError, TypeError, KeyError):
        recorded = ""
    return recorded if isinstance(recorded, str) and re.fullmatch(r"[\w.+]{1,40}", recorded) else "(unknown)"


def workspace(entity: str, project: str, name: str, logged: Logged) -> "workspaces.Workspace":
    """Return a W&B workspace with this title, ``name``. A panel is left out if no run has its metrics.

    Lines are means over runs that differ only in the seed, with their standard deviation.
    """
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2

    over_seeds: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    sections: dict[str, list[Any]] = {"What decides": _decisive(logged)}
    for title, lines in LINES.items():
        panels = sections[title] = []
        for x, metrics in lines:
            if y := [metric for metric in metrics if metric in logged.metrics]:
                named = " and ".join(map(_words, y)).replace(" of the last round", "")
                end, title_x = ("", x) if x == "round" else (" over bytes", "bytes of all clients, both directions")
                panels.append(v2.LinePlot(title=named + end, x=x, y=[*y], title_x=title_x, **over_seeds))
        ends = [end for end in BARS.get(title, ()) if end in logged.ends]
        panels += [v2.BarPlot(title=_words(end), metrics=[end], **over_seeds) for end in ends]
    sections["Pictures"] = [
        v2.MediaBrowser(title=title, media_keys=[key], mode="gallery", gallery_axis="run")
        for key, title in zip(KEYS, PICTURES, strict=True)
        if key in logged.ends
    ]
    who = [workspaces.Config(field) for field in (*WHO, *(f"effective/{axis}" for axis in AXES))]
    return workspaces.Workspace(
        entity=entity, project=project, name=name,
        sections=[workspaces.Section(name=title, panels=row, is_open=True) for title, row in sections.items() if row],
        settings=workspaces.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=workspaces.RunsetSettings(groupby=[*who]),
    )  # fmt: skip


def _decisive(names: Logged) -> list[Any]:
    """Return parallel coordinates of fields and results, and a scatter plot of rounds against dissimilarity zeta^2."""
    from wandb_workspaces.reports import v2

    def coordinates(title: str, results: Sequence[str]) -> Any:
        column = v2.interface.ParallelCoordinatesPlotColumn
        columns = [
            column(metric=v2.Config(f"effective/{axis}"), display_name=axis, log=log) for axis, log in AXES.items()
        ]
        columns += [column(metric=v2.SummaryMetric(name), display_name=_words(name)) for name in results]
        return v2.ParallelCoordinatesPlot(title=title, columns=columns)

    results = [name for name in RESULTS if name in names.ends]
    panels = [coordinates("What decides", results)]
    if len(results) == 2:
        if results[0] not in names.shared:  # this panel omits runs without zeta^2; the next panel has all runs
            panels.append(coordinates("What decides rounds", results[1:]))
        zeta, used = map(v2.SummaryMetric, results)
        panels.append(v2.ScatterPlot(title="Rounds against client dissimilarity", x=zeta, y=used, log_x=True))
    return panels


def _words(name: str) -> str:
    """Return the label of a metric, without LaTeX formulas, because W&B does not render them."""
    return TITLES.get(name) or re.sub(r" ?\$.*?\$", "", words(name.removeprefix("convergence/")))
