"""Programs of one figure, which play no federation."""
