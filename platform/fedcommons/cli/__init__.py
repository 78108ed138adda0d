"""The command line: words of argv, values, the parser, what the screen shows, and the command `fedcommons`."""
