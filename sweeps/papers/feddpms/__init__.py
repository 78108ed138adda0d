"""Presets and report of the experiments of FedDPMS (Chen and Vikalo, arXiv:2206.00686)."""
