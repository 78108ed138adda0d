"""Listeners of a run: the run folder, always; Weights & Biases, beside it."""
