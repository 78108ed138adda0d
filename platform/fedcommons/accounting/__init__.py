"""Ledgers: the bytes that crossed the wire, and the privacy that they cost."""
