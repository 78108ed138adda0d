"""torchvision's pretrained weights by name (``torchvision:ResNet18_Weights.DEFAULT``), in torch's cache of the hub."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from fedcommons.errors import UserError


def names() -> list[str]:
    """Return the names of the weights of all classifiers, such as ``ResNet18_Weights.IMAGENET1K_V1``."""
    from torchvision import models

    enums = {models.get_model_weights(name) for name in models.list_models(module=models)}
    return sorted(f"{enum.__name__}.{leaf}" for enum in enums for leaf in enum.__members__)


def component(name: str) -> Callable[[], Path]:
    """Return the function that returns the file of the weights ``name``, which is downloaded if the cache lacks it."""
    from torch import hub
    from torchvision import models

    def file() -> Path:
        url = models.get_weight(name).url
        path = Path(hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)
        try:
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rpartition("-")[2])
        except (OSError, RuntimeError) as error:  # RuntimeError: the content has another hash
            reason = " ".join(str(error).split())
            raise UserError(
                f"model.weights torchvision:{name} is not {path} and cannot be downloaded from {url} ({reason})."
            ) from error
        return path

    return file
