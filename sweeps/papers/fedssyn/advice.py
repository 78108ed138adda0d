"""Report of sweeps/advise.py: accuracies of the probe, predicted rounds by share p, and measured rounds."""

from collections.abc import Mapping, Sequence
from math import ceil, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedcommons.config import target
from fedcommons.config.experiment import Experiment
from fedcommons.convergence import advisor
from fedcommons.convergence.advisor import LocalWork, Measured
from fedcommons.federation.client_sampling import joining
from fedcommons.reports import tables
from fedcommons.reports.frames import load_rounds
from fedcommons.reports.plots import finish, panels, save
from fedcommons.tracking.run_folder import read_class_counts
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Report, Results

Lines = Sequence[Mapping[str, Any]]
Curves = Mapping[float, Sequence[Sequence[float]]]
"""Test accuracies of rounds 0, 1, 2, ... by share p, one curve per seed."""

NOTES = (
    "Predicted: rounds with the share p divided by rounds without sharing, (1 - p)^k, where k fits the ratios of the "
    "probe, to the largest accuracy that two of its curves reach. A ratio is 1 if one of the two never exceeds the "
    "untrained model. Range: the predictions of single seeds. The curves are of test accuracy, not of validation "
    "accuracy, so test data name the share p.",
    "Theory: Lemma 1 and Corollary I (non-convex) at the last model of the probe, for FedAvg with SGD, full "
    "participation and the best step size. It is a quotient of two upper bounds, so it is no bound.",
    "MB: 10^6 bytes of all clients' images and labels, up and down, sent once.",
    "Measured: mean rounds to the target at p divided by mean rounds at p = 0, and minimum to maximum over seeds. "
    "Accuracy is linear between rounds; a run that missed the target counts with all its rounds. The ratio is 1 if the "
    "runs at p = 0 need no round, as the untrained model reaches the target.",
)


