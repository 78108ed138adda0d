"""Attacks and audits that measure what a pool of synthetic images, a generator or a method discloses about its data."""
