"""What came of a campaign: faults alike together, and a table with a row for each part."""

import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from faults.runs import Found

KINDS = {
    "traceback": "traceback", "exit": "wrong exit", "sentence": "bad sentence", "silent": "silent", "lost": "lost",
    "hang": "hang", "leftover": "left over",
}  # fmt: skip
"""Kinds of faults, and their columns."""

SHORTENED = 40  # kinds of faults whose lines are tried again without the parts that they may not need


@dataclass
class Tally:
    """A row: how many were tried, refused in a sentence, and ended with a right result; and all that went wrong."""

    part: str
    tried: int = 0
    refused: int = 0
    right: int = 0
    found: list[Found] = field(default_factory=list)

    def add(self, code: int, found: Sequence[Found]) -> None:
        """One more, which ended with this exit code."""
        self.tried += 1
        self.found += found
        if not found:
            self.refused += code != 0
            self.right += code == 0

    def row(self) -> list[str]:
        wrong = [len({f.number for f in self.found if f.fault.kind == kind}) for kind in KINDS]
        return [self.part, *map(str, (self.tried, self.refused, self.right, *wrong))]


def report(tally: Tally, shortest: Callable[[Found], str]) -> None:
    """Faults alike together, those of which there are most first."""
    alike = defaultdict(list)
    for one in tally.found:
        alike[one.fault.kind, one.fault.what].append(one)
    order = list(KINDS)
    ordered = sorted(alike.items(), key=lambda item: (order.index(item[0][0]), -len(item[1])))
    for i, ((kind, what), several) in enumerate(ordered):
        first = several[0]
        line = shortest(first) if i < SHORTENED and kind != "hang" else first.line
        numbers = ", ".join(str(f.number) for f in several[:8])
        print(f"\n{len(several)} x {KINDS[kind]}: {what}\n  {tally.part} numbers {numbers}")
        print(f"  {line}\n  {first.fault.detail}".rstrip(), flush=True)


def printed(tallies: Sequence[Tally], command: str) -> str:
    """The table in Markdown, with the command, the date and the machine."""
    head = ["part", "tried", "refused in a sentence", "right result", *KINDS.values()]
    rows = [tally.row() for tally in tallies]
    rows.append(["in sum", *(str(sum(int(row[i]) for row in rows)) for i in range(1, len(head)))])
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]
    return "\n".join([*lines, "", f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {_machine()}"])


def _machine() -> str:
    names = [
        x.partition(": ")[2]
        for x in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if x.startswith("model name")
    ]
    return f"{len(names)} cores of {names[0] if names else platform.machine()}"
