"""Generators that clients train on a part of their own data. ``config/parts.py`` lists them by name."""
