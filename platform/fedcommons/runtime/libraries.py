"""The import of large libraries in the way that takes the least processor time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedcommons.runtime import tempdirs


@contextmanager
def collection_off() -> Iterator[None]:
    """Context for imports: no garbage collection, as each collection visits the objects of all imported modules.

    At the end, the objects are moved to the oldest generation without a visit, unless the caller has frozen objects.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


@collection_off()
def import_libraries(*, with_wandb: bool = False) -> None:
    """Import Lightning, with torch; before them import W&B if ``with_wandb``.

    W&B comes first, because its import searches all imported modules for the source code of its classes. After the
    import of Lightning's 3,500 modules, this search would take longer than the rest of W&B's import.
    """
    if with_wandb:
        with suppress(Exception), tempdirs.tempdir():  # the tracker imports W&B again, and reports the error
            import wandb.apis.public  # noqa: F401  (wandb.init needs its classes)
    import pytorch_lightning  # noqa: F401
