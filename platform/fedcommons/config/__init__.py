"""What a run is asked to do: its fields, its parts, and the command line."""
