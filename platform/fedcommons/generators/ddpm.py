"""A class-conditional DDPM trained by a Lightning Trainer (Ho et al. 2020; Fedssyn, algorithm I, line 3).

Departs from the paper: the moving average of the weights warms up, because with a client's few steps a fixed decay of
0.9995 would leave it dominated by the initial weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedcommons.config import experiment as config
from fedcommons.core.worker import default_device
from fedcommons.data.datasets import Examples
from fedcommons.generators.generator import Weights
from fedcommons.seeds import generator, seed_for, set_default_generator


@dataclass(frozen=True)
class DDPMGenerator:
    """``settings`` as in the experiment's section ``generator``; ``flip``: mirror images in training (CIFAR)."""

    settings: config.Generator
    flip: bool = False

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int]) -> Mapping[int, Weights]:
        """See ``Generator``; all images are one batch where there are fewer than ``batch_size``."""
        import pytorch_lightning as lightning

        from fedcommons.core import trainer

        set_default_generator(seed, "initial weights")
        model = self._model(tuple(examples.x.shape[1:]), n_classes, seed)
        loader = DataLoader(
            TensorDataset(examples.x, examples.y),
            batch_size=self.settings.batch_size,
            shuffle=True,
            generator=generator(seed, "order"),
        )
        kept: dict[int, Weights] = {}

        class Keep(lightning.Callback):
            def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
                if trainer.current_epoch + 1 in epochs:
                    kept[trainer.current_epoch + 1] = model.averaged()

        trainer.fit(model, loader, max(epochs), [Keep()])
        return kept

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """See ``Generator``."""
        model = self._model(shape, n_classes, seed)
        model.unet.load_state_dict(dict(weights))
        model.to(default_device())
        draws = seed_for(seed, "samples")
        return model.sample(labels, draws, sampler=self.settings.sampler, steps=self.settings.sampling_steps).cpu()

    def _model(self, shape: tuple[int, ...], n_classes: int, seed: int):
        from lightning_modules.ddpm import DDPM  # seconds to import, and most workers never need it

        s = self.settings
        return DDPM(
            shape=shape,
            n_classes=n_classes,
            channels=s.channels,
            lr=s.lr,
            timesteps=s.timesteps,
            schedule=s.schedule,
            ema_decay=s.ema_decay,
            flip=self.flip,
            seed=seed_for(seed, "noise"),
        )
