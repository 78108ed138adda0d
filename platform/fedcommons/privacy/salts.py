"""Secret salts of noise: 32 random bytes, without which the noise of differential privacy cannot be computed again.

Each run and each stored set of synthetic images (artifact) has a salt, in a file that only the user can read. The files
are in the user's state directory: FEDCOMMONS_STATE, XDG_STATE_HOME/fedcommons or ~/.local/state/fedcommons. Run
folders, stores, logs and trackers contain only the name of a salt, which is a hash of the salt.
"""

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcommons.errors import UserError

SEEDED, SECRET = "seeded", "secret"
"""Values of the option ``dp.noise``: noise from the seed (reproducible), or from a secret salt (private)."""

IF_SECRET = "_if_secret"
"""Suffix of the name of an epsilon in a run with seeded noise: the epsilon would hold if the noise were secret."""

SIZE = 32


def folder() -> Path:
    """Return the folder of salts, which may not exist yet.

    Raises:
        UserError: the path is relative. The processes of a sweep have other working folders and would not find it.
    """
    base = os.environ.get("XDG_STATE_HOME")
    home = base if base and os.path.isabs(base) else os.path.expanduser("~/.local/state")
    configured = os.environ.get("FEDCOMMONS_STATE")
    state = Path(os.path.expanduser(configured) if configured else os.path.join(home, "fedcommons"))
    if not state.is_absolute():
        raise UserError(f"dp.noise secret keeps its salt in {state}; FEDCOMMONS_STATE must be an absolute path.")
    return state / "salts"


def name_of(salt: bytes) -> str:
    """Return the public name of a salt: the first 96 bits of a hash of the salt, as 24 hexadecimal digits."""
    return hashlib.blake2b(salt, digest_size=12, person=b"salt's name").hexdigest()


def new() -> bytes:
    """Create a salt for a run, and store it under its name.

    Raises:
        UserError: the salt cannot be stored.
    """
    salt = secrets.token_bytes(SIZE)
    return _keep(f"run-{name_of(salt)}", salt)


def of_artifact(key: str) -> bytes:
    """Return the stored salt of the set of synthetic images with this key; if there is none, store a new salt.

    Raises:
        UserError: the stored salt cannot be read, or the new salt cannot be stored.
    """
    path = folder() / f"artifact-{key}"
    return _read(path) if os.path.lexists(path) else _keep(path.name, secrets.token_bytes(SIZE))


def of_run(name: str, run: Path) -> bytes:
    """Return the salt named ``name``, with which the run in the folder ``run`` began.

    Raises:
        UserError: the salt is missing, has another name, or belongs to another user. With a new salt the run would
            release the data a second time, but the stated epsilon counts one release.
    """
    path = folder() / f"run-{name}"
    flaw = f"{path} is not there"
    if os.path.lexists(path):
        salt = _read(path)
        if name_of(salt) == name:
            return salt
        flaw = f"{path} contains another salt"
    raise UserError(
        f"the noise of {run} is secret, and its salt is lost: {flaw}. Only the user and the machine that began the run "
        "can continue it (or FEDCOMMONS_STATE names the wrong folder). With new noise the run would release the "
        "same data twice, so start a new run."
    )


def require_writable(store: Path) -> None:
    """Check before training that salts can be stored, and create the folder of salts.

    Raises:
        UserError: salts cannot be stored, or the folder of salts is in ``store``, the folder of synthetic images.
    """
    require_outside(store)
    with _writable_folder() as where, tempfile.TemporaryFile(dir=where):
        pass


def require_outside(place: Path) -> None:
    """Check that the folder of salts is not in ``place``, a folder of results that other users may read.

    Raises:
        UserError: the folder of salts is in ``place``.
    """
    where = folder()
    if where.resolve().is_relative_to(place.resolve()):
        raise UserError(
            f"dp.noise secret keeps its salt in {where}, which must not be in {place}, as other users may read it; "
            "name another folder in FEDCOMMONS_STATE."
        )


@contextmanager
def _writable_folder() -> Iterator[Path]:
    """Create the folder of salts and yield it. An ``OSError`` of the code in this context becomes a ``UserError``."""
    where = folder()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield where
    except OSError as error:
        raise UserError(
            f"dp.noise secret keeps its salt in {where}, which cannot be written ({error.strerror}); name another "
            "folder in FEDCOMMONS_STATE."
        ) from None


def _keep(name: str, salt: bytes) -> bytes:
    """Store the salt under ``name`` and return it. If another process stored a salt first, return that salt."""
    # The temporary file has mode 0600 and is removed at the end.
    with _writable_folder() as where, tempfile.NamedTemporaryFile(dir=where, prefix=f".{name}.") as file:
        file.write(salt)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(file.name, where / name)
        except FileExistsError:
            return _read(where / name)
    return salt


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # never waits for a named pipe
        with os.fdopen(descriptor, "rb") as file:
            status, salt = os.fstat(descriptor), file.read(SIZE + 1)
    except OSError as error:
        raise UserError(f"the secret salt {path} cannot be read ({error.strerror}).") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or len(salt) != SIZE:
        raise UserError(
            f"the secret salt {path} must be a file of {SIZE} bytes that only you can read (mode 0600), but it is not."
        )
    return salt
