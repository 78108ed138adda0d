"""A W&B workspace as code: the panels by which runs are compared, for those of their metrics that were logged.

W&B holds of each run what ``WandbTracker`` told it: metrics by round, ``effective/alpha`` and so on in its config, and
its summary.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports.metrics import words
from fedcommons.tracking.run_folder import read_rounds, read_summary
from fedcommons.tracking.wandb_tracker import in_summary

if TYPE_CHECKING:  # an optional package
    from wandb_workspaces import workspaces

AXES = {"alpha": True, "p": False, "rho": False, "noise_multiplier": False, "lr": True}
"""Of the parallel coordinates: values that took effect in a run (``WandbTracker``), and whether by their logarithm."""

LINES = {
    "Accuracy": [
        ("round", ["test/accuracy"]), ("comm/total_bytes", ["test/accuracy"]), ("round", ["validation/accuracy"]),
        ("round", ["personal/accuracy_mean", "clients/accuracy_mean"]), ("round", ["train/loss"]),
    ],
    "Client dissimilarity": [
        ("round", ["convergence/zeta_hat_sq"]), ("round", ["convergence/zeta_hat_sq", "convergence/zeta_lemma1_sq"]),
        ("round", ["convergence/zeta_sq"]), ("round", ["convergence/delta_sq"]),
    ],
    "Gradient noise": [
        ("round", ["convergence/sigma_hat_sq"]), ("round", ["convergence/sigma_hat_sq", "convergence/sigma_lemma1_sq"]),
    ],
    "Privacy": [
        ("round", ["privacy/epsilon_local_training"]), ("round", ["privacy/epsilon_local_training_if_secret"]),
    ],
    "Bytes": [("round", ["comm/up_bytes"]), ("round", ["comm/down_bytes"]), ("round", ["comm/lost_bytes"])],
}  # fmt: skip
"""Of each section: what stands below a picture, and the metrics in it."""

BARS = {
    "Accuracy": ["rounds_to_target", "best_accuracy", "last_accuracy"],
    "Privacy": ["disclosed", "privacy/epsilon_of_messages_if_secret", "privacy/pool_epsilon_max",
                "privacy/pool_epsilon_max_if_secret", "audit/pixels/closer"],
}  # fmt: skip
"""Of each section: numbers of the summary, a bar a run."""


def logged(folders: Sequence[Path]) -> tuple[set[str], set[str]]:
    """The names of metrics that rounds of these runs have, and of those in their summaries as W&B has them."""
    metrics, ends = set[str](), set[str]()
    for folder in folders:
        metrics |= {name for line in read_rounds(folder) for name, value in line.items() if value is not None}
        ends |= set(in_summary(summary)) if (summary := read_summary(folder)) else set()
    return metrics, ends


def workspace(
    entity: str, project: str, name: str, metrics: Collection[str], ends: Collection[str]
) -> "workspaces.Workspace":
    """Sections for accuracy over rounds and over bytes, zeta^2, sigma^2, privacy and bytes, and what decides them.

    metrics, ends: as of ``logged``; a picture of metrics that no run has is left out. Lines are means over runs that
    differ in the seed only, with their standard deviation.
    """
    from wandb_workspaces import workspaces

    sections = [_decisive(ends)]
    for title, lines in LINES.items():
        panels: list[Any] = [_line(x, y) for x, y in lines if {*y} <= {*metrics}]
        panels += [_bar(end) for end in BARS.get(title, ()) if end in ends]
        if panels:
            sections.append(workspaces.Section(name=title, panels=panels, is_open=True))
    who = [workspaces.Config(field) for field in ("algorithm", "sharing.setting", *(f"effective/{a}" for a in AXES))]
    return workspaces.Workspace(
        entity=entity, project=project, name=name, sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=workspaces.RunsetSettings(groupby=[*who]),
    )  # fmt: skip


def _decisive(ends: Collection[str]) -> "workspaces.Section":
    """Parallel coordinates: what was chosen on the left, what it led to on the right; and zeta^2 against rounds."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2

    results = [name for name in ("zeta_hat_sq_mean", "rounds_used") if name in ends]
    column = v2.ParallelCoordinatesPlotColumn
    columns = [column(metric=v2.Config(f"effective/{axis}"), display_name=axis, log=log) for axis, log in AXES.items()]
    columns += [column(metric=v2.SummaryMetric(name), display_name=_words(name)) for name in results]
    panels: list[Any] = [v2.ParallelCoordinatesPlot(title="What decides", columns=columns)]
    if len(results) == 2:
        zeta, used = map(v2.SummaryMetric, results)
        panels.append(v2.ScatterPlot(title="Rounds against client dissimilarity", x=zeta, y=used, log_x=True))
    return workspaces.Section(name="What decides", panels=panels, is_open=True)


def _line(x: str, y: Sequence[str]) -> Any:
    from wandb_workspaces.reports import v2

    title = " and ".join(_words(name) for name in y).replace(" of the last round", "")
    title += "" if x == "round" else " over bytes"
    return v2.LinePlot(
        title=title, x=x, y=[*y], title_x="round" if x == "round" else "bytes of all clients, both ways",
        groupby_aggfunc="mean", groupby_rangefunc="stddev",
    )  # fmt: skip


def _bar(end: str) -> Any:
    from wandb_workspaces.reports import v2

    return v2.BarPlot(title=_words(end), metrics=[end], groupby_aggfunc="mean", groupby_rangefunc="stddev")


def _words(name: str) -> str:
    """A metric as words, without formulas, which W&B does not render."""
    return re.sub(r" ?\$.*?\$", "", words(name.removeprefix("convergence/")))
