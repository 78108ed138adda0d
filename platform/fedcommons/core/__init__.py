"""Code that methods and the engine share: interfaces, local training and evaluation."""
