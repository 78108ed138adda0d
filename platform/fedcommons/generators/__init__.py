"""Generators that clients train on a part of their own data."""
