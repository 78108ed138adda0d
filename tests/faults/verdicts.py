"""Whether a line ended well: with its work done as asked, or with one sentence, and with nobody's files touched."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import yaml
from faults.grammar import Line, shown
from faults.options import COSTLY
from faults.processes import TRACEBACK, Ended

from fedcommons.config import presets
from fedcommons.config.flat import IGNORED_BY_RESULTS, from_dict, same_results
from fedcommons.files import sha256

LONGEST = 600  # characters of a sentence
ECHOED = 80  # characters of a value in it
OURS = ("platform/fedcommons/", "sweeps/", "lightning_modules/")

STOPPED = "would start Ray"
"""What a line says last that has come as far as that."""

CELLS = "cells.jsonl"
"""In the line's folder: the experiments of a sweep that came so far."""


@dataclass(frozen=True)
class Fault:
    """What went wrong; kind: traceback, exit, sentence, silent, lost, hang or leftover.

    what: the same for faults alike.
    """

    kind: str
    what: str
    detail: str = ""


def of(line: Line, folder: Path, templates: Path, ended: Ended, lost: Sequence[Path]) -> list[Fault]:
    """All that went wrong with the line that ended so."""
    faults = [Fault("lost", f"{line.script}: {p.relative_to(folder)}") for p in lost[:3]]
    if (folder / "pwned").exists():
        faults.append(Fault("lost", "a config file ran code"))
    if ended.late:
        if endless(line):
            return faults
        return [*faults, Fault("hang", f"{line.script}, {line.kind}: {last(ended.err) or last(ended.out)}")]
    if ended.code == TRACEBACK:
        return [*faults, Fault("traceback", place(ended.err), last(ended.err))]
    if ended.code < 0:
        return [*faults, Fault("exit", f"signal {-ended.code}", last(ended.err))]
    if ended.code in (1, 2, 130):
        return [*faults, *sentence(line, ended)]
    if ended.code:
        return [*faults, Fault("exit", f"exit code {ended.code}", last(ended.err))]
    return [*faults, *done(line, folder, templates, ended)]


def place(err: str) -> str:
    """The exception and where in our code it came from: the same for faults alike."""
    frames = re.findall(r'File "([^"]+)", line \d+, in (\S+)', err)
    ours = [f"{Path(f).name}:{name}" for f, name in frames if any(part in f for part in OURS) and "tests/" not in f]
    kind = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning|Interrupt|Exit|Died|Bomb)\w*)(?:: |$)", err, re.M)
    return f"{kind[-1] if kind else last(err)[:40]} in {ours[-1] if ours else 'nobody of ours'}"


def last(text: str) -> str:
    """The last line, cut."""
    return shown((text.strip().splitlines() or [""])[-1], 200)


def sentence(line: Line, ended: Ended) -> list[Fault]:
    """Whether what a refused line says is one sentence."""
    said = [part for part in ended.err.split("\n") if part.startswith(("error: ", "stopped; "))]
    if len(said) != 1:
        return [Fault("sentence" if said else "exit", f"{len(said)} sentences, exit {ended.code}", last(ended.err))]
    text = said[0].removeprefix("error: ")
    rest = ended.err.rstrip("\n").split("\n")
    after = rest[rest.index(said[0]) + 1 :]
    if ended.code == 2 and (after or rest[0] != said[0]):
        return [Fault("sentence", "more lines than one", shown(" / ".join(rest)[:200]))]
    if len(text) > LONGEST:
        return [Fault("sentence", f"longer than {LONGEST}: {_masked(text)}", f"{len(text)} characters")]
    if not text.isprintable():
        return [Fault("sentence", "a character that is not for printing", ascii(text)[:200])]
    if len(text.split()) < 3 or "<class" in text or "Traceback" in text:
        return [Fault("sentence", f"no sentence: {_masked(text)}", shown(text, 200))]
    for value in (*line.argv, *line.environment.values()):
        value = value.partition("=")[2] if value.startswith("--") else value
        if len(value) > ECHOED + 20 and value[: ECHOED + 20] in text:
            return [Fault("sentence", "echoes more than 80 characters of a value", shown(text, 200))]
    return []


