"""The regressor that clients train where labels are floats; the same module trains under a plain Lightning Trainer."""

from torch import Tensor

from lightning_modules.classifier import Predictor


class Regressor(Predictor):
    """A ``Predictor`` with mean squared error, which is the only evaluation metric (``loss``).

        loss = mean over the batch of  w ||f(x) - y||^2 / k

    y: targets, (B,) or (B, k) float. f(x): predictions, (B, k). w: example weights, 1 if the batch has none.
    """

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) squared error of the batch."""
        x, y, *weight = batch
        errors = (self(x) - y.view(len(y), -1)).square().mean(1)
        return (weight[0] * errors if weight else errors).mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) squared error of the batch."""
        return self.training_step(batch, batch_idx)
