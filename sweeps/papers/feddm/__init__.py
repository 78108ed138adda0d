"""FedDM: Xiong et al. 2023, arXiv:2207.09653."""
