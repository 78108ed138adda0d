"""torchvision's pretrained weights by name (``torchvision:ResNet18_Weights.DEFAULT``), in the cache of torch.hub."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from fedcommons.errors import UserError


def names() -> list[str]:
    """Return the names of the weights of all classifiers, such as ``ResNet18_Weights.IMAGENET1K_V1``."""
    from torchvision import models

    enums = {models.get_model_weights(name) for name in models.list_models(module=models)}
    return sorted(f"{enum.__name__}.{leaf}" for enum in enums for leaf in enum.__members__)


def component(name: str) -> Callable[[bool], Path]:
    """Return a function that returns the file of the weights ``name``; with True, it downloads a missing file."""
    from torch import hub
    from torchvision import models

    def file(may_download: bool) -> Path:
        url = models.get_weight(name).url
        path = Path(hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)
        lacks = f"model.weights torchvision:{name}: this machine lacks {path}"
        if path.is_file():
            return path
        if not may_download:
            raise UserError(f"{lacks}; --download fetches it from {url}.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rpartition("-")[2])
        except (OSError, RuntimeError) as error:  # RuntimeError: the content has another hash
            reason = " ".join(str(error).split())
            raise UserError(f"{lacks}, which cannot be downloaded from {url} ({reason}).") from error
        return path

    return file
