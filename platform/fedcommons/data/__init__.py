"""Data sets, partitions over clients, and the clients' data as a lazy sequence."""
