"""Files that ``sweeps/commons.py`` writes: a table and a decision tree for each alpha, CSV and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.config import target
from fedcommons.reports import tables
from fedcommons.reports.intervals import ends, format_rounds
from fedcommons.reports.series import value
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.learning_rates import Rates
from fedcommons.tune.study import Entry, Report, Results
from papers.commons import decide, targets, worst_case
from papers.commons.ways import FEDAVG, budget
from papers.fedssyn import central_trials, references
from papers.fedssyn.references import CENTRAL, SERVER

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from papers.commons.measured import Measured

HEAD = ("way", "accuracy, %", "rounds", "MB", "client s", "disclosed, %", "epsilon")
WORST, NOT_MEASURED = "worst-case membership", "not measured"


def report(results: Results) -> Report | None:
    """Return tables, CSV, picture and decision trees of the rows that have finished runs."""
    from papers import client_work
    from papers.commons import decision_tree
    from papers.commons.measured import measured
    from papers.commons.picture import draw

    entries, options = results.entries, results.options
    rows = measured(entries, results.runs.drop_duplicates("cell"), results.out)
    if not rows:
        return None
    priced = client_work.of_runs({name_of(row): row.config for row in rows}, results.out, results.display)
    seconds = {name: sum(parts) for name, parts in priced.items()}
    undefined = {f"{way}, alpha {alpha:g}": reason for (alpha, way), reason in options.undefined.items()}
    exposed = [worst_case.read(result.config, options, results.out) for result in rows]
    records = [_record(result, seconds[name_of(result)], worst)
               for result, worst in zip(rows, exposed, strict=True)]  # fmt: skip
    central = central_trials.at_best_rate(central_trials.lines(entries, options), entries, results.out)
    of_central = [accuracy for cell in central.cells for accuracy in cell.values("last_accuracy")]
    for cell in central.cells:
        facts = {"way": CENTRAL, "bound": False, "seeds": len(of_central), "rates": f"lr {value(cell, 'lr'):g}",
                 "last_accuracy": fmean(of_central), "budget": f"{value(cell, 'epochs'):.0f} epochs"}  # fmt: skip
        last = {f"{decide.OF_SEED}{seed}": each for seed, each in zip(cell.runs["seed"], of_central, strict=True)}
        records.append({**dict.fromkeys(records[0]), **facts, **last, "disclosed": 1.0})
    notes = learning_rates.notes(entries)
    if central.about:
        notes.append(f"{CENTRAL if central.cells else f'No row {CENTRAL!r}'}: {central.about}.")
    trees = decide.trees([(result.alpha, result.row) for result in rows])
    text = ""
    for alpha in dict.fromkeys(result.alpha for result in rows):
        text += f"\n## Alpha {alpha:g}\n\n{_table(rows, records, alpha, of_central, bool(options.worst_case))}"
        no_tree = f"No decision tree: it needs the row {FEDAVG!r}.\n"
        text += f"\n### Which way to choose\n\n{decide.in_words(trees[alpha]) if alpha in trees else no_tree}"
        out = decide.left_out([result.row for result in rows if result.alpha == alpha])
        if out and alpha in trees:
            text += f"\nNot in the tree (their seeds differ from those of the row {FEDAVG!r}): {', '.join(out)}\n"
    text += "".join(f"\n{row}: not defined: {reason}\n" for row, reason in undefined.items())
    text += _not_finished(entries, rows, len(grid.values(options, "seeds", int)))
    text += tables.numbered(_notes(rows, options, notes, bool(trees)))
    if goals := grid.listed(options, "targets", float):
        text += targets.section(rows, goals, priced)
    title = grid.title([e.cell.config for e in entries if not e.is_tuning], with_target=False)
    pictures = {"commons.png": lambda path: draw(rows, path, title, results.smoke, of_central)}
    if trees:
        pictures["commons_tree.png"] = lambda path: decision_tree.draw(
            trees, path, f"Which commons? {title}", results.smoke
        )
    return Report(text, records, {"preset": options.preset, "rows": records, "undefined": undefined}, pictures)


def name_of(measured: "Measured") -> str:
    """Return the folder name of the row's first run."""
    return Path(str(measured.runs["run"].iloc[0])).name


def _table(
    rows: "Sequence[Measured]", records: Sequence[Mapping[str, Any]], alpha: float, central: Sequence[float],
    has_worst: bool,
) -> str:  # fmt: skip
    """Return the table of one partition as text: a line for each way, then the central model."""
    base = next((r.row for r in rows if (r.alpha, r.row.way) == (alpha, FEDAVG)), None)
    lines = []
    for result, record in zip(rows, records, strict=False):
        row = result.row
        if result.alpha != alpha:
            continue
        points = decide.differences(row, base) if base and row is not base else []
        ahead = f" ({fmean(points):+.1f}{f' {ends(points)}' * (len(points) > 1)})" if points else ""
        lines.append([
            f"{row.way}{' (upper bound)' * row.bound}", _percent(list(row.best.values())) + ahead, _to_target(result),
            f"{row.mb:.3g}", f"{record['client_seconds']:.3g}", f"{100 * row.disclosed:.1f}", row.guarantee,
            record["worst_case"] or NOT_MEASURED,
        ])  # fmt: skip
    if central:
        lines.append([CENTRAL, _percent(central), "-", "-", "-", "100.0", "-", NOT_MEASURED])
    return tables.markdown([*HEAD, WORST][: 7 + has_worst], [line[: 7 + has_worst] for line in lines])


