"""Federated algorithms: one file each, both halves in it. ``config/parts.py`` lists them by name."""
