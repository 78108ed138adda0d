"""What a run shall do: its fields, its parts, and the command line."""
