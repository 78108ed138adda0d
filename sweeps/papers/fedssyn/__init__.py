"""Fedssyn: Li et al. 2024, arXiv:2306.13263."""
