"""What is trained, as LightningModules; knows nothing of federation, Ray or W&B."""

from lightning_modules.classifier import Classifier
from lightning_modules.regressor import Regressor
from lightning_modules.vae import VAEClassifier, vae

__all__ = ["Classifier", "Regressor", "VAEClassifier", "vae"]
