"""The file ``error.txt`` of a run folder: the error that ended the run, and the command to rerun the failing client."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from fedcommons.errors import RUN, ClientError, DivergenceError, clean, sentence
from fedcommons.storage.atomic_files import write_text
from fedcommons.storage.safe_read import UnreadableError, text_of


@contextmanager
def leaving_errors(folder: Path, expected: Sequence[str] = ()) -> Iterator[None]:
    """Write an error of the ``with`` block to ``folder/error.txt`` and raise it again.

    The file contains the error as one sentence, the traceback, and the command that reruns the failing client.
    expected: options of this command that name the run's user-defined components.
    """
    path = folder / "error.txt"
    path.unlink(missing_ok=True)  # an error of an earlier attempt is outdated
    try:
        yield
    except Exception as error:
        if isinstance(error, ClientError) and error.client is not None:
            options = [f"--replay {quote(str(folder))} --round {error.round} --client {error.client}", *expected]
            error.add_note(f"To run only this client again: {RUN} {' '.join(options)}")
        with suppress(OSError):  # a full disk must not hide the error
            content = f"{sentence(error)}\n\n{traceback.format_exc()}"
            write_text(path, content.encode(errors="backslashreplace").decode())
        raise


def read_error(folder: Path) -> str | None:
    """Return the error sentence in ``folder/error.txt``, with the file's path; None if there is no such file."""
    path = folder / "error.txt"
    try:
        content = text_of(path)
    except UnreadableError as error:
        return f"{error}"
    return None if content is None else f"{clean(content.partition(chr(10))[0])} (traceback: {path})"


def has_diverged(folder: Path) -> bool:
    """Return whether the traceback in ``folder/error.txt`` is that of a ``DivergenceError``."""
    name = f"{DivergenceError.__module__}.{DivergenceError.__qualname__}: "
    try:
        return any(line.startswith(name) for line in (text_of(folder / "error.txt") or "").splitlines())
    except UnreadableError:
        return False
