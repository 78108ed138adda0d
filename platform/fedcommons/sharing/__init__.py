"""What clients share before or between federations: one file each. ``config/parts.py`` lists them by name."""
