"""Differential privacy: noise, DP-SGD, accountants, records of released data, the privacy ledger and its statement."""
