"""Approximate gradient coding, with copies of examples that are not private: Makkonen et al., arXiv:2404.03524."""
