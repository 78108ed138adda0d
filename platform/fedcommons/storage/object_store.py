"""The object store: an S3 bucket or a folder for a second copy of runs and artifacts, with conditional writes.

A conditional write replaces an object only if no other writer has changed it since the caller read it; otherwise it
raises ``ChangedError``. The tag of an object names its version: ``write`` returns the new tag, and a later conditional
write passes the tag of the version to replace.
"""

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError, clean, quote
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import sha256, write_bytes

ATTEMPTS = 5
"""Maximum attempts per request, with growing waits of up to 20 s in total (botocore's retry mode ``standard``)."""

NEW = ""
"""The tag of an object that does not exist yet."""

NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_=+][A-Za-z0-9._=+-]*)*)/?")


class StorageError(ValueError):
    """A request to the storage failed; the message is one sentence without its full stop."""


class ChangedError(StorageError):
    """A conditional write failed, because another writer has changed the object since the caller last read it."""


def is_url(place: str) -> bool:
    """Return whether ``place`` is a URL, such as ``s3://BUCKET``, and not a folder. The URL may be malformed."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]*:", place) is not None


def flaw(place: str) -> str | None:
    """Return what ``place`` must be, as the end of an error sentence; None if ``place`` may be a storage.

    The text does not repeat parts of ``place`` that may contain a password.
    """
    if not is_url(place):
        return None
    if "@" in place or "?" in place:
        return (
            "a URL without user, password and options: credentials are read where AWS's tools read them, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    scheme = place.partition(":")[0][:20]
    if not place.startswith("s3://"):
        return f"s3://BUCKET/PREFIX or a folder, got '{scheme}:'; did you mean 's3://'?"
    return None if S3.fullmatch(place) else "s3://BUCKET/PREFIX, with letters, digits and . _ - = + in its names."


def require(storage: str | None, name: str | None) -> None:
    """Check the fields ``storage`` and ``storage_name`` of an experiment.

    Raises:
        UserError: a field is invalid, or there is a name without a storage.
    """
    for field, value in (("storage", storage), ("storage_name", name)):
        if not isinstance(value, str | None):
            raise UserError(f"{field} takes str or NoneType, got {quote(value)}.")
    if storage is not None and (what := flaw(storage)):
        raise UserError(f"storage must be {what}")
    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"storage_name must be at most 100 letters, digits and . _ -, got {quote(name)}.")
    if name is not None and storage is None:
        raise UserError(
            f"storage_name {name} changes nothing without --storage s3://BUCKET/PREFIX or --storage FOLDER."
        )


def open_store(place: str) -> "Bucket | Disk":
    """Return the storage ``place``, after a test that it is writable and supports conditional writes.

    The ``name`` of a storage is normalised: an absolute path for a folder, a URL without a slash at the end.

    Raises:
        StorageError: the storage cannot be reached or written, does not exist or ignores conditions, or a package for
            S3 is missing.
    """
    if is_url(place):
        return _opened(place.rstrip("/"), os.getpid())
    if (path := Path(place)).is_symlink() and not path.exists():  # for example, a disk that is not mounted
        raise StorageError(f"{place} is a link to {os.readlink(path)}, which does not exist")
    return _opened(str(path.resolve()), os.getpid())


@cache
def _opened(place: str, process: int) -> "Bucket | Disk":
    """Open a storage, cached per ``process`` (its id), because the thread of s3fs does not survive a fork."""
    if what := flaw(place):
        raise StorageError(f"it must be {what[:-1]}")
    if is_url(place) and find_spec("s3fs") is None:
        raise StorageError("s3:// needs a package: pip install 'fedcommons[s3]'")
    storage = Bucket(place) if is_url(place) else Disk(place)
    for tag in (NEW, "0" * 32):  # a new storage accepts NEW; no storage may accept the wrong tag 00...0
        try:
            storage.write("fedcommons.json", b'{"storage": 1}\n', tag)
        except ChangedError:
            continue
        if tag != NEW:
            raise StorageError(f"{place} ignores the conditions of a write, so two writers would not see each other")
    return storage


class Bucket:
    """A storage in S3: objects under ``s3://BUCKET/PREFIX``, with the endpoint and credentials that AWS's tools use."""

    def __init__(self, url: str) -> None:
        import fsspec  # imported late, as it takes a second and most runs do not need it
        from botocore.handlers import add_expect_header

        self.name = url
        self._at = self.name.removeprefix("s3://")
        config: dict[str, Any] = {"connect_timeout": 10, "read_timeout": 60}
        if "AWS_MAX_ATTEMPTS" not in os.environ:
            config["retries"] = {"mode": "standard", "total_max_attempts": ATTEMPTS}
        self._fs: Any = fsspec.filesystem(
            "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=config
        )
        self._fs.retries = 2  # s3fs also retries if a connection breaks while an object is read
        with self._request():  # without ``Expect: 100-continue``, which a server of HTTP/1.0 never answers
            self._fs.connect().meta.events.unregister("before-call.s3", add_expect_header)

    def look(self, key: str) -> tuple[int, str] | None:
        """Return the size in bytes and the tag of an object; None if the object does not exist."""
        with self._request():
            try:
                info = self._fs.info(f"{self._at}/{key}", refresh=True)
            except FileNotFoundError:
                return None
        return (info["size"], info["ETag"]) if info["type"] == "file" else None

    def read(self, key: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object; None if the object does not exist."""
        with self._request():
            try:
                return self._fs.cat_file(f"{self._at}/{key}", start=0, end=most)
            except FileNotFoundError:
                return None
            except OSError as error:
                if _code(error) == "InvalidRange":  # S3 raises this error when an empty object is read
                    return b""
                raise

    def write(self, key: str, content: bytes, tag: str | None = None) -> str:
        """Write an object atomically and return its new tag.

        tag: tag of the version to replace. ``NEW``: the object must not exist. None: write unconditionally, and return
        ``NEW``.

        Raises:
            ChangedError: the object now has another tag.
        """
        with self._request():
            if tag is None:
                self._fs.pipe_file(f"{self._at}/{key}", content)
                return NEW
            bucket, _, path = f"{self._at}/{key}".partition("/")
            condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
            try:
                return self._fs.call_s3("put_object", Bucket=bucket, Key=path, Body=content, **condition)["ETag"]
            except OSError as error:
                if _code(error) in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"):
                    raise ChangedError(f"{self.name}/{key} was written by another process meanwhile") from None
                raise

    def remove(self, key: str) -> None:
        """Remove an object if it exists."""
        with self._request():
            self._fs.rm_file(f"{self._at}/{key}")

    def tags(self, folder: str, file: str) -> dict[str, str]:
        """Return NAME -> tag of all objects ``folder/NAME/file``, by one listing (a request per 1,000 objects)."""
        start, end = f"{self._at}/{folder}/", f"/{file}"
        with self._request():
            objects = self._fs.find(start, detail=True, refresh=True)
        names = {key.removeprefix(start).removesuffix(end): key for key in objects if key.endswith(end)}
        return {name: objects[key]["ETag"] for name, key in names.items()}

    def list_objects(self) -> Iterator[tuple[str, int, float]]:
        """Yield (key, size in bytes, age in seconds) of each object."""
        with self._request():
            objects = self._fs.find(self._at, detail=True, refresh=True)
        for name, facts in objects.items():
            if facts["type"] == "file":
                yield name.removeprefix(f"{self._at}/"), facts["size"], time.time() - facts["LastModified"].timestamp()

    @contextmanager
    def _request(self) -> Iterator[None]:
        try:
            yield
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # errors of s3fs, botocore, aiohttp and asyncio have no common base
            raise StorageError(f"{self.name}: {_reason(error)}") from None


def _code(error: BaseException) -> str:
    """Return S3's error code, or the HTTP status if S3 sent no code; an empty text if the error has neither."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _reason(error: Exception) -> str:
    """Return the reason of an error as a part of a sentence, without a URL's user name and password."""
    code, kind = _code(error), type(error).__name__
    if code == "NoSuchBucket":
        return "there is no such bucket"
    if code in ("SlowDown", "ServiceUnavailable", "503"):
        return f"it is too busy ({code}), also after several tries with growing waits"
    if isinstance(error, PermissionError):
        return f"access was denied ({code or kind})"
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        return "credentials are missing: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    text = re.sub(r"//[^/\s]*@", "//", " ".join(str(error).split()))
    return clean(f"{text[:150] or kind} ({code or kind})")


class Disk:
    """A storage in a folder, with the interface of ``Bucket``. The tag of an object is the hash of its content."""

    def __init__(self, folder: str) -> None:
        self.name = folder

    def look(self, key: str) -> tuple[int, str] | None:
        """Return the size in bytes and the tag of an object; None without an object ``key``."""
        content = self.read(key, safe_read.LARGEST_JSON + 1)
        return None if content is None else (len(content), sha256(content))

    def read(self, key: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object; None without an object ``key``."""
        with _disk_errors(), safe_read.open_file(Path(self.name) / key, float("inf"), inner=2) as file:
            return None if file is None else file.read(most)

    def write(self, key: str, content: bytes, tag: str | None = None) -> str:
        """Write an object atomically and return its new tag (see ``Bucket.write``)."""
        path = Path(self.name) / key
        with _disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            with nullcontext() if tag is None else _alone(path.parent):
                if tag is not None and tag != (now[1] if (now := self.look(key)) else NEW):
                    raise ChangedError(f"{path} was written by another process meanwhile")
                write_bytes(path, content)
        return sha256(content)

    def tags(self, folder: str, file: str) -> dict[str, str]:
        """Return NAME -> tag of all objects ``folder/NAME/file``."""
        tags = dict[str, str]()
        for name in (path.parent.name for path in (Path(self.name) / folder).glob(f"*/{file}")):
            try:
                if entry := self.look(f"{folder}/{name}/{file}"):
                    tags[name] = entry[1]
            except StorageError as error:  # matters to a caller that reads this object only
                tags[name] = f"damaged: {error}"
        return tags

    def list_objects(self) -> Iterator[tuple[str, int, float]]:
        """Yield (key, size in bytes, age in seconds) of each object. Symbolic links are not followed."""
        for folder, _, names in os.walk(self.name, onerror=_raise):
            for name in names:
                with suppress(FileNotFoundError):  # another process has renamed or removed the file
                    facts = os.lstat(path := Path(folder) / name)
                    if stat.S_ISREG(facts.st_mode):
                        yield path.relative_to(self.name).as_posix(), facts.st_size, time.time() - facts.st_mtime

    def remove(self, key: str) -> None:
        """Remove an object if it exists."""
        with _disk_errors():
            (Path(self.name) / key).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other writers during the ``with`` block; the lock ends with the process."""
    with open(folder / ".writing", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn errors of files into a ``StorageError``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{error.filename or 'its folder'} cannot be used ({error.strerror})") from None
    except safe_read.UnreadableError as error:
        raise StorageError(f"{error}") from None


def _raise(error: OSError) -> None:
    with _disk_errors():
        raise error
