"""Tables of the privacy mechanisms that a run used: noise multiplier, sampling rate and steps of each client.

q: sampling rate;  sigma: noise multiplier;  steps: how often the mechanism ran;  clip: C, the largest L2 norm that
one example adds to a sum before noise (the sensitivity). A release is an entry of the privacy ledger: data that left a
client. It is covered if it has a privacy guarantee. A commons is data that clients shared, such as synthetic images.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcommons.privacy.accountants import accountant_of
from fedcommons.privacy.ledger import Events, Ledger
from fedcommons.privacy.release import Release
from fedcommons.privacy.statement import WORDS

COLUMNS = ("sigma", "q", "steps")


def mechanisms(
    ledger: Ledger, shared: Sequence[Release], delta: float, clip: float | None
) -> dict[str, list[dict[str, Any]]]:
    """Return tables of the releases with a privacy guarantee, with one row per client and pair (q, sigma).

    Args:
        ledger: the run's privacy ledger.
        shared: the releases before round 1.
        delta: the delta of the (epsilon, delta) guarantees of the run.
        clip: clipping norm of local training; None if local training is not private.

    Returns:
        ``updates``: at most one table, of the updates that the server averages. ``commons``: one table for each kind of
        data that clients shared. A table has ``what`` (names of the data), ``clip`` (None: the method chose a clipping
        norm, which is not recorded), ``delta``, ``in_words``, and the columns ``client``, ``q``, ``sigma``, ``steps``
        and ``accountant``, lists of equal length.
    """
    before: dict[tuple[tuple[str, ...], float], list[Release]] = {}
    for event in shared:
        if event.covered:
            before.setdefault((event.what, float(event.sensitivity)), []).append(event)
    commons = [
        _table(what, bound, delta, [(e.client, e.q, e.sigma, e.steps) for e in events])
        for (what, bound), events in before.items()
    ]
    named = {name for what, _ in before for name in what}
    later = _rows(ledger.commons.covered, less=ledger.before)
    commons += [_table([n for n in ledger.commons.names if n not in named], None, delta, later)] if later else []
    sent = _rows(ledger.updates.covered)
    return {"updates": [_table(ledger.updates.names, clip, delta, sent)] if sent else [], "commons": commons}


def ranges(table: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (minimum, maximum) over the rows of a table for noise multiplier, sampling rate and steps."""
    return {name: (min(table[name]), max(table[name])) for name in COLUMNS}


def in_words(table: Mapping[str, Any]) -> str:
    """Return a line of text with a table's constants and its ranges of noise multiplier, sampling rate and steps."""
    numbers = [f"{name} {_range(*both)}" for name, both in ranges(table).items()]
    numbers += [] if table["clip"] is None else [f"C {table['clip']:g}"]
    return f"{table['what']}: {', '.join(numbers)}, delta {table['delta']:g}, {accountants(table)}"


def accountants(table: Mapping[str, Any]) -> str:
    """Return the names of the accountants in a table as text, joined by "or"."""
    return " or ".join(sorted(set(table["accountant"])))


def columns(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float | str]:
    """Return columns for a table of runs, such as ``sigma_min``, ``q_max``, ``accountant`` and ``clip``.

    These columns describe the updates. Columns with the prefix ``pool_`` describe the first table of ``commons``.
    """
    result: dict[str, float | str] = {}
    for kind, prefix in (("updates", ""), ("commons", "pool_")):
        for table in tables.get(kind, ())[:1]:
            for name, (least, most) in ranges(table).items():
                result |= {f"{prefix}{name}_min": least, f"{prefix}{name}_max": most}
            result |= {f"{prefix}accountant": accountants(table)}
            result |= {} if table["clip"] is None else {f"{prefix}clip": table["clip"]}
    return result


def _rows(events: Events, less: Events | None = None) -> list[tuple[int, float, float, int]]:
    """Return rows (client, sampling rate, noise multiplier, steps) of ``events``, minus the steps in ``less``."""
    remaining = {client: Counter(spent) - Counter((less or {}).get(client, {})) for client, spent in events.items()}
    return [
        (client, q, sigma, steps)
        for client, spent in sorted(remaining.items())
        for (q, sigma), steps in sorted(spent.items())
    ]


def _table(
    names: Iterable[str], clip: float | None, delta: float, rows: Sequence[tuple[int, float, float, int]]
) -> dict[str, Any]:
    client, q, sigma, steps = (list(column) for column in zip(*rows, strict=True))
    rates: dict[int, list[float]] = {}
    for client_id, rate in zip(client, q, strict=True):
        rates.setdefault(client_id, []).append(rate)
    table = {
        "what": ", ".join(WORDS.get(name, name) for name in names),
        "clip": clip,
        "delta": delta,
        "client": [int(i) for i in client],
        "q": [float(value) for value in q],
        "sigma": [float(value) for value in sigma],
        "steps": [int(value) for value in steps],
        "accountant": [accountant_of(rates[client_id]) for client_id in client],
    }
    return {**table, "in_words": in_words(table)}


def _range(minimum: float, maximum: float) -> str:
    low, high = (f"{value:.4g}" if isinstance(value, float) else f"{value:,}" for value in (minimum, maximum))
    return low if low == high else f"{low} to {high}"
