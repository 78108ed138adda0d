"""What clients share before or between federations: make -> privatise -> pool -> assign."""
