"""Training with Lightning's Trainer, for generators and central models: silent, and Ctrl-C stops it."""

import logging
import signal
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from fedcommons.core.worker import default_device


def fit(module: LightningModule, batches: Iterable[Any], epochs: int, callbacks: Sequence[Callback]) -> None:
    """Train ``module`` in this process, each epoch one pass over ``batches``.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="gpu" if default_device().type == "cuda" else "cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # inside a Slurm job Lightning would otherwise refuse to run
    )
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.utils._pytree")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning asks torch for what it has renamed
            trainer.fit(module, batches)
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, on_ctrl_c)  # Lightning ignores it and exits with code 1
        raise KeyboardInterrupt from None
