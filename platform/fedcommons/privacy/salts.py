"""Secret salts of noise: 32 bytes from the system, one a run and one an artifact, each a file that only its user reads.

They stand in the user's state directory, FEDCOMMONS_STATE or XDG_STATE_HOME/fedcommons or ~/.local/state/fedcommons,
never in a run folder, store, log or tracker. There only a salt's name is told, its hash.
"""

import hashlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from fedcommons.errors import UserError

SEEDED, SECRET = "seeded", "secret"
"""Values of ``dp.noise``."""

IF_SECRET = "_if_secret"
"""The end of the name of an epsilon that was not earned, as the noise is seeded."""

SIZE = 32


def folder() -> Path:
    """The state directory, which may not exist yet.

    Raises:
        UserError: it depends on the working folder, which is another one in the processes of a sweep.
    """
    base = os.environ.get("XDG_STATE_HOME")
    home = base if base and os.path.isabs(base) else os.path.expanduser("~/.local/state")
    own = os.environ.get("FEDCOMMONS_STATE")
    state = Path(os.path.expanduser(own) if own else os.path.join(home, "fedcommons"))
    if not state.is_absolute():
        raise UserError(f"dp.noise secret keeps its salt in {state}; FEDCOMMONS_STATE must be an absolute path.")
    return state / "salts"


def name_of(salt: bytes) -> str:
    """What may be told of a salt: 96 bits of its hash."""
    return hashlib.blake2b(salt, digest_size=12, person=b"salt's name").hexdigest()


def new() -> bytes:
    """A salt for a run, kept under its name.

    Raises:
        UserError: it cannot be kept.
    """
    salt = secrets.token_bytes(SIZE)
    return _keep(f"run-{name_of(salt)}", salt)


def of_artifact(key: str) -> bytes:
    """The salt of the artifact with this key: the one that this user has kept, else a new one.

    Raises:
        UserError: it can be neither read nor kept.
    """
    path = folder() / f"artifact-{key}"
    return _read(path) if os.path.lexists(path) else _keep(path.name, secrets.token_bytes(SIZE))


def of_run(name: str, run: Path) -> bytes:
    """The salt of this name, which the run in the folder ``run`` began with.

    Raises:
        UserError: it is lost, another one, or another user's. Drawing it anew would release twice at one epsilon.
    """
    path = folder() / f"run-{name}"
    why = f"{path} is not there"
    if os.path.lexists(path):
        salt = _read(path)
        if name_of(salt) == name:
            return salt
        why = f"{path} holds another one"
    raise UserError(
        f"the noise of {run} is secret, and its salt is lost: {why}. Only the user and the machine that began the run "
        "can go on (or FEDCOMMONS_STATE names the wrong folder); with new noise it would release twice, so start anew."
    )


def require_writable(store: Path) -> None:
    """Check that salts can be kept, before any work; the folder is made.

    Raises:
        UserError: they cannot, or would stand in the ``store`` of artifacts.
    """
    require_outside(store)
    where = folder()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        raise _not_writable(where, error) from None


def require_outside(place: Path) -> None:
    """Check that salts do not stand in a run folder or store of artifacts, which others may read.

    Raises:
        UserError: they would.
    """
    where = folder()
    if where.resolve().is_relative_to(place.resolve()):
        raise UserError(
            f"dp.noise secret keeps its salt in {where}, which must not be in {place}, as others may read that; name "
            "another folder in FEDCOMMONS_STATE."
        )


def _not_writable(where: Path, error: OSError) -> UserError:
    return UserError(
        f"dp.noise secret keeps its salt in {where}, which cannot be written ({error.strerror}); name another "
        "folder in FEDCOMMONS_STATE."
    )


def _keep(name: str, salt: bytes) -> bytes:
    """Write the salt, whole or not at all; of two processes the first one's stands."""
    where = folder()
    path, temporary = where / name, where / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(salt)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        finally:
            temporary.unlink()
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise _not_writable(where, error) from None
    return salt


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
        with os.fdopen(descriptor, "rb") as file:
            status, salt = os.fstat(descriptor), file.read(SIZE + 1)
    except OSError as error:
        raise UserError(f"the secret salt {path} cannot be read ({error.strerror}).") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or len(salt) != SIZE:
        raise UserError(
            f"the secret salt {path} must be a file of {SIZE} bytes that only you can read (mode 0600), and is not."
        )
    return salt
