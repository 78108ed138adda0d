"""What a run or a sweep shows: sentences that stay and, on a terminal, a live line for each thing under way.

Elsewhere, as in a pipe or a file, there are plain lines, and of each thing under way one in ``EVERY`` seconds and its
last. What is said goes to the logger ``fedcommons`` as well, so that a log file has it whatever the screen shows.
"""

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedcommons.cli.parser import Options
from fedcommons.errors import UserError, Warned, sentence

WIDTH = 80
"""Columns of a line, at most."""

EVERY = 30.0
"""Seconds between two lines of one thing under way where there is no terminal."""

DRAWN = 0.1
"""Seconds between two pictures of a terminal's live lines: steps may be faster than a terminal."""

LOG = logging.getLogger("fedcommons")


def log(text: str, level: int | None = None) -> None:
    """Hand a sentence on to whoever listens to the logger ``fedcommons``; nobody does unless asked."""
    LOG.log(level or (logging.WARNING if isinstance(text, Warned) else logging.INFO), "%s", text)


def duration(seconds: float) -> str:
    """In the unit in which it is from one on, rounded as no estimate is better known."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}" if seconds < 10 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


@dataclass(frozen=True)
class _Row:
    """text: of its last step. first, began: the step that it appeared with, and when. said: when a line told of it."""

    text: str
    number: int
    of: int
    first: int
    began: float
    said: float

    def left(self, now: float) -> str:
        """Time left, from the pace since the row appeared; empty where nothing tells."""
        if self.number <= self.first or self.number >= self.of:
            return ""
        return f"{duration((now - self.began) / (self.number - self.first) * (self.of - self.number))} left"


class _Console(Console):
    """Rich ends the process without a word when nobody reads its output; here the caller is told."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads the output")


class LogFile(logging.FileHandler):
    """A log file. flaw: why it cannot be written; what follows is dropped then, and the command goes on without it."""

    flaw = ""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(error := sys.exc_info()[1], OSError) or self.stream is None:
            return super().handleError(record)
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())  # else closing would write again, and fail
        self.flaw = error.strerror or type(error).__name__


class Display:
    """Use as a context; ``say`` for sentences, ``step`` for the progress of a named thing, ``drop`` when it ends.

    quiet: show warnings only. to_stderr: leave stdout to what a machine reads. file: where what is said is written
    besides, until the context ends. clock: seconds from any beginning.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, to_stderr: bool = False,
        file: logging.Handler | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.console = console or _Console(highlight=False, stderr=to_stderr)
        self.quiet, self._file, self._clock = quiet, file, clock
        # a pipe stays free of control characters whatever FORCE_COLOR says
        self.is_live = not quiet and self.console.is_interactive and self.console.file.isatty()
        self._rows: dict[str, _Row] = {}
        self._title, self._titled, self._drawn = "", -EVERY, -DRAWN
        self._live = Live(self._table(), console=self.console, transient=True, auto_refresh=False)

    @property
    def width(self) -> int:
        """Columns of a line: those of the terminal, elsewhere those of COLUMNS, and ``WIDTH`` at most."""
        given = os.environ.get("COLUMNS", "")
        columns = int(given) if given.isdecimal() else 0
        return min(WIDTH, (self.console.width if self.is_live else columns) or WIDTH)

    def __enter__(self) -> "Display":
        self._before = LOG.level, LOG.propagate
        if self._file:
            LOG.addHandler(self._file)
            LOG.propagate = False  # some libraries have the root logger print
            LOG.setLevel(min(self._file.level, LOG.getEffectiveLevel()))
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_live:
            self._live.stop()
        if error:
            LOG.error("%s", sentence(error))
        if self._file:
            LOG.removeHandler(self._file)
            LOG.setLevel(self._before[0])
            LOG.propagate = self._before[1]
            self._file.close()
            if flaw := getattr(self._file, "flaw", ""):
                self._print(Warned(f"the log file lacks what was said since it could not be written ({flaw})."))

    def say(self, text: str) -> None:
        """A line that stays."""
        log(text)
        self._print(text)

    def title(self, text: str) -> None:
        """The head line over the things under way."""
        self._title, now = text, self._clock()
        self._refresh()
        if not self.is_live and now - self._titled >= EVERY:
            self._titled = now
            self.say(text)

    def step(self, name: str, number: int, of: int, text: str, *, ends: bool = True) -> None:
        """The thing ``name`` has done ``number`` of ``of`` steps; after its last it is gone.

        ends: where there is no terminal, its last step has a line too.
        """
        now, before = self._clock(), self._rows.get(name)
        row = replace(before, number=number, text=text) if before else _Row(text, number, of, number, now, now)
        is_said = now - row.said >= EVERY or (ends and number >= of)
        line = f"{name}: {number}/{of} {text}" + (f", {left}" if (left := row.left(now)) else "")
        log(line, logging.INFO if is_said else logging.DEBUG)
        if is_said and not self.is_live:
            self._print(line)
        self._rows[name] = replace(row, said=now) if is_said else row
        if number >= of:
            self.drop(name)
        else:
            self._refresh()

    def drop(self, name: str) -> None:
        """The thing ``name`` has ended, or is no longer looked at."""
        self._rows.pop(name, None)
        self._refresh()

    def _print(self, text: str) -> None:
        if not self.quiet or isinstance(text, Warned):
            self.console.print(text, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, title=self._title, title_justify="left", show_header=False, padding=(0, 2, 0, 0))
        for _ in range(4):
            table.add_column(no_wrap=True, overflow="ellipsis")
        now = self._clock()
        for name, row in self._rows.items():
            table.add_row(name, f"{row.number}/{row.of}", row.text, row.left(now))
        return table

    def _refresh(self) -> None:
        if self.is_live and (not self._rows or self._clock() - self._drawn >= DRAWN):
            self._drawn = self._clock()
            self._live.update(self._table(), refresh=True)


def asked(options: Options, *, to_stderr: bool = False) -> Display:
    """The display that ``--quiet``, ``--log-file`` and ``--log-level`` describe.

    Raises:
        UserError: the log file cannot be written.
    """
    file, path = None, options.log_file
    if path is not None:
        try:
            file = LogFile(path, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--log-file: {path} cannot be written ({error.strerror}).") from error
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        # the first line, whatever the level: a full disk is found before any work
        file.emit(LOG.makeRecord(LOG.name, logging.INFO, "", 0, "command: %s", (shlex.join(sys.argv),), None))
        if file.flaw:
            raise UserError(f"--log-file: {path} cannot be written ({file.flaw}).")
        file.setLevel(options.log_level.upper())
    return Display(quiet=options.quiet, to_stderr=to_stderr, file=file)
