"""What FedDPMS sends beyond FedAvg: the closed forms of its paper's appendix A.9 (table 6), whose sum is UB there.

Theta: parameters of encoder and classifier;  l: numbers in a code;  n, alpha: abundant classes, and codes of each;
K, k: clients, and those of a round;  nu = k/K;  T, T_p: rounds, and those of stage I.
"""


def of_codes(quota: int, classes: int, latent: int, parameters: int) -> float:
    """r_1 = alpha n l / Theta: one client's codes against one copy of the model."""
    return quota * classes * latent / parameters


def expected_downloads(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """E = k (1 - (1 - nu)^(T - T_p)) / nu: how many clients are drawn in stage II, each of which gets the decoder."""
    nu = per_round / clients
    return per_round * (1 - (1 - nu) ** (rounds - preliminary)) / nu


def of_decoder(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """r_2 = E Theta / (2 k Theta T), for a decoder as large as encoder and classifier; its one upload is left out."""
    return expected_downloads(rounds, preliminary, clients, per_round) / (2 * per_round * rounds)