def _rates(rates: Rates) -> str:
    """Return the learning rates as text, such as ``lr 0.04``, without the section (``client.``) of a field's name."""
    return ", ".join(f"{name.partition('.')[2]} {value:g}" for name, value in rates)


def _to_target(result: "Measured") -> str:
    if not result.with_clients:
        return references.rounds(result.to_target)
    counts = [result.with_clients if reached is None else reached for reached in result.to_target]
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


def _record(entry: "Measured", seconds: float, worst: Mapping[str, Any] | None) -> dict[str, Any]:
    row, audited = entry.row, entry.audit
    low, high = worst["auc_interval"] if worst else (None, None)
    record: dict[str, Any] = {
        "alpha": entry.alpha, "way": row.way, "bound": row.bound, "seeds": len(row.best), "rates": _rates(entry.rates),
        "rounds_with_clients": entry.with_clients, "rounds_to_target": _to_target(entry),
        "last_accuracy": fmean(entry.last), "best_accuracy": row.accuracy, "mb_once": entry.once,
        "mb_a_round": entry.per_round, "mb": row.mb, "client_seconds": seconds, "disclosed": row.disclosed,
        "disclosed_raw": row.raw, "epsilon": row.epsilon, "near_copies": audited and audited.copies,
        "advantage": audited and audited.advantage, "advantage_low": audited and audited.low,
        "advantage_high": audited and audited.high, "worst_auc": worst and worst["auc"], "worst_low": low,
        "worst_high": high, "worst_case": worst and f"{worst['auc']:.2f} [{low:.2f}, {high:.2f}]",
        "budget": budget(entry.way, entry.config.flat),
    }  # fmt: skip
    return {**record, **{f"{decide.OF_SEED}{seed}": value for seed, value in row.best.items()}}


def _choice(options: parse.Options) -> str:
    if not learning_rates.tuning_seeds(options):
        return f"No learning rate was chosen: clients use {options.lrs}, and all other learning rates have defaults."
    return (
        f"On seeds {options.tuning_seeds}, which the table leaves out, each row tries the learning rates {options.lrs} "
        "of clients that train the classifier, and further learning rates of its method, one at a time. The seeds of "
        "the table then use those with the best validation accuracy in any round (in a tie, those tried first), except "
        "rates at which a seed's run diverged."
    )


def _notes(
    rows: "Sequence[Measured]", options: parse.Options, rate_notes: Sequence[str], has_tree: bool
) -> list[str]:  # fmt: skip
    config = rows[0].config
    c, goal = config.client, target.in_words(config.target)
    notes = [
        f"All: {config.data.name}, N = {config.partition.n_clients}, {config.partition.name}, R = "
        f"{config.federation.rounds}, E = {c.epochs}, B = {c.batch_size}, {c.optimizer}; the classifier is "
        f"{config.model.name} (FedDPMS trains the autoencoder that contains it). Clients that train it "
        "make the steps of E epochs on their own images in each round, also if they hold other clients' images; in "
        "one-shot methods they make these steps at once. The CSV has each way's budget of training and rates.",
        "Accuracy: on test images, with the model of the best validation accuracy; ±: standard "
        f"deviation over seeds {options.seeds}. In brackets: minus {FEDAVG} (FedAvg without sharing), in points, "
        f"with its 95 % interval. {CENTRAL}: after the last of R x E epochs.",
        f"Rounds: number of rounds with clients until {goal}; earlier exchanges do not count. Rows named "
        f"one-shot: {SERVER}. MB, client s: sums over clients, rounds and earlier exchanges; seconds on one core: "
        "steps times seconds per step, with generators.",
        "Disclosed: share of all examples that were sent raw or used for shared data without an "
        "epsilon; model updates do not count. Epsilon: privacy guarantee of shared data, if the noise were secret; "
        "none: some shared data has no guarantee; -: nothing is shared; summed: only against parties that see nothing "
        "but the sum of all messages.",
        f"{_choice(options)} Learning rates of Fedssyn's generators are fixed, by the quality of the images.",
        *rate_notes,
    ]  # fmt: skip
    if n := options.worst_case:
        few = "With few of them, the interval is too narrow: with 12, it held 0.5 in 85 to 89 % of blind attacks"
        notes.append(
            f"Worst-case membership: AUC of an attack with the largest client's shared images (first seed), "
            "on the 5 % of images that the generators reveal most; 0.5: guessing; brackets: 95 % interval. Each "
            f"way has {n} shadow generators. {few}. {NOT_MEASURED}: clients send no images of generators."
        )
    if has_tree:
        notes.append(f"{decide.RULE}{' With one seed, differences may be chance.' * (len(rows[0].row.best) == 1)}")
    return notes
