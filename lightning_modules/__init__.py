"""Models as LightningModules; this package does not depend on the federated engine, Ray or W&B."""

from lightning_modules.classifier import Classifier
from lightning_modules.regressor import Regressor
from lightning_modules.vae import VAEClassifier, vae

__all__ = ["Classifier", "Regressor", "VAEClassifier", "vae"]
