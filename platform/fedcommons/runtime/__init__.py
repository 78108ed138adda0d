"""Settings and checks of the process and the machine: torch, memory, CPU model, Ray cluster and temporary folders."""
