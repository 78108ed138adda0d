"""Run one experiment, from its config to its summary."""
