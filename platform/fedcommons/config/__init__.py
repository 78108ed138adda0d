"""Configuration of a run: its fields, its components and the command line."""
