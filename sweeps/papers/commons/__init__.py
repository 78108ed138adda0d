"""The study of which commons to choose: a comparison of all sharing strategies under one protocol."""
