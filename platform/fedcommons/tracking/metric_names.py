"""Names of all convergence parameters (heterogeneity, gradient noise, smoothness), which ``laboratory`` defines."""

NAMES = (
    "gradient_sq",
    *("zeta_sq", "zeta_hat_sq", "zeta_mix_sq", "zeta_lemma1_sq"),
    *("sigma_sq", "sigma_hat_sq", "sigma_mix_sq", "sigma_lemma1_sq", "sigma_avg_sq", "sigma_pool_sq", "delta_sq"),
    *("L_max", "L_p", "L_pool", "L_lemma1"),
)
