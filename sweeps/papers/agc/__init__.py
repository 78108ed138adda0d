"""Approximate gradient coding, with copies of the clients' non-private examples: Makkonen et al., arXiv:2404.03524."""
