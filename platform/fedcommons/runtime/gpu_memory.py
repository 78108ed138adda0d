"""GPU memory: a second attempt after an out-of-memory error, a limit per process, and detection of a lost GPU.

A GPU is lost for a process after a failed assertion or an invalid address on the GPU: every further GPU call fails.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fedcommons.errors import message_of

CONTEXT = 600 * 2**20
"""GPU memory in bytes that a process uses outside of torch's allocator: the CUDA context and code of libraries."""

T = TypeVar("T")


def is_full(error: BaseException | None) -> bool:
    """Return whether the error, or an error that caused it, is an out-of-memory error of torch or a CUDA library."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "STATUS_ALLOC_FAILED" in message_of(error):
            return True
        error = error.__cause__
    return False


def with_room(play: Callable[[], T]) -> T:
    """Call ``play``, a pure function, and return the result. After an out-of-memory error, call it a second time.

    Unused GPU memory is freed before the second call. The second call may succeed, because other processes may have
    needed memory only briefly, or because free memory was fragmented.
    """
    try:
        return play()
    except Exception as error:
        if not is_full(error):
            raise
    gc.collect()  # inside the except block, the error would keep tensors alive
    torch.cuda.empty_cache()
    return play()


def limit_memory(share: float) -> None:
    """Limit this process to ``share``, in (0, 1], of the GPU's memory, so that other processes get their shares."""
    if share < 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0.0, share - CONTEXT / total))


def wait() -> None:
    """Wait until the GPU has finished all work of this process. Errors of this work are raised here."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_lost() -> bool:
    """Return whether the GPU is lost for this process, that is, every further GPU call fails."""
    try:
        wait()
    except RuntimeError:
        return True
    return False
