"""Generators, which clients train on their own data. ``config/registry.py`` lists them by name."""
