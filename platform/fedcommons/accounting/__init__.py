"""Ledgers: what crossed the wire, and what it tells of the data."""
