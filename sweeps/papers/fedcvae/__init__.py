"""Presets and report of the experiments of FedCVAE (Heinbaugh, Luz-Ricca and Shao, ICLR 2023)."""
