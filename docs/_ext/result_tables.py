"""Tables of result pages, from committed CSV files; ``results.py`` says what a specification has."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from fedcommons.reports.intervals import mean_std, number, student

MOST_COLUMNS = 8
NAMES = {
    "real": "no sharing", "shuffled_synthetic": "pool", "local_synthetic": "local synthetic", "central": "server",
    "shuffled_real": "swapped real images", "server_synthetic": "only the pool", "one_shot": "server alone",
    "central_real": "all real images", "central_synthetic": "all synthetic images", "raw_copies": "raw copies",
    "fedavg": "FedAvg", "scaffold": "SCAFFOLD", "fedprox": "FedProx", "feddyn": "FedDyn", "fedpvr": "FedPVR",
    "fednova": "FedNova", "feddm": "FedDM", "feddpms": "FedDPMS", "fedvae": "FedVAE", "fedmix": "FedMix", "gan": "GAN",
    "fedgen": "FedGEN", "dense": "DENSE", "fedssyn": "Fedssyn", "ddpm": "DDPM", "cvae": "CVAE", "moon": "MOON",
    "iid": "IID", "dirichlet_plain": "Dirichlet(0.1)", "single_class": "one class each", "False": "no", "True": "yes",
    "one_class": "one class each", "private_ddpm": "private DDPM", "merf": "FedMERF",
}  # fmt: skip
PER_SEED = ("std", "seeds", "gain", "ratio")  # statistics of a row with one run of each seed
MEANINGS = {  # of brackets, below a table
    "std": "±: standard deviation", "range": "[ ]: minimum to maximum", "median": "median [minimum to maximum]",
    "prediction": "[ ]: 95 % prediction interval",
    "prediction of 5": "[ ]: 95 % prediction interval of the mean of five runs",
    "gain": "[ ]: 95 % interval, paired by seed; bold: excludes 0",
    "std and gain": "±: standard deviation; after the semicolon, difference [95 % interval, paired by seed]; bold: "
    "excludes 0",
}  # fmt: skip


def as_text(value: Any, digits: int | None = None) -> str:
    """Format a value: a number with ``digits`` decimals (None: three significant digits), a name, or - if missing."""
    if isinstance(value, str | bool):
        return NAMES.get(str(value), str(value))
    return "-" if value is None or value != value else number(float(value), digits)


def bracketed(middle: float, low: float, high: float, digits: int | None) -> str:
    texts = [re.sub(r"^-(0(\.0+)?)$", r"\1", number(value, digits)) for value in (middle, low, high)]
    return texts[0] if len({*texts}) == 1 else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def interval(values: Sequence[float], digits: int | None, scale: float = 1) -> str:
    """Format the mean and its 95 % interval. scale: by how much the interval is longer, for a prediction."""
    half = scale * (student(values) or (fmean(values), fmean(values)))[1] - scale * fmean(values)
    return bracketed(fmean(values), fmean(values) - half, fmean(values) + half, digits)


def prediction(runs: int) -> Callable[[Sequence[float], int | None], str]:
    """Return the formatter of the 95 % prediction interval for the mean of ``runs`` further runs."""
    return lambda values, digits: interval(values, digits, sqrt(1 + len(values) / runs))


def gain(values: Sequence[float], digits: int | None) -> str:
    """Format a mean difference with its sign, and bold if the interval excludes 0."""
    low, high = student(values) or (0, 0)
    text = ("+" if round(fmean(values), digits) > 0 else "") + interval(values, digits)
    return f"**{text}**" if low > 0 or high < 0 else text


STATISTICS: dict[str, Callable[[list[Any], int | None], str]] = {
    "value": lambda v, d: " / ".join(dict.fromkeys(as_text(x, d) for x in v)),
    "mean": lambda v, d: number(fmean(v), d),
    "range": lambda v, d: bracketed(fmean(v), min(v), max(v), d),
    "median": lambda v, d: bracketed(median(v), min(v), max(v), d),
    "seeds": lambda v, d: ", ".join(number(x, d) for x in v),
    "count": lambda v, d: str(len(v)),
    "std": mean_std, "gain": gain, "prediction": prediction(1), "prediction of 5": prediction(5),
}  # fmt: skip


def mask(frame: pd.DataFrame, at: Mapping[str, Any]) -> pd.Series:
    """Return which rows of the CSV have these values."""
    selected = pd.Series(True, index=frame.index)
    for name, value in at.items():
        selected &= frame[name].isna() if value != value else frame[name] == value
    return selected


Comparisons = dict[Any, Sequence[float]]
"""Differences by seed, by the identity of a comparison (``identity``)."""


def cell(
    frame: pd.DataFrame,
    evaluated: Callable[[str], Any],
    rows: pd.Series,
    others: pd.Series,
    how: Any,
    comparisons: Comparisons,
) -> str:
    """Format one cell. rows, others: those of the cell and of its base; how: a column as in ``results.py``."""
    statistic, expression, digits, *condition = how
    if statistic == "std and gain":
        parts = (cell(frame, evaluated, rows, others, (part, *how[1:]), comparisons) for part in ("std", "gain"))
        return "; ".join(filter(None, parts))
    if "±" in expression:  # of a CSV that has means and deviations
        parts = ((statistic, part.strip(), digits, *condition) for part in expression.split("±"))
        return " ± ".join(cell(frame, evaluated, rows, others, part, comparisons) for part in parts)
    if condition:
        rows, others = rows & evaluated(condition[0]), others & evaluated(condition[0])
    values, before = evaluated(expression)[rows].dropna(), evaluated(expression)[others]
    is_open = "_to_target" in expression and evaluated(expression)[rows | others].isna().any()
    if statistic in PER_SEED and "seed" in frame and len({*frame["seed"][rows]}) < sum(rows):
        raise ValueError("a row has several runs of a seed: add a column to `rows`, or a condition")
    counts = "_to_target" in expression and "missed" in frame
    missed, missed_by_base = (sum(frame["missed"][at]) if counts else 0 for at in (rows, others))
    if statistic in ("gain", "ratio") and is_open and not rows.equals(others):
        return "-"  # a run missed the target, and the CSV has no number of rounds for it
    if statistic in ("gain", "ratio"):
        if values.empty or before.empty or rows.equals(others):
            return ""
        if statistic == "ratio":
            sign = ">" if missed_by_base else "<" if missed else ""
            return "-" if missed and missed_by_base else f"{sign}{before.mean() / values.mean():.{digits}f}x"
        values = paired(frame, values, before)
    if values.empty or (statistic == "gain" and (missed or missed_by_base)):
        return "-"
    if statistic == "gain" and len(values) > 1:
        comparisons[identity(frame, rows, others, values)] = values.tolist()
    if missed and statistic == "seeds":
        late = frame["missed"][values.index]
        return ", ".join(">" * is_late + number(v, digits) for v, is_late in zip(values, late, strict=True))
    if missed:
        mean = ">" + number(fmean(values), digits).removesuffix(".0")
        return mean if missed == len(values) else f"{mean} (missed by {missed} of {len(values)})"
    return STATISTICS[statistic](values.tolist(), digits)


def paired(frame: pd.DataFrame, values: pd.Series, before: pd.Series) -> pd.Series:
    """Return the differences of two sides by seed."""
    return (values.set_axis(frame["seed"][values.index]) - before.set_axis(frame["seed"][before.index])).dropna()


def identity(frame: pd.DataFrame, rows: pd.Series, others: pd.Series, values: pd.Series) -> Any:
    """Return what two comparisons have in common that differ in sign or unit only: CSV rows, and scaled differences."""
    sides = frozenset(frozenset(frame["origin"][at]) for at in (rows, others))
    largest = max(values, key=abs, default=0) or 1
    return sides, tuple(round(value / largest, 6) for value in values)


def read(files: Sequence[str], folder: Path, where: str = "") -> pd.DataFrame:
    """Return the rows of CSV files, with one row per seed, and in ``origin`` the file and line of each."""
    frames = {name: pd.read_csv(folder / name) for name in files}
    frames = [table.assign(origin=[f"{name} {line}" for line in table.index]) for name, table in frames.items()]
    frame = pd.concat(frames, ignore_index=True)
    frame = frame.query(where, engine="python").reset_index(drop=True) if where else frame
    if long := next((column.rstrip("0123456789") for column in frame if re.search(r"_seed\d+$", column)), None):
        frame = pd.wide_to_long(frame.reset_index(), long, i="index", j="seed").reset_index()
    if {"rounds_to_target", "rounds"} <= {*frame.columns}:  # a run that missed the target counts with all its rounds
        frame["missed"] = frame["rounds_to_target"].isna()
        frame["rounds_to_target"] = frame["rounds_to_target"].fillna(frame["rounds"])
    return frame


def table(spec: Mapping[str, Any], folder: Path, comparisons: Comparisons | None = None) -> str:
    """A table as Markdown. spec: see ``results.py``. Raises KeyError, NameError or ValueError where a column lacks.

    comparisons: receives those of the cells.
    """
    files = [spec["csv"]] if isinstance(spec["csv"], str) else spec["csv"]
    if "rows" not in spec:
        with (folder / files[0]).open(encoding="utf-8") as file:
            return markdown([*csv.reader(file)], [f"[{files[0]}]({files[0]})"])
    frame = read(files, folder, spec.get("where", ""))
    comparisons = {} if comparisons is None else comparisons
    keys, columns = dict(spec["rows"]), dict(spec["columns"])
    if rate := spec.get("best"):
        accuracy = frame.groupby([*keys.values(), rate], dropna=False)["validation_accuracy"].transform("mean")
        most = accuracy.groupby([frame[name] for name in keys.values()], dropna=False).transform("max")
        frame = frame.loc[accuracy == most, :]
        least = frame.groupby([*keys.values()], dropna=False)[rate].transform("min")  # of equal ones the smallest
        frame = frame.loc[frame[rate] == least, :]
    if across := spec.get("across"):
        columns = {head.format(as_text(value)): [*how[:3], f"`{across}` == {value!r}"]
                   for value in frame[across].unique().tolist() for head, how in columns.items()}  # fmt: skip
    lines, counts = [[*keys, *columns]], list[int]()
    evaluated = cache(lambda text: pd.Series(frame.eval(text, engine="python"), index=frame.index))
    for at in frame.loc[:, [*keys.values()]].drop_duplicates().to_dict("records"):
        rows, others = mask(frame, at), mask(frame, {**at, **spec.get("base", {})})
        heads = [spec.get("names", {}).get(value) or as_text(value) for value in at.values()]
        lines.append([*heads, *(cell(frame, evaluated, rows, others, how, comparisons) for how in columns.values())])
        runs = frame if "seed" in at else frame.loc[rows, :]
        counts += [len({*runs["seed"]})] if "seed" in runs else runs["seeds"].tolist() if "seeds" in runs else []
    low, high = min(counts, default=0), max(counts, default=0)
    seeds = "**1 seed**" if high == 1 else f"{high} seeds" if low == high else f"{low} to {high} seeds"
    notes = [*(f"[{name}]({name})" for name in files), *([seeds] if counts else [])]
    notes += dict.fromkeys(MEANINGS[how[0]] for how in columns.values() if how[0] in MEANINGS and high != 1)
    return markdown(lines, notes)


def markdown(lines: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    if len(lines[0]) > MOST_COLUMNS:
        raise ValueError(f"{len(lines[0])} columns; at most {MOST_COLUMNS}")
    rows = ["| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])]
    return "\n".join([*rows, "", "; ".join(notes) + "."])
