"""Configuration of a run: its fields and their ranges, presets, and the registry of components."""
