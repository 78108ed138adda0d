"""fedcommons: federated learning when clients' data differ and clients may put something into a commons."""

__version__ = "0.1.0"
