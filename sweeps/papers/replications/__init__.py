"""Settings that others published numbers of, as our experiments."""
