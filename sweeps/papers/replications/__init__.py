"""Replications: experiments whose settings other authors published numbers for."""
