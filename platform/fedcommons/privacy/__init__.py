"""Differential privacy: noise, DP-SGD, accountants, releases, the ledger and its statement."""
