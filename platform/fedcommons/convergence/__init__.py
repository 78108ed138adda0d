"""Estimators of the parameters in Fedssyn's convergence rates (arXiv:2306.13263, section 2 and appendix A.3.5)."""
