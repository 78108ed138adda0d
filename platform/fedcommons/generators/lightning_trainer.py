"""Training of DDPMs and central models by Lightning's Trainer, without screen output; Ctrl-C stops the program."""

import logging
import signal
import warnings
from collections.abc import Iterable
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from fedcommons.core.worker import default_device


def fit(module: LightningModule, batches: Iterable[Any], epochs: int, callbacks: list[Callback]) -> None:
    """Train ``module`` in this process for a number of ``epochs``; each epoch is one pass over ``batches``.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="gpu" if default_device().type == "cuda" else "cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # without this plugin, Lightning refuses to run inside a Slurm job
    )
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.utils._pytree")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning uses a name that torch deprecated
            trainer.fit(module, batches)
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        # Lightning handles Ctrl-C by ignoring SIGINT and raising SystemExit. Restore the handler and KeyboardInterrupt.
        signal.signal(signal.SIGINT, on_ctrl_c)
        raise KeyboardInterrupt from None
