"""What a sweep shows while it runs: one live line per running cell on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.live import Live
from rich.table import Table


@dataclass(frozen=True)
class _Row:
    text: str
    number: int
    of: int
    first: int
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> str:
        """Time left, from the pace since the row appeared."""
        if self.number <= self.first or self.number >= self.of:
            return ""
        pace = (time.monotonic() - self.started) / (self.number - self.first)
        return f", {pace * (self.of - self.number):.0f} s left"


class _Console(Console):
    """Rich ends the process without a word when nobody reads its output; here the caller is told."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads the output")


class Display:
    """Use as a context; ``say`` for sentences, ``step`` for the progress of a named cell, ``drop`` when it ends."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or _Console(highlight=False)
        self._rows: dict[str, _Row] = {}
        self._title = ""
        self._live = Live(self._table(), console=self.console, transient=True, auto_refresh=False)

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """The head line over the running cells."""
        self._title = text
        self._refresh()

    def step(self, name: str, number: int, of: int, text: str) -> None:
        """Trial ``name`` has done ``number`` of ``of`` steps."""
        before = self._rows.get(name)
        self._rows[name] = replace(before, number=number, text=text) if before else _Row(text, number, of, number)
        if self.console.is_terminal:
            self._refresh()
        elif number == of or number % max(1, of // 3) == 0:
            self.say(f"{name}: {number}/{of} {text}{self._rows[name].left}")

    def drop(self, name: str) -> None:
        """Trial ``name`` has ended."""
        self._rows.pop(name, None)
        self._refresh()

    def _table(self) -> Table:
        table = Table(box=None, title=self._title, title_justify="left", show_header=bool(self._rows))
        for head in ("cell", "step", "", "left"):
            table.add_column(head)
        for name, row in self._rows.items():
            table.add_row(name, f"{row.number}/{row.of}", row.text, row.left.removeprefix(", "))
        return table

    def _refresh(self) -> None:
        if self.console.is_terminal:
            self._live.update(self._table(), refresh=True)
