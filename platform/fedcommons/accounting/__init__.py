"""Ledgers: what crossed the wire."""
