"""The command line: options, values, the parser, the display, and the command `fedcommons`."""
