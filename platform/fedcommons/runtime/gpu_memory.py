"""GPU memory: a second attempt after a lack of memory, a limit per process, and detection of a lost GPU.

After a failed assertion on the device or a wrong address, the GPU is lost: every further call of this process fails.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fedcommons.errors import message_of

CONTEXT = 600 * 2**20
"""Bytes per process on a GPU that torch's allocator does not count: CUDA's context and library code."""

T = TypeVar("T")


def is_full(error: BaseException | None) -> bool:
    """Return whether the error reports a lack of GPU memory, in torch or in a library that torch calls."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "STATUS_ALLOC_FAILED" in message_of(error):
            return True
        error = error.__cause__
    return False


def with_room(play: Callable[[], T]) -> T:
    """Call ``play``, a pure function, and return its result.

    If the GPU has too little memory, unused memory is freed, and ``play`` is called once more. The second call may
    succeed: other processes may have needed GPU memory briefly, and pieces of freed memory may have been too small.
    """
    try:
        return play()
    except Exception as error:
        if not is_full(error):
            raise
    gc.collect()  # after the except block, because the error refers to frames with tensors
    torch.cuda.empty_cache()
    return play()


def limit_memory(share: float) -> None:
    """Limit this process to its share of the GPU's memory, in (0, 1], so that other processes keep their shares."""
    if share < 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT / total))


def wait() -> None:
    """Wait until this process's GPU has finished all its work; errors of that work are raised here."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_lost() -> bool:
    """Return whether the GPU is lost: every further call of this process fails."""
    try:
        wait()
    except RuntimeError:
        return True
    return False
