"""The file ``error.txt`` of a run folder: why the run ended, and how to run the failing client again."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from fedcommons.errors import RUN, ClientError, clean, sentence
from fedcommons.storage.atomic_files import write_text
from fedcommons.storage.safe_read import UnreadableError, text_of


@contextmanager
def leaving_errors(folder: Path, own: Sequence[str] = ()) -> Iterator[None]:
    """Write an error to ``folder/error.txt``: its sentence and traceback, and how to run the client again.

    own: options that name the user's own parts in the run.
    """
    path = folder / "error.txt"
    path.unlink(missing_ok=True)  # of the attempt before
    try:
        yield
    except Exception as error:
        if isinstance(error, ClientError) and error.client is not None:
            options = [f"--replay {quote(str(folder))} --round {error.round} --client {error.client}", *own]
            error.add_note(f"To run this client alone again: {RUN} {' '.join(options)}")
        with suppress(OSError):  # a full disk must not hide what happened
            told = f"{sentence(error)}\n\n{traceback.format_exc()}"
            write_text(path, told.encode(errors="backslashreplace").decode())
        raise


def left_in(folder: Path) -> str | None:
    """The sentence in ``folder/error.txt``, and where its traceback is; None if there is no such file."""
    path = folder / "error.txt"
    try:
        found = text_of(path)
    except UnreadableError as error:
        return f"{error}"
    return None if found is None else f"{clean(found.partition(chr(10))[0])} (traceback: {path})"
