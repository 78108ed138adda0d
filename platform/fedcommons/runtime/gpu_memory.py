"""A GPU's memory: one more try where none is left, a bound for each of several processes, and a GPU that is lost.

After a failed assertion on the device, or a wrong address, a GPU serves this process no more, whatever is asked of it.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fedcommons.errors import message_of

CONTEXT = 600 * 2**20
"""Bytes of a process on a GPU that torch's allocator does not count: CUDA's context and the code of its libraries."""

T = TypeVar("T")


def is_full(error: BaseException | None) -> bool:
    """Whether the GPU had no memory left: for torch, or for a library that torch calls."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "STATUS_ALLOC_FAILED" in message_of(error):
            return True
        error = error.__cause__
    return False


def with_room(play: Callable[[], T]) -> T:
    """The result of ``play``, a pure function.

    If the GPU has no memory left for it, all that can be freed is, and it is played once more: other processes on the
    GPU may have needed it for a moment, and pieces of freed memory may have been too small.
    """
    try:
        return play()
    except Exception as error:
        if not is_full(error):
            raise
    gc.collect()  # now that the error and the frames that it holds are gone
    torch.cuda.empty_cache()
    return play()


def bound(share: float) -> None:
    """Let this process use at most its share of the GPU, in (0, 1], so that it takes no other's memory."""
    if share < 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT / total))


def wait() -> None:
    """Wait until this process's GPU, if it uses one, has done all that was asked: what failed there is raised here."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_lost() -> bool:
    """Whether the GPU serves this process no more."""
    try:
        wait()
    except RuntimeError:
        return True
    return False
