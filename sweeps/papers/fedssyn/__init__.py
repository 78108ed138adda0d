"""Presets, studies and reports of the experiments of Fedssyn (Li et al. 2024, arXiv:2306.13263)."""
