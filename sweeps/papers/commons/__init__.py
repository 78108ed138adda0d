"""Study of which commons (shared data) to choose: a comparison of all sharing strategies under one protocol."""
