"""FedCVAE: Heinbaugh, Luz-Ricca and Shao 2023, ICLR."""
