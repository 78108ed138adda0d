"""Data sets, partitions of the data over clients, and the clients' data as a lazy sequence."""
