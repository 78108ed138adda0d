"""Presets, report and figure 1 of the experiments of FedDM (Xiong et al. 2023, arXiv:2207.09653)."""
