"""Where a run is recorded: always in the run folder, in Weights & Biases if it is on, and by a tracker of one's own."""
