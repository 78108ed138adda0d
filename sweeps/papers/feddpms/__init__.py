"""FedDPMS: Chen and Vikalo 2023, arXiv:2206.00686."""
