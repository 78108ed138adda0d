"""A process whose torch says that it has a GPU, where there is none."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fedcommons.core import torch_settings


@contextmanager
def said_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Inside, torch says that there is an old GPU, and the yielded object can change more of torch; then as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        torch_settings.has_gpu.cache_clear()
        try:
            yield patch
        finally:
            torch_settings.has_gpu.cache_clear()
