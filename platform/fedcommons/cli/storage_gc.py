"""List files that killed writers left behind in a storage or a folder of artifacts; --remove removes these files.

fedcommons gc s3://BUCKET/PREFIX
fedcommons gc /shared/storage --remove
fedcommons gc runs/artifacts --remove

Listed are temporary files, and stored objects that no snapshot (copy of a run folder) names, if they are older than a
day. --remove never removes a file of a run, of an artifact or of a process that still writes.
"""

from collections.abc import Sequence

from fedcommons.cli import parse
from fedcommons.errors import ClientError, UserError
from fedcommons.storage import garbage, object_store
from fedcommons.storage.paths import user_path


def storage_gc(argv: Sequence[str]) -> int:
    """List files that killed writers left behind in a storage or a folder of artifacts; ``--remove`` removes them."""
    parser = parse.Parser(description=__doc__, usage="fedcommons gc STORAGE [options]")
    parser.add_argument("--remove", action="store_true", help="remove what is listed")
    options = parse.parse(parser, argv)
    if len(options.words) != 1:
        raise UserError("name a storage (s3://BUCKET/PREFIX or a folder): fedcommons gc STORAGE [--remove].")
    (name,) = options.words
    is_url = object_store.is_url(name)
    if is_url and (flaw := object_store.flaw(name)):
        raise UserError(f"STORAGE must be {flaw}")
    if not is_url and not (folder := user_path("STORAGE", name)).is_dir():
        raise UserError(f"{folder} is not a folder.")
    try:
        storage = object_store.open_store(name) if is_url else object_store.Disk(str(folder.resolve()))
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
    size = sum(file.size for file in files)
    what = "were removed" if options.remove else "can be removed (--remove)"
    print(f"{len(files)} files of {size:,} bytes in {name} {what}; files newer than a day are never listed.")
    return 0
