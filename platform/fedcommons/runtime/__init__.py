"""The process and the machine: torch settings, memory, the kind of CPU, the Ray cluster and temporary folders."""
