"""What is trained, as LightningModules; knows nothing of federation, Ray or W&B."""

from lightning_modules.classifier import Classifier

__all__ = ["Classifier"]