def _masked(text: str) -> str:
    """How it begins, without names and values."""
    return re.sub(r'"[^"]*"?|\'[^\']*\'?|(?<=: )\S*', "_", text)[:50]


def endless(line: Line) -> bool:
    """Whether it was asked for more work than anybody has time for."""
    return any(
        isinstance(v, int) and abs(v) > 999
        for n, v in line.asked.items()
        if n.replace("_", "-") in COSTLY or n in COSTLY
    )


def prints(line: Line) -> bool:
    """Whether it was asked for words only."""
    return any(t in ("--help", "-h") or t.startswith(("--print_config", "--dry-run")) for t in line.argv)


def done(line: Line, folder: Path, templates: Path, ended: Ended) -> list[Fault]:
    """Whether a line that ended well did what it was asked for."""
    if prints(line):
        return (
            []
            if len(ended.out) > (40 if "--dry-run" in line.argv else 300)
            else [Fault("silent", "no help", last(ended.out))]
        )
    if line.wrong:
        return [Fault("silent", f"{line.script}, {line.kind}: taken: {line.wrong[:70]}", last(ended.out))]
    if line.reads:
        whole = "norm of" in ended.out and "reply: accepted" in ended.out
        return [] if whole else [Fault("silent", "a replay without an answer", last(ended.out))]
    out = folder / _out(line)
    try:
        if line.script == "run":
            return run(line, out, templates, ended)
        faults = cells(line, folder, ended)
        return faults if ended.out.rstrip().endswith(STOPPED) else [*faults, *results(out, ended)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return [
            Fault(
                "silent",
                f"{line.script}, {line.kind}: no whole results: {type(error).__name__}",
                shown(str(error)[:200]),
            )
        ]


def _out(line: Line) -> str:
    out = line.asked.get("out", "out")
    given = [t.partition("=")[2] for t in line.argv if t.startswith("--out=")]
    given += [b for a, b in zip(line.argv, line.argv[1:], strict=False) if a == "--out"]
    found = given[-1] if given else str(out)
    return found.replace("~", "home", 1) if found.startswith("~/") or found == "~" else found


def run(line: Line, out: Path, templates: Path, ended: Ended) -> list[Fault]:
    """A run's folder: its config is the one asked for, its rounds are 0..R and finite, its summary is theirs."""
    stands = from_dict(yaml.safe_load((out / "config.yaml").read_text()))
    faults = []
    read = bool(line.result) and "\nround " not in "\n" + ended.out  # a finished run, of which nothing was played
    for name, value in line.asked.items():
        if read and name in IGNORED_BY_RESULTS:
            continue
        if name in stands.flat and not same(has := stands.flat[name], value):
            what = f"run, {line.kind}: {name} is not as asked"
            faults.append(Fault("silent", what, f"{shown(repr(value))} became {shown(repr(has))}"))
    preset = line.asked.get("preset", "smoke")
    if preset in ("smoke", "small") and line.kind != "config":  # of a damaged file it is not known what it asks for
        given = {t.removeprefix("--").partition("=")[0] for t in line.argv}
        expected, known = presets.experiment(preset, stands.data.name), {*line.asked, *given}
        has_all, meant_all = stands.flat, expected.flat
        for name in has_all.keys() & meant_all.keys():
            has, meant = has_all[name], meant_all[name]
            if name not in known and has != meant:
                what = f"run, {line.kind}: {name} was not asked for"
                faults.append(Fault("silent", what, f"{has!r} instead of {meant!r}"))
    lines = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    rounds = stands.federation.rounds
    if [one["round"] for one in lines] != list(range(rounds + 1)):
        return [*faults, Fault("silent", f"run, {line.kind}: rounds.jsonl is not 0..{rounds}")]
    summary = json.loads((out / "summary.json").read_text())
    accuracies = [one["test/accuracy"] for one in lines[1:]]
    reached = next((one["round"] for one in lines[1:] if one["test/accuracy"] >= stands.target), None)
    expected = {
        "rounds": rounds, "last_accuracy": accuracies[-1], "best_accuracy": max(accuracies), "seed": stands.seed,
        "rounds_to_target": reached, "algorithm": stands.algorithm, "n_clients": stands.partition.n_clients,
    }  # fmt: skip
    for name, value in expected.items():
        if summary[name] != value:
            what = f"run, {line.kind}: {name} in the summary"
            faults.append(Fault("silent", what, f"{summary[name]!r} instead of {value!r}"))
    found = [(k, v) for one in lines for k, v in one.items()]
    empty = sorted({k for k, v in found if v is None or (isinstance(v, float) and not isfinite(v))})
    if empty and "finite" not in ended.out + ended.err:
        faults.append(Fault("silent", f"run: not finite, and not a word: {empty[0]}", f"{len(empty)} of them"))
    return faults + (outputs(out, templates / line.result, line, ended) if line.result else [])


def same(found: Any, asked: Any) -> bool:
    """Whether a field has the value that was asked for."""
    if isinstance(found, tuple):
        found = list(found)
    if isinstance(found, float) and isinstance(asked, int | float):
        return found == asked or (isnan(found) and isnan(asked))
    return found == asked and isinstance(found, bool) == isinstance(asked, bool)


def outputs(out: Path, whole: Path, line: Line, ended: Ended) -> list[Fault]:
    """What must not differ from the run that nothing happened to: metrics, summary, the last checkpoint, the config."""
    last_one = max(p.name for p in (whole / "checkpoints").glob("*.safetensors"))
    faults, names = [], ["rounds.jsonl", "summary.json"]
    if f"\nround {int(last_one[6:12])}/" in "\n" + ended.out:  # else what there was of it was not needed
        names.append(f"checkpoints/{last_one}")
    for name in names:
        if sha256((out / name).read_bytes()) != sha256((whole / name).read_bytes()):
            faults.append(Fault("silent", f"{line.kind}: another {Path(name).name}", "not that of the unbroken run"))
    mine, its = (yaml.safe_load((p / "config.yaml").read_text()) for p in (out, whole))
    differ = [n for n in same_results(from_dict(mine), from_dict(its)) if n not in IGNORED_BY_RESULTS]
    return faults + [Fault("silent", f"{line.kind}: results of another {n}") for n in differ]


OPTIONS = {
    "alphas": "partition.alpha",
    "algorithms": "algorithm",
    "settings": "sharing.setting",
    "seeds": "seed",
    "lrs": "client.lr",
}
"""Of the sweeps: what their cells must then have, each value and no other."""


def cells(line: Line, folder: Path, ended: Ended) -> list[Fault]:
    """Whether each cell of a sweep that got so far has the fields that were asked for."""
    path = folder / CELLS
    found = [from_dict(json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []
    faults = []
    for name, value in line.asked.items() if found else ():
        varied = line.script == "convergence_parameters" and name == "generator.epochs"  # figure A.8 has parts of it
        has = [c.flat[name] for c in found if name in c.flat]
        if not varied and any(not same(one, value) for one in has):
            others = sorted({str(one) for one in has})
            faults.append(Fault("silent", f"{line.script}: {name} is not as asked", f"{value!r} became {others}"))
        if (field := OPTIONS.get(name)) and line.script in ("table1", "figure3"):
            have = {str(c.flat[field]) for c in found}
            kind = {"seed": int, "partition.alpha": float, "client.lr": float}.get(field, str)
            wanted = {str(kind(t.strip())) for t in str(value).split(",")}
            if have != wanted and value is not None:
                faults.append(
                    Fault("silent", f"{line.script}: --{name} is not as asked", f"{value!r} became {sorted(have)}")
                )
    return faults


def results(out: Path, ended: Ended) -> list[Fault]:
    """Whether the numbers of a script's own results are finite."""
    paths = [*out.glob("*.csv"), *out.glob("summary.json")]
    faults = []
    for path in paths:
        text = path.read_text()
        if path.suffix == ".csv":
            values: set[Any] = {v for row in csv.reader(text.splitlines()) for v in row}
            bad = {"nan", "inf", "-inf"} & values
        else:
            bad = set(re.findall(r"\b(?:NaN|Infinity)\b", text))
        if bad and "finite" not in ended.out:
            faults.append(Fault("silent", f"{path.name}: {min(bad)}"))
    return faults
