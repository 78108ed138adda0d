"""Learning rates of a study: tried on tuning seeds, chosen by validation accuracy, and run on the reported seeds.

Entries with the same label ``line`` belong to one row of the table; rates are chosen separately for each row. The
choice is computed from the saved run folders alone, so a resumed study repeats the choice without any training.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.cli.parser import NewOption
from fedcommons.config.dotted import override
from fedcommons.errors import UserError
from fedcommons.storage.error_file import has_diverged
from fedcommons.tracking.run_folder import read_run, read_summary
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, expand
from fedcommons.tune.sweep import Outcome, Todo

Rates = tuple[tuple[str, float], ...]
"""Learning rates of a trial, as pairs (field, value)."""

Score = Callable[[Sequence[float]], float]
"""Returns the score of a run from the validation accuracies of its rounds: ``LAST``, or ``max`` for the best round."""

LAST: Score = itemgetter(-1)

MOST_ADDED = 3
"""Largest number of values that are added at each end of a list of learning rates."""

OPTION: NewOption = (
    "tuning-seeds", str, "100", "if several rates are listed: seeds on which one is chosen; the table leaves them out",
)  # fmt: skip


def tuning_seeds(options: parse.Options, *lists: str) -> tuple[int, ...]:
    """Return the seeds on which learning rates are chosen (none may be in ``--seeds``); empty without a choice.

    lists: names of the options that list learning rates; default: ``lrs``.
    """
    if not any("," in (options[name] or "") for name in lists or ("lrs",)):
        return ()
    seeds = grid.values(options, "tuning-seeds", int)
    if both := {*grid.values(options, "seeds", int)} & {*seeds}:
        raise UserError(f"--tuning-seeds takes seeds that --seeds does not list, got {min(both)} in both.")
    return seeds


def choice_note(entries: Sequence[Entry], otherwise: str = "No learning rate was chosen by accuracy.") -> str:
    """Return a footnote: how the rates of the entries were chosen, or ``otherwise`` if no entry chooses rates."""
    if not (tuning := [entry for entry in entries if entry.is_tuning]):
        return otherwise
    pairs = {pair for entry in tuning if not entry["added"] for pair in entry["rates"]}
    listed = "; ".join(
        f"{name} {', '.join(f'{value:g}' for field, value in sorted(pairs) if field == name)}"
        for name in sorted({field for field, _ in pairs})
    )
    seeds = ", ".join(map(str, sorted({entry.cell.seed for entry in tuning})))
    return (
        f"Rows with several learning rates ({listed}) have the one with the best validation accuracy after the last "
        f"round on the tuning seeds ({seeds}), which the table leaves out. Learning rates at which a run diverged, "
        "also on a seed of the table, are excluded. Test data chose nothing."
    )


def with_rates(entry: Entry, rates: Rates, /, **more: Any) -> Entry:
    """Return the entry at these learning rates, with ``more`` labels; label ``added``: rates that no list contains."""
    trial = sweep.cell(override(entry.cell.config, dict(rates)), grid.VARIED)
    return Entry(trial, {"added": False, **entry.labels, "rates": rates, **more})


def with_tuning(entries: Sequence[Entry], tries: Sequence[Rates], seeds: Sequence[int]) -> list[Entry]:
    """Return one list: the tuning entries of all lines, then the entries themselves, unchanged.

    The learning rates of the entries themselves are placeholders, which ``plan`` replaces by the chosen rates. tries:
    the learning rates to try. With a single element, nothing is chosen. seeds: seeds of the tuning.
    """
    if len(tries) < 2:
        return [*entries]
    lines = {entry["line"]: entry for entry in entries}
    sweep.require_few(len(entries) + len(lines) * len(tries) * len(seeds))
    tuning = [
        with_rates(entry, (*rates, ("seed", seed)), rates=rates, tuning=True)
        for entry in lines.values() for rates in tries for seed in seeds
    ]  # fmt: skip
    return [*tuning, *entries]


def of_row(
    options: parse.Options, labels: Mapping[str, Any], fields: Mapping[str, Any], name: str, rates: Sequence[float],
    seeds: Sequence[int],
) -> list[Entry]:  # fmt: skip
    """Return a row's entries and, before them, entries that choose one of ``rates`` for the config field ``name``.

    All entries have ``name`` as label ``field``. labels, fields: of the row, see ``study.expand``. name: "" for a row
    without such a field. seeds: of the tuning.
    """
    at = {**fields, name: rates[0]} if name else fields
    tries = [((name, rate),) for rate in rates] if name else []
    return with_tuning(expand(options, [({**labels, "field": name}, at)]), tries, seeds)


def plan(
    entries: Sequence[Entry], out: Path, score: Score = LAST, tried: Collection[str] | None = None
) -> list[Entry]:  # fmt: skip
    """Return all tuning entries, with values added at an edge, and the reported entries at the rates chosen in ``out``.

    A line with tuning entries has no reported entry until its rates are chosen. Entries of a line without tuning
    entries are returned unchanged. Tuning entries have the label ``diverged``: the seeds whose runs diverged at the
    entry's rates.
    A run counts as diverged if it ended with a divergence error, or if a reply of any round was not finite.
    tried: names of the runs that this call has already started. Only their failures exclude rates, because runs that
    failed in an earlier call are repeated first. None: every diverged run excludes its rates.
    """

    def is_diverged(entry: Entry) -> bool:
        is_counted = tried is None or entry.cell.name in tried
        return (is_counted and _has_diverged(out / entry.cell.name)) or _has_diverged_clients(out / entry.cell.name)

    chosen = {line: _choose(of_line, out, score, is_diverged) for line, of_line in tuned_lines(entries).items()}
    planned = [entry for tuning, _ in chosen.values() for entry in tuning]
    for entry in (entry for entry in entries if not entry.is_tuning):
        if (line := entry.labels.get("line")) not in chosen:
            planned.append(entry)
        elif rates := chosen[line][1]:
            planned.append(with_rates(entry, rates))
    return planned


def _has_diverged(folder: Path) -> bool:
    return has_diverged(folder) and read_summary(folder) is None


def _has_diverged_clients(folder: Path) -> bool:
    """Return whether the run is finished and the server rejected a reply because it was not finite."""
    from fedcommons.federation.client_block import NOT_FINITE

    rejected = (read_summary(folder) or {}).get("rejected") or ()
    return any(str(record.get("why")).endswith(NOT_FINITE) for record in rejected)


def tuned_lines(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each line that has tuning entries."""
    names = dict.fromkeys(entry["line"] for entry in entries if entry.is_tuning)
    return {name: [entry for entry in entries if entry.labels.get("line") == name] for name in names}


