"""The screen output of a run or a sweep: messages that stay and, on a terminal, a live progress line per task.

If the output goes to a pipe or a file, a task prints a plain line every ``EVERY`` seconds and after its last step. The
logger ``fedcommons`` receives every message too, so that a log file is complete whatever the screen shows.
"""

import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedcommons.cli.parser import Options
from fedcommons.errors import UserError, Warned, sentence
from fedcommons.runtime.libraries import import_libraries
from fedcommons.storage.safe_read import UnreadableError, write_alone

WIDTH = 80
"""Maximum number of columns (characters) of a line."""

EVERY = 30.0
"""Seconds between two progress lines of a task if the output does not go to a terminal."""

REDRAW = 0.1
"""Minimum seconds between two updates of the live lines, as steps may be faster than a terminal."""

LOG = logging.getLogger("fedcommons")

_FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(message)s")


def log(text: str, level: int | None = None) -> None:
    """Send a message to the logger ``fedcommons``. level: None: WARNING for a text of type ``Warned``, else INFO."""
    LOG.log(level or (logging.WARNING if isinstance(text, Warned) else logging.INFO), "%s", text)


def duration(seconds: float) -> str:
    """Return a duration as text, rounded, in the largest unit in which it is at least 2: ``3.2 min``, ``14 h``."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}" if seconds < 10 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def remaining_text(number: int, total: int, first: int, seconds: float) -> str:
    """Return the remaining time as text, estimated from the pace since the step ``first``; empty if unknown.

    number, total: steps done, all steps. seconds: time since the step ``first``.
    """
    return f"{duration(seconds / (number - first) * (total - number))} left" if first < number < total else ""


@dataclass(frozen=True)
class _Row:
    """The progress of a task.

    text: text of the last step. number, total: steps done, all steps. first, first_time: number and time of the first
    recorded step. shown_at: time of the last printed line. Times are in seconds.
    """

    text: str
    number: int
    total: int
    first: int
    first_time: float
    shown_at: float


class _Console(Console):
    """A console that raises BrokenPipeError when its output has no reader; Rich would exit without a message."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("no process reads the output")


class LogFile(logging.FileHandler):
    """A handler that writes a log file. If writing fails, ``flaw`` is the reason, and later messages are not logged."""

    flaw = ""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(error := sys.exc_info()[1], OSError) or self.stream is None:
            return super().handleError(record)
        # Without the next line, closing the stream would write again and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        self.flaw = error.strerror or type(error).__name__


