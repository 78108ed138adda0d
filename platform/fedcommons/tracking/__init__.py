"""Where a run is recorded: always in the run folder, and in Weights & Biases if it is on."""