def _choose(
    of_line: Sequence[Entry], out: Path, score: Score, is_diverged: Callable[[Entry], bool]
) -> tuple[list[Entry], Rates | None]:
    """Return a line's tuning entries, with added values, and its best rates; None: not chosen yet, or none is valid.

    The best rates have the highest mean score over the tuning seeds; in a tie, those tried first. Rates at which a run
    of any seed diverged are excluded, as the means would otherwise omit diverged seeds. Nothing is chosen if a tuning
    run failed for another reason.
    """
    from fedcommons.runs.build import check

    tuning, reported = [e for e in of_line if e.is_tuning], [e for e in of_line if not e.is_tuning]
    scores: dict[Rates, float] = {}
    excluded: dict[Rates, list[int]] = {}

    def result(best: Rates | None) -> tuple[list[Entry], Rates | None]:
        return [Entry(e.cell, {**e.labels, "diverged": tuple(excluded.get(e["rates"], ()))}) for e in tuning], best

    n_added: Counter[tuple[str, bool]] = Counter()
    while True:
        tried: dict[Rates, list[Entry]] = {}
        for entry in tuning:
            tried.setdefault(entry["rates"], []).append(entry)
        for rates, trials in tried.items():
            if seeds := [trial.cell.seed for trial in trials if is_diverged(trial)]:
                excluded[rates] = seeds
            elif rates not in scores:
                courses = [_accuracies(out / trial.cell.name) for trial in trials]
                if not all(courses):
                    return result(None)
                scores[rates] = fmean(map(score, courses))
        if not (valid := [rates for rates in scores if rates not in excluded]):
            return result(None)
        best, n_tuning = max(valid, key=scores.__getitem__), len(tuning)
        for name, is_largest, rates in edges(tried, best):
            n_added[name, is_largest] += 1
            if n_added[name, is_largest] <= MOST_ADDED:
                with suppress(UserError):  # a value out of the field's range is not tried
                    added = [with_rates(trial, rates, added=True) for trial in tried[best]]
                    check(added[0].cell.config)
                    tuning += added
        if len(tuning) == n_tuning:
            if not (seeds := [e.cell.seed for e in reported if is_diverged(with_rates(e, best))]):
                return result(best)
            excluded[best] = seeds


def edges(tried: Iterable[Rates], best: Rates) -> list[tuple[str, bool, Rates]]:
    """Return (field, whether the best value is the largest, next rates) for each field whose best value is at an edge.

    A field's values are compared only among the rates at which all other fields have their best values. The next value
    lies beyond the edge and continues the ratio of the last two values.
    """
    result = []
    for name, value in best:
        rest = {*best} - {(name, value)}
        values = sorted(dict(rates)[name] for rates in tried if rest <= {*rates})
        if len(values) > 1 and value in (values[0], values[-1]):
            neighbour = values[-2] if (is_largest := value == values[-1]) else values[1]
            following = {**dict(best), name: float(f"{value * value / neighbour:.4g}")}
            result.append((name, is_largest, tuple(following.items())))
    return result


