"""Files that ``sweeps/commons.py`` writes: table, CSV, picture and guide (the best methods under several limits)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.config import target
from fedcommons.reports import tables
from fedcommons.reports.intervals import format_rounds
from fedcommons.reports.series import value
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.learning_rates import Rates
from fedcommons.tune.study import Entry, Report, Results
from papers.commons import decide, targets
from papers.commons.ways import budget
from papers.fedssyn import central_trials, references
from papers.fedssyn.references import CENTRAL, SERVER

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from papers.commons.measured import Measured

HEAD = (
    "alpha", "way", "rounds to target", "last accuracy, %", "best, %", "MB once", "MB a round", "MB in all",
    "client work, s", "given away", "epsilon", "near-copies", "membership advantage", "rates", "budget",
)  # fmt: skip


def report(results: Results) -> Report | None:
    """Return table, CSV, picture and guide of the rows that have finished runs."""
    from papers import client_work
    from papers.commons.measured import measured
    from papers.commons.picture import draw

    entries, options = results.entries, results.options
    rows = measured(entries, results.runs.drop_duplicates("cell"), results.out)
    if not rows:
        return None
    priced = client_work.of_runs({name_of(row): row.config for row in rows}, results.out, results.display)
    seconds = {name: sum(parts) for name, parts in priced.items()}
    undefined = {f"{way}, alpha {alpha:g}": reason for (alpha, way), reason in options.undefined.items()}
    lines = [_line(result, seconds[name_of(result)]) for result in rows]
    records = [_record(result, seconds[name_of(result)]) for result in rows]
    central = central_trials.at_best_rate(central_trials.lines(entries, options), entries, results.out)
    for cell in central.cells:
        rate, epochs = f"lr {value(cell, 'lr'):g}", f"{value(cell, 'epochs'):.0f} epochs on all real images"
        last = cell.values("last_accuracy")
        lines.append(["-", CENTRAL, "-", _percent(last), *"-----", "100.0 %", *"---", rate, epochs])
        known = {"way": CENTRAL, "bound": False, "seeds": len(last), "rates": rate, "last_accuracy": fmean(last)}
        records.append({**dict.fromkeys(records[0]), **known})
    missing = "".join(f"\n{row}: not defined: {reason}\n" for row, reason in undefined.items())
    missing += _not_finished(entries, rows, len(grid.values(options, "seeds", int)))
    rate_notes = learning_rates.notes(entries)
    if central.about:
        rate_notes.append(f"{CENTRAL if central.cells else f'No row {CENTRAL!r}'}: {central.about}.")
    table = f"{tables.markdown(HEAD, lines)}{missing}{tables.numbered(_notes(rows, options, rate_notes))}"
    if goals := grid.listed(options, "targets", float):
        table += targets.section(rows, goals, priced)
    title = grid.title([e.cell.config for e in entries if not e.is_tuning], with_target=False)
    of_central = [accuracy for cell in central.cells for accuracy in cell.values("last_accuracy")]
    return Report(
        f"{table}\n{_guides(rows)}", records, {"preset": options.preset, "rows": records, "undefined": undefined},
        {"commons.png": lambda path: draw(rows, path, title, results.smoke, of_central)},
    )  # fmt: skip


def name_of(measured: "Measured") -> str:
    """Return the folder name of the row's first run."""
    return Path(str(measured.runs["run"].iloc[0])).name


def _line(result: "Measured", seconds: float) -> list[object]:
    row, audited = result.row, result.audit
    return [
        f"{result.alpha:g}", f"{row.way}{' (bound)' * row.bound}", _to_target(result),
        _percent(result.last), _percent(list(row.best.values())), f"{row.pool_mb:.3g}", f"{result.per_round:.3g}",
        f"{row.mb:.3g}", f"{seconds:.3g}", f"{100 * row.disclosed:.1f} %", result.epsilon,
        f"{100 * audited.copies:.1f} %" if audited else "-",
        f"{audited.advantage:+.2f} [{audited.low:+.2f}, {audited.high:+.2f}]" if audited else "-",
        _rates(result.rates), budget(result.way, result.config.flat),
    ]  # fmt: skip


def _rates(rates: Rates) -> str:
    """Return the learning rates as text, such as ``lr 0.04``, without the section (``client.``) of a field's name."""
    return ", ".join(f"{name.partition('.')[2]} {value:g}" for name, value in rates)


def _to_target(result: "Measured") -> str:
    if not result.row.rounds:
        return references.rounds(result.to_target)
    counts = [result.row.rounds if reached is None else reached for reached in result.to_target]
    if missed := result.to_target.count(None):
        return format_rounds(counts, missed)
    return tables.mean_std(counts, 0 if len(counts) == 1 else 1)


def _percent(values: Sequence[float]) -> str:
    return tables.mean_std([100 * value for value in values], 1)


