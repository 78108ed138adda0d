"""The parameters of Fedssyn's convergence rates: zeta^2, sigma^2, delta^2, L (arXiv:2306.13263, section 2, A.3.5)."""
