"""Sharing strategies, one per file: clients share data before training. ``config/registry.py`` lists them by name."""
