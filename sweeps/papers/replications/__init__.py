"""Replications: experiments with the settings of other authors, compared with the numbers that they published."""