def local_work(config: Experiment, sizes: Sequence[int]) -> LocalWork:
    """Return participants, mean local steps and batch size of a round; sizes: each client's number of examples."""
    c = config.client
    tau = fmean(c.epochs * (max(1, n // c.batch_size) if c.drop_last else ceil(n / c.batch_size)) for n in sizes)
    return LocalWork(joining(len(sizes), config.federation.participation), tau, c.batch_size)


def predict(curves: Curves, shares: Sequence[float]) -> list[dict[str, float]]:
    """Return a line for each share p: p, predicted (rounds at p divided by rounds at p = 0), low and high.

    curves: of the probe, with the same seeds for every p; p = 0 is one of them. low, high: extremes over seeds.
    """
    of_seeds = [
        advisor.exponent((p, advisor.ratio(each[i], without)) for p, each in curves.items() if p)
        for i, without in enumerate(curves[0.0])
    ]
    lines = []
    for p in shares:
        ends = [(1 - p) ** k for k in of_seeds]
        lines.append({"p": p, "predicted": (1 - p) ** fmean(of_seeds), "low": min(ends), "high": max(ends)})
    return lines


def compare(curves: Curves, p: float, level: float) -> dict[str, float]:
    """Return measured (rounds at p divided by rounds at p = 0), its minimum and maximum over seeds, and the rounds.

    curves: with the same seeds for every p. level: the target accuracy. missed: number of runs that missed the target.
    A ratio is 1 if the rounds at p = 0 are 0.
    """

    def ratio(at: float, without: float) -> float:
        return at / without if without else 1.0

    times = {share: [advisor.first_round(each, level) for each in curves[share]] for share in (0.0, p)}
    rounds = {q: [len(c) - 1 if t is None else t for c, t in zip(curves[q], times[q], strict=True)] for q in times}
    ratios = [*map(ratio, rounds[p], rounds[0.0])]
    return {
        "measured": ratio(fmean(rounds[p]), fmean(rounds[0.0])), "least": min(ratios), "most": max(ratios),
        "rounds": fmean(rounds[p]), "rounds_without": fmean(rounds[0.0]),
        "missed": times[p].count(None), "missed_without": times[0.0].count(None),
    }  # fmt: skip


def steps_apart(first: float | str, second: float | str, shares: Sequence[float]) -> int:
    """Return the number of steps between two shares p of the grid ``shares``; "none" is the step after the largest."""
    steps = [*sorted(shares), "none"]
    return abs(steps.index(first) - steps.index(second))


def lines_of(results: Results) -> tuple[list[dict[str, Any]], dict[tuple[float, float], Curves]]:
    """Return the lines of the CSV, and the probe's curves by (C, alpha), for federations whose probe is finished."""
    options, lines, probes = results.options, list[dict[str, Any]](), dict[tuple[float, float], Curves]()
    seeds, shares = grid.values(options, "seeds", int), grid.values(options, "p", float)
    runs = results.reported
    configs = {e.cell.name: e.cell.config for e in results.entries}
    for (c, alpha), group in runs.groupby(["C", "at"], sort=False):
        rounds = load_rounds(*group["run"])
        whole = {run: of_run for run, of_run in rounds.groupby("run")}
        curves: dict[bool, dict[float, list[list[float]]]] = {False: {}, True: {}}
        for (check, p), cell in group.sort_values("seed").groupby(["check", "p"]):
            if len(cell) == len(seeds):
                curves[bool(check)][p] = [whole[run][target.ACCURACY].dropna().tolist() for run in cell["run"]]
        probe, tried = curves[False], curves[True]
        if set(probe) != {0.0, *grid.values(options, "probe-p", float)}:
            continue
        p_probe = max(probe)
        largest = group[~group["check"] & (group["p"] == p_probe)].sort_values("bytes_once")
        first = largest[largest["seed"] == seeds[0]].iloc[0]
        last = whole[first["run"]].dropna(subset="zeta_sq").iloc[-1]
        at = Measured(**{name: max(last[name], 0.0) for name in Measured.__dataclass_fields__})
        work = local_work(configs[first["cell"]], [sum(row) for row in read_class_counts(Path(first["run"]))])
        per_image = largest["bytes_once"].mean() * (1 - p_probe) / p_probe / 1e6
        probes[c, alpha] = probe
        of_place = [
            {
                "dataset": first["dataset"], "participation": c, "alpha": alpha, "seeds": len(seeds),
                "lr": first["client.lr"], **line, "rule": 1 - line["p"],
                "theory": advisor.theory(at, line["p"], work, at.gradient_sq) if at.gradient_sq else nan,
                "mb": per_image * line["p"] / (1 - line["p"]),
                **(compare(tried, line["p"], options.target) if {0.0, line["p"]} <= tried.keys() else {}),
            }
            for line in predict(probe, shares)
        ]  # fmt: skip
        for name, source in {"named": "predicted", "named_by_rule": "rule", "best": "measured"}.items():
            if all(source in line for line in of_place):
                p = advisor.smallest_enough({line["p"]: line[source] for line in of_place}, options.speed_up)
                of_place = [{**line, name: "none" if p is None else p} for line in of_place]
        lines += of_place
    return lines, probes


def verdict(lines: Lines) -> str:
    """Return the comparison of the predictions with the measured ratios: mean errors, and shares that were named."""
    tried = [line for line in lines if "best" in line]
    if not tried:
        return ""
    shares = sorted({line["p"] for line in tried})
    errors = {
        name: fmean(abs(line[name] - line["measured"]) for line in tried) for name in ("predicted", "rule", "theory")
    }
    places = list({(line["participation"], line["alpha"]): line for line in tried}.values())
    near = {
        name: sum(steps_apart(line[name], line["best"], shares) <= 1 for line in places)
        for name in ("named", "named_by_rule")
    }
    return (
        f"Mean error of rounds p / 0 over {len(places)} federations: probe {errors['predicted']:.2f}, rule 1 - p "
        f"{errors['rule']:.2f}, theory {errors['theory']:.2f}. The named p is at most one step from the best p in "
        f"{near['named']} of {len(places)} (named by 1 - p: {near['named_by_rule']}).\n"
    )


def spread(values: Sequence[float], scale: float = 1, digits: int = 2) -> str:
    mean, low, high = (f"{scale * value:.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} [{low}, {high}]"


def section(lines: Lines, probe: Curves, speed_up: float) -> str:
    """Return the Markdown of a federation: accuracies of the probe after each round, predictions, and the named p."""
    line = lines[0]
    rounds = range(1, len(probe[0.0][0]))
    courses = [[f"{p:g}", *(spread([c[r] for c in each], 100, 1) for r in rounds)] for p, each in sorted(probe.items())]
    head, tried = ["p", "1 - p", "predicted", "range", "theory", "MB once"], "best" in line
    rows = [
        [f"{a['p']:g}", f"{a['rule']:.2f}", f"{a['predicted']:.2f}", f"{a['low']:.2f} to {a['high']:.2f}",
         f"{a['theory']:.2f}", f"{a['mb']:.3f}",
         *([f"{a['rounds']:.1f}", f"{a['measured']:.2f} [{a['least']:.2f}, {a['most']:.2f}]"] if tried else [])]
        for a in lines
    ]  # fmt: skip
    text = f"{line['dataset']}, C = {line['participation']:g}, alpha = {line['alpha']:g}, learning rate {line['lr']:g}"
    named = f"Smallest p predicted to be {speed_up:g} times faster: {line['named']}."
    named += f" Measured: {line['best']}; {line['rounds_without']:.1f} rounds without sharing." if tried else ""
    return "\n".join([
        f"{text}. Test accuracy of the probe after each round, %:\n",
        tables.markdown(["p", *(f"round {r}" for r in rounds)], courses),
        tables.markdown([*head, *(["rounds", "measured"] if tried else [])], rows), named + "\n",
    ])  # fmt: skip


def picture(path: Path, lines: Lines, title: str, smoke: bool) -> None:
    """Draw a panel for each C and alpha: predicted and measured rounds, divided by the rounds without sharing."""
    rows, columns = ([*dict.fromkeys(line[name] for line in lines)] for name in ("participation", "alpha"))
    figure, grid = panels(len(rows), len(columns), (1.2 + 3 * len(columns), 0.8 + 2.6 * len(rows)), sharey=True)
    for i, c in enumerate(rows):
        grid[i][0].set_ylabel("rounds with sharing / without")
        for axes, alpha in zip(grid[i], columns, strict=True):
            some = [line for line in lines if (line["participation"], line["alpha"]) == (c, alpha)]
            p, predicted, low, high, theory = (
                [float(name != "p"), *(line[name] for line in some)]
                for name in ("p", "predicted", "low", "high", "theory")
            )
            axes.fill_between(p, low, high, color="#0072b2", alpha=0.2, lw=0, label="range of the probe over seeds")
            axes.plot(p, predicted, color="#0072b2", label="predicted by the probe")
            axes.plot(p, [1 - share for share in p], color="0.5", ls="--", label="1 - p")
            axes.plot(p, theory, color="#009e73", ls=":", label="theory (Corollary I)")
            if tried := [line for line in some if "measured" in line]:
                at, mean, least, most = (
                    np.array([q[name] for q in tried]) for name in ("p", "measured", "least", "most")
                )
                axes.errorbar(
                    at, mean, (np.maximum(mean - least, 0), np.maximum(most - mean, 0)), fmt="o", color="#d55e00",
                    ms=4, capsize=3, label="measured: mean; bar: range over seeds",
                )  # fmt: skip
            axes.set_title(f"C = {c:g}, alpha = {alpha:g}", fontsize=10)
            axes.set(xlabel="share p of shared data", ylim=(0, None))
    finish(figure, f"Predicted and measured rounds to the target; {title}")
    save(figure, path, 110, smoke)


def report(results: Results) -> Report | None:
    """Return the report of all federations whose probe is finished, or None if there is none."""
    lines, probes = lines_of(results)
    if not lines:
        return None
    texts = [
        section(
            [line for line in lines if (line["participation"], line["alpha"]) == place], probe, results.options.speed_up
        )
        for place, probe in probes.items()
    ]
    title = grid.title(results.configs)
    notes = tables.numbered([*NOTES, *learning_rates.notes(results.entries)])
    return Report(
        "\n".join([*texts, verdict(lines)]) + notes, lines, {"preset": results.options.preset, "predictions": lines},
        {"advise.png": lambda path: picture(path, lines, title, results.smoke)},
    )  # fmt: skip
