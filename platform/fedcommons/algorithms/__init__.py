"""Federated algorithms: one file each, with its client and its server part. ``config/parts.py`` lists them by name."""
