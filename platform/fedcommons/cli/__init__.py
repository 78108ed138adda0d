"""The command line: options and their values, ``--help``, the screen output, and the command ``fedcommons``."""
