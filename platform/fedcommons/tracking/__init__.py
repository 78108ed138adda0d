"""Records of a run: the run folder (always), Weights & Biases (if enabled) and an optional further tracker."""
