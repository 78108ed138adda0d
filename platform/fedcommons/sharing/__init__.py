"""What clients share before or between federations: one file each. ``config/registry.py`` lists them by name."""
