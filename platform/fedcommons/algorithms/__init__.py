"""Federated algorithms, one file each, with client and server code; ``config/registry.py`` lists their names."""
