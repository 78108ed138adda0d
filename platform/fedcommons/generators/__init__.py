"""Generators that clients train on a part of their own data. ``config/registry.py`` lists them by name."""
