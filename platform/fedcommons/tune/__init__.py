"""Sweeps: run many experiments at the same time with Ray Tune."""
