"""The convergence parameters that explain why a setting converges (methods.md section 8)."""
