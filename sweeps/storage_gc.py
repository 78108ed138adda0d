"""List files that killed writers left behind in a storage or a folder of artifacts; --remove removes these files.

python sweeps/storage_gc.py s3://BUCKET/PREFIX
python sweeps/storage_gc.py /shared/storage --remove
python sweeps/storage_gc.py runs/artifacts --remove
"""

from collections.abc import Sequence
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.errors import ClientError, UserError
from fedcommons.storage import garbage, object_store
from fedcommons.storage.paths import user_path


def storage_gc(argv: Sequence[str]) -> int:
    named = [word for word in argv[:1] if not word.startswith("-")]
    parser = parse.Parser(description=__doc__, usage="storage_gc.py STORAGE [options]")
    parser.add_argument("--remove", action="store_true", help="remove what is listed")
    options = parse.parse(parser, argv[len(named) :])
    if not named:
        raise UserError("name a storage, s3://BUCKET/PREFIX or a folder: storage_gc.py STORAGE [--remove].")
    if object_store.is_url(named[0]):
        if flaw := object_store.flaw(named[0]):
            raise UserError(f"STORAGE must be {flaw}")
    elif not (folder := user_path("STORAGE", named[0])).is_dir():
        raise UserError(f"{folder} is not a folder.")
    try:
        storage = (
            object_store.open_store(named[0])
            if object_store.is_url(named[0])
            else object_store.Disk(str(Path(folder).resolve()))
        )
        files = list(garbage.find(storage))
    except object_store.StorageError as error:
        raise UserError(f"STORAGE: {error}.") from None
    for file in files:
        try:
            if options.remove:
                storage.remove(file.key)
        except object_store.StorageError as error:
            raise ClientError(f"not all was removed: {error}.") from None
        print(f"{'removed ' if options.remove else ''}{file.key}  {file.size:,} bytes, {file.age / 3600:.0f} hours old")
    size, what = (
        f"{sum(file.size for file in files):,}",
        "were removed" if options.remove else "can be removed (--remove)",
    )
    print(f"{len(files)} files of {size} bytes in {named[0]} {what}; what is newer than a day is never listed.")
    return 0


if __name__ == "__main__":
    parse.main(storage_gc, resumes=False)
