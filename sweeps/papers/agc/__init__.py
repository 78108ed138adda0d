"""Gradient coding on data that is not private: Makkonen et al. 2024, arXiv:2404.03524."""