class _Messages(logging.Handler):
    """A handler that appends messages to a file. Messages are lost if the file cannot be written or is a link."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, UnreadableError):
            write_alone(self.path, self.format(record) + "\n")


class Display:
    """A context manager for screen output: ``say`` shows a message, ``step`` shows progress, ``drop`` ends a task.

    console: a Rich console; None creates one. quiet: show warnings only. to_stderr: write to stderr and leave stdout to
    machine-readable output. file: log handler that receives all messages until the context ends. clock: returns seconds
    since any fixed time.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, to_stderr: bool = False,
        file: logging.Handler | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.console = console or _Console(highlight=False, stderr=to_stderr)
        self.quiet, self._clock = quiet, clock
        self._files = [file] if file else []
        # A pipe must not receive control characters, even if the variable FORCE_COLOR is set.
        self.is_live = not quiet and self.console.is_interactive and self.console.file.isatty()
        self._rows: dict[str, _Row] = {}
        self._title, self._titled, self._last_redraw = "", -EVERY, -REDRAW
        self._live = Live(self._table(), console=self.console, transient=True, auto_refresh=False)

    @property
    def width(self) -> int:
        """Return the columns of a line: the terminal's width, else the variable COLUMNS; at most ``WIDTH``."""
        columns_text = os.environ.get("COLUMNS", "")
        columns = int(columns_text) if columns_text.isdecimal() else 0
        return min(WIDTH, (self.console.width if self.is_live else columns) or WIDTH)

    def load_libraries(self, *, with_wandb: bool = False) -> None:
        """Import torch and Lightning, which take seconds, and W&B if ``with_wandb``."""
        self.say("Loading torch and the data ...")
        import_libraries(with_wandb=with_wandb)

    def __enter__(self) -> "Display":
        self._before = LOG.level, LOG.propagate
        for file in self._files:
            self._attach(file)
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_live:
            self._live.stop()
        if error:
            LOG.error("%s", sentence(error))
        LOG.setLevel(self._before[0])
        LOG.propagate = self._before[1]
        for file in self._files:
            LOG.removeHandler(file)
            file.close()
            if flaw := getattr(file, "flaw", ""):
                self._print(Warned(f"the log file is incomplete: writing it failed ({flaw})."))

    def record(self, path: Path) -> None:
        """Also append all messages to the file ``path``, until the context ends."""
        file = _Messages(path)
        file.setFormatter(_FORMAT)
        self._files.append(file)
        self._attach(file)

    def _attach(self, file: logging.Handler) -> None:
        LOG.addHandler(file)
        LOG.propagate = False  # a library may let the root logger print, so messages would appear twice
        LOG.setLevel(min(file.level, LOG.getEffectiveLevel()))

    def say(self, text: str) -> None:
        """Show a message that stays on the screen, and log it."""
        log(text)
        self._print(text)

    def title(self, text: str) -> None:
        """Set the title above the progress lines; without a terminal, print it at most every ``EVERY`` seconds."""
        self._title, now = text, self._clock()
        self._refresh()
        if not self.is_live and now - self._titled >= EVERY:
            self._titled = now
            self.say(text)

    def step(self, name: str, number: int, total: int, text: str, *, ends: bool = True) -> None:
        """Record that the task ``name`` has done ``number`` of ``total`` steps; the last step removes the task.

        text: what the progress line says about the step. ends: without a terminal, print a line for the last step too.
        """
        now, before = self._clock(), self._rows.get(name)
        row = replace(before, number=number, text=text) if before else _Row(text, number, total, number, now, now)
        is_due = now - row.shown_at >= EVERY or (ends and number >= total)
        remaining = remaining_text(number, row.total, row.first, now - row.first_time)
        line = f"{name}: {number}/{total} {text}" + (f", {remaining}" if remaining else "")
        log(line, logging.INFO if is_due else logging.DEBUG)
        if is_due and not self.is_live:
            self._print(line)
        self._rows[name] = replace(row, shown_at=now) if is_due else row
        if number >= total:
            self.drop(name)
        else:
            self._refresh()

    def drop(self, name: str) -> None:
        """Remove the progress line of the task ``name``."""
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
            remaining = remaining_text(row.number, row.total, row.first, now - row.first_time)
            table.add_row(name, f"{row.number}/{row.total}", row.text, remaining)
        return table

    def _refresh(self) -> None:
        if self.is_live and (not self._rows or self._clock() - self._last_redraw >= REDRAW):
            self._last_redraw = self._clock()
            self._live.update(self._table(), refresh=True)


def create_display(options: Options, *, to_stderr: bool = False) -> Display:
    """Return the display for the options ``--quiet``, ``--log-file`` and ``--log-level``.

    to_stderr: see ``Display``.

    Raises:
        UserError: the log file cannot be written.
    """
    file, path = None, options.log_file
    if path is not None:
        try:
            file = LogFile(path, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--log-file: {path} cannot be written ({error.strerror}).") from error
        file.setFormatter(_FORMAT)
        # The first line is written at any log level, so that a full disk is detected before any work.
        file.emit(LOG.makeRecord(LOG.name, logging.INFO, "", 0, "command: %s", (shlex.join(sys.argv),), None))
        if file.flaw:
            raise UserError(f"--log-file: {path} cannot be written ({file.flaw}).")
        file.setLevel(options.log_level.upper())
    return Display(quiet=options.quiet, to_stderr=to_stderr, file=file)
