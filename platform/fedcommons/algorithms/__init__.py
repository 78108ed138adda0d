"""Federated algorithms: one file each, with its client and server parts; ``config/registry.py`` lists their names."""