def _accuracies(folder: Path) -> list[float]:
    """Return the validation accuracies by round; empty if the run is not finished."""
    summary, lines = read_run(folder)
    values = [line["validation/accuracy"] for line in lines if line.get("validation/accuracy") is not None]
    if summary is not None and not values:
        raise UserError(f"{folder} has no validation accuracy, by which learning rates are chosen.")
    return [] if summary is None else values


def play(
    entries: Sequence[Entry], options: parse.Options, todo: Todo, out: Path, display: Display, *,
    score: Score = LAST, run: Callable[[Sequence[Entry], Todo], Outcome] | None = None,
) -> Outcome:  # fmt: skip
    """Run the tuning entries, then values added at an edge, then the reported entries at the chosen rates.

    Trials that failed in an earlier call run again first. A run that diverged at rates that the table does not show is
    displayed, but is no failure of the outcome, unless its line has no choice. run: runs the trials of its second
    argument; its first argument is the plan.
    """
    run_trials = run or (lambda planned, remaining: sweep.run_cells(remaining, out, display))
    if not (tuned := tuned_lines(entries)):
        return run_trials(entries, todo)
    outcomes, tried, lines = list[Outcome](), set[str](), dict[str, set[str]]()
    while True:
        planned = plan(entries, out, score, tried)
        for entry in planned:
            lines.setdefault(entry.cell.name, set()).add(entry.labels.get("line", ""))
        cells = grid.once(entry.cell for entry in planned)
        remaining = [cell for cell in cells if cell.name not in tried and not sweep.is_done(cell, out)]
        if outcomes and not remaining:
            break
        work = sweep.todo(remaining if outcomes else cells, out, display)
        outcomes.append(run_trials(planned, replace(work, limits=todo.limits)))
        tried |= {cell.name for cell in remaining}
    outcome = sweep.together(outcomes)
    undecided = tuned.keys() - {entry.labels.get("line") for entry in planned if not entry.is_tuning}
    needed = {entry.cell.name for entry in planned if not entry.is_tuning}
    needed |= {name for name, of_trial in lines.items() if of_trial & undecided}
    skipped = {name for name in outcome.failures if name not in needed and _has_diverged(out / name)}
    for name in sorted(skipped):
        display.say(f"Skipped, with its learning rates: {name}: {outcome.failures[name]}")
    return replace(outcome, failures={n: reason for n, reason in outcome.failures.items() if n not in skipped})


def notes(planned: Sequence[Entry]) -> list[str]:
    """Return footnotes on a plan: excluded rates, values of lines with added values, chosen rates still at an edge."""
    extended, at_edge, excluded = dict[str, list[str]](), dict[str, list[str]](), dict[str, list[str]]()
    open_lines = []
    for line, of_line in tuned_lines(planned).items():
        tried = dict.fromkeys(entry["rates"] for entry in of_line if entry.is_tuning)
        if any(entry.labels.get("added") for entry in of_line):
            values = {name: sorted({dict(rates)[name] for rates in tried}) for name in dict(of_line[0]["rates"])}
            text = ", ".join(f"{name} {', '.join(f'{value:g}' for value in those)}" for name, those in values.items())
            extended.setdefault(text, []).append(line)
        for rates, seeds in dict.fromkeys((e["rates"], e["diverged"]) for e in of_line if e.labels.get("diverged")):
            text = ", ".join(f"{name} {value:g}" for name, value in rates)
            excluded.setdefault(f"{text} (seed {', '.join(map(str, seeds))})", []).append(line)
        if all(entry.is_tuning for entry in of_line):
            open_lines.append(line)
        for best in {entry["rates"] for entry in of_line if not entry.is_tuning}:
            for name, _, _ in edges(tried, best):
                at_edge.setdefault(f"{name} {dict(best)[name]:g}", []).append(line)
    added = f"Tried, as the best learning rate was at an edge of its list (at most {MOST_ADDED} more per end)"
    edge = "Chosen learning rates still at an edge of the values tried, so that others may be better"
    diverged = "Excluded learning rates, at which a run diverged on a seed of the tuning or of the table"
    no_choice = "No row, as a run diverged at each learning rate, or as a tuning run has failed or has not ended"
    notes = (added, extended), (edge, at_edge), (diverged, excluded)
    texts = [f"{n}: {_listed(lines)}." for n, lines in notes if lines]
    return [*texts, f"{no_choice}: {' / '.join(open_lines)}."] if open_lines else texts


def _listed(lines: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{rates} for {' / '.join(names)}" for rates, names in lines.items())
