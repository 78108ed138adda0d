"""What belongs to one paper alone: its presets, studies, tables and pictures, for the sweeps beside this folder."""