def _not_finished(entries: Sequence[Entry], rows: "Sequence[Measured]", n_seeds: int) -> str:
    """Return a line for each method (``way``) and alpha of which some seeds, or all seeds, have no finished run."""
    text = ""
    ended = {(result.alpha, result.row.way): len(result.row.best) for result in rows}
    for alpha, way in dict.fromkeys((e["alpha"], e["way"]) for e in entries):
        n = ended.get((alpha, way), 0)
        if not n:
            reason = "a tuning run has not ended or has failed, or a run diverged at each learning rate"
            text += f"\n{way}, alpha {alpha:g}: no row: {reason}\n"
        elif n < n_seeds:
            text += f"\n{way}, alpha {alpha:g}: {n} of {n_seeds} seeds; the other runs have not ended or have failed\n"
    return text


def _record(entry: "Measured", seconds: float) -> dict[str, Any]:
    row, audited = entry.row, entry.audit
    record: dict[str, Any] = {
        "alpha": entry.alpha, "way": row.way, "bound": row.bound, "seeds": len(row.best), "rates": _rates(entry.rates),
        "rounds_with_clients": row.rounds, "rounds_to_target": _to_target(entry), "last_accuracy": fmean(entry.last),
        "best_accuracy": row.accuracy, "mb_once": row.pool_mb, "mb_a_round": entry.per_round,
        "mb": row.mb, "client_seconds": seconds, "disclosed": row.disclosed, "disclosed_raw": row.raw,
        "epsilon": entry.epsilon, "near_copies": audited and audited.copies, "advantage": audited and audited.advantage,
        "advantage_low": audited and audited.low, "advantage_high": audited and audited.high,
    }  # fmt: skip
    return {**record, **{f"best_accuracy_seed{seed}": value for seed, value in row.best.items()}}


def _choice(options: parse.Options) -> str:
    if not learning_rates.tuning_seeds(options):
        return f"No learning rate was chosen: clients use {options.lrs}, and all other learning rates have defaults."
    return (
        f"On seeds {options.tuning_seeds}, which the table leaves out, each row tries the learning rates {options.lrs} "
        "of clients that train the classifier, and further learning rates of its method, one at a time. The seeds of "
        "the table then use those with the best validation accuracy in any round (in a tie, those tried first), except "
        "rates at which a seed's run diverged."
    )


def _notes(rows: "Sequence[Measured]", options: parse.Options, rate_notes: Sequence[str]) -> list[str]:
    config = rows[0].config
    c, goal = config.client, target.in_words(config.target)
    return [
        f"All: {config.data.name}, N = {config.partition.n_clients}, {config.partition.name}, R = "
        f"{config.federation.rounds}, E = {c.epochs}, B = {c.batch_size}, {c.optimizer}; the classifier is "
        f"{rows[0].config.model.name} (FedDPMS trains the autoencoder that contains it). Clients that train it "
        "make the steps of E epochs on their own images in each round, also if they hold other clients' images; in "
        "one-shot methods they make these steps at once.",
        f"Rounds to target ({goal}) counts the rounds in which clients took part, without an exchange before round 1. "
        f"Rows named one-shot: {SERVER}. {CENTRAL}: one model, which trains for R x E epochs.",
        "Last: test accuracy after the last round, server rounds included. Best: test accuracy in the round of the "
        "best validation accuracy, whose model a run keeps; picture and guide use it.",
        f"{_choice(options)} Learning rates of Fedssyn's generators are fixed, by the quality of the images. "
        "Near-copies and membership advantage belong to the first seed.",
        *rate_notes,
        "MB: 10^6 bytes that all clients send and receive; once: before round 1; a round: per round with clients.",
        "Client work: seconds of all clients on one core, generators included, computed as steps times the seconds "
        "of a step, as with --dry-run.",
        "Given away: share of all examples that were sent raw, or that shared data was computed from without an "
        "epsilon; model updates do not count. Epsilon: privacy guarantee of shared data, if the noise were secret; "
        "none: some shared data has no guarantee; -: nothing is shared.",
        "Near-copies, and membership advantage with its 95 % interval: of images that clients send, in pixels; -: "
        "clients send no images (but, for example, means, codes or models). FedMERF and NDPDC: images fitted to the "
        "clients' noisy sums; FedDM: images of the last round; FedCVAE: images that the server draws from decoders; "
        "these three are compared with the images of all clients.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]  # fmt: skip


def _guides(rows: "Sequence[Measured]") -> str:
    """Return as text, for each alpha, the best methods under each limit on disclosure or rounds (``decide.guide``)."""
    guides = []
    for alpha in dict.fromkeys(item.alpha for item in rows):
        advice = decide.guide([item.row for item in rows if item.alpha == alpha])
        lines = "".join(f"- {decide.in_words(item)}\n" for item in advice)
        guides.append(f"### Guide, alpha {alpha:g}\n\n{_HOW}\n\n{lines}")
    return "\n".join(guides)


_HOW = (
    "For each limit, the first line names the way with the fewest bytes. Each next way is significantly more accurate "
    "than the way in the line before: Student's 95 % interval of the difference, paired by seed, is above 0, and the "
    "differences are not all equal. Intervals are not corrected for several comparisons. With one seed, only the most "
    "accurate way is named, and no difference is significant. All numbers are those of the table."
)
