"""Attacks: what a pool, a generator or a method gives away, measured by somebody who tries to find out."""
