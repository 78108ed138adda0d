"""Records of a run: the run folder (always), Weights & Biases (if enabled) and one optional further tracker."""
