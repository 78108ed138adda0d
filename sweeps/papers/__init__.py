"""Presets, studies, tables and pictures of single papers, a folder each, for the scripts in ``sweeps``."""
