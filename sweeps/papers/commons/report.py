"""Files that the commons sweep writes: table, CSV, picture and guide."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import target
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, sweep
from papers.commons import decide
from papers.commons.ways import Entry, Rates, budget

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from papers.commons.measured import Measured

HEAD = (
    "alpha", "way", "rounds to target", "last accuracy, %", "best, %", "MB once", "MB a round", "MB in all",
    "client work, s", "given away", "epsilon", "near-copies", "membership advantage", "rates", "budget",
)  # fmt: skip


def report(entries: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write all files from the finished run folders, and display table and guide."""
    from papers.commons.measured import measured

    cells = grid.once(e.cell for e in entries if isinstance(e.cell, sweep.Trial))
    rows = measured(entries, grid.finished(cells, out, display.say), out)
    if not rows:
        return
    from papers.commons.picture import draw

    seconds = _seconds(rows, out, display)
    undefined = {f"{e.way}, alpha {e.alpha:g}": e.cell for e in entries if isinstance(e.cell, str)}
    lines = [_line(result, seconds[name_of(result)]) for result in rows]
    missing = f"{_not_defined(entries)}{_not_finished(entries, rows)}"
    table = f"{tables.markdown(HEAD, lines)}{missing}{tables.numbered(_notes(rows, options))}"
    text = grid.stamped(f"{table}\n{_guides(rows)}", options)
    write_text(out / "commons.md", text)
    records = [_record(result, seconds[name_of(result)]) for result in rows]
    write_text(out / "commons.csv", tables.to_csv(records))
    write_json(
        out / "summary.json", {"name": out.name, "preset": options.preset, "rows": records, "undefined": undefined}
    )
    draw(rows, out / "commons.png", grid.title([cell.config for cell in cells]), grid.is_smoke(options))
    display.say("\n" + text)


def name_of(measured: "Measured") -> str:
    """Return the folder name of the row's first run."""
    return Path(str(measured.runs["run"].iloc[0])).name


def _seconds(rows: "Sequence[Measured]", out: Path, display: Display) -> dict[str, float]:
    """Return the seconds of client work by the name of a row's first run; a file caches them, as each takes seconds."""
    from papers.commons.work import client_seconds

    file = out / "client_work.json"
    cached: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    prices: dict[tuple, Any] = {}
    for number, result in enumerate(rows, 1):
        if name_of(result) not in cached:
            display.step("pricing client work", number, len(rows), result.row.way)
            cached[name_of(result)] = client_seconds(result.config, prices)
            write_json(file, cached)
    return cached


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
    """Return the rates as text, without the section of a field's name."""
    return ", ".join(f"{name.partition('.')[2]} {value:g}" for name, value in rates)


def _to_target(result: "Measured") -> str:
    if not result.row.rounds:
        return "not reached" if None in result.to_target else "0"
    return tables.rounds_needed(list(result.to_target), round(result.row.rounds))


def _percent(values: Sequence[float]) -> str:
    return tables.mean_std([100 * value for value in values], 1)


def _not_defined(entries: Sequence[Entry]) -> str:
    """Return a line for each way and alpha that cannot run, with the reason."""
    errors = {(e.alpha, e.way): e.cell for e in entries if isinstance(e.cell, str)}
    return "".join(f"\n{way}, alpha {alpha:g}: not defined: {reason}\n" for (alpha, way), reason in errors.items())


def _not_finished(entries: Sequence[Entry], rows: "Sequence[Measured]") -> str:
    """Return a line for each way and alpha without a row, or whose row lacks seeds."""
    text = ""
    seeds = {e.seed for e in entries}
    ended = {(result.alpha, result.row.way): len(result.row.best) for result in rows}
    for alpha, way in dict.fromkeys((e.alpha, e.way) for e in entries if isinstance(e.cell, sweep.Trial)):
        n = ended.get((alpha, way), 0)
        if not n:
            text += (
                f"\n{way}, alpha {alpha:g}: no row: at all rates the run with seed {entries[0].seed} has not ended, "
            )
            text += "or a seed's failed\n"
        elif n < len(seeds):
            text += f"\n{way}, alpha {alpha:g}: of {n} of {len(seeds)} seeds; the other runs have not ended\n"
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


def _notes(rows: "Sequence[Measured]", options: parse.Options) -> list[str]:
    config = rows[0].config
    c, goal = config.client, target.in_words(config.target)
    return [
        f"All: {config.data.name}, N = {config.partition.n_clients}, {config.partition.name}, R = "
        f"{config.federation.rounds}, E = {c.epochs}, B = {c.batch_size}, {c.optimizer}; the classifier is "
        f"{rows[0].config.model.name} (FedDPMS trains the autoencoder that has it). Same local steps for all clients "
        "that train it: by the rule of equal work where they hold others' examples, all at once in one-shot methods.",
        f"Rounds to target ({goal}) are those in which clients took part; an exchange before round 1 is none of them.",
        "Last: after the last round, of the server too; best: the test accuracy in the round of the best validation "
        "accuracy, whose model a run keeps; picture and guide are of it. With the first seed each row tries the rates "
        f"{options.lrs} for clients that train the classifier, and the rates of a server or of images that are its "
        "own, one changed at a time; the row, all its seeds, has those of the best validation accuracy there in any "
        "round (of equals those tried first), but for rates at which a seed's run diverged. Rates of Fedssyn's "
        "generators are fixed, by the generators' own quality. Near copies and advantage are of the first seed.",
        "MB: 10^6 bytes of all clients, both ways; once: before round 1; a round: in which clients took part.",
        "Client work: seconds of all clients on one core, counted (steps times the price of a step, as --dry-run), "
        "with their generators.",
        "Given away: share of all examples that were sent raw, or from which something was made that no epsilon "
        "covers; updates of a model do not count. Epsilon: of what went into the commons, were its noise secret; none: "
        "nothing covers some of it; -: there is no commons.",
        "Near-copies, and membership advantage with its 95 % interval: of images that left clients, in pixels; -: no "
        "image left, or means, codes or models did. FedDM's images are those of the last round, FedCVAE's those that "
        "the server draws from decoders; both are judged against all clients'.",
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]  # fmt: skip


def _guides(rows: "Sequence[Measured]") -> str:
    """Return the guide of each alpha."""
    guides = []
    for alpha in dict.fromkeys(item.alpha for item in rows):
        advice = decide.guide([item.row for item in rows if item.alpha == alpha])
        lines = "".join(f"- {decide.in_words(item)}\n" for item in advice)
        guides.append(f"### Guide, alpha {alpha:g}\n\n{_HOW}\n\n{lines}")
    return "\n".join(guides)


_HOW = (
    "The first line of a limit is the way of the front that sends least, the next ones are told to be more accurate "
    "than the line before: Student's 95 % interval over the seeds is above 0, for each pair alone (of 20 pairs of "
    "equals one is told apart by chance), and the seeds' gaps are not all equal. Of one seed only the most accurate "
    "way is named, and nothing is told apart. Limits and numbers are those of the table."
)
