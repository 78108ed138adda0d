"""Tables, pictures and HTML reports on runs, created from the files in run folders."""
