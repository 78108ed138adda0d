"""Communication of FedDPMS beyond FedAvg: the closed forms of its paper's appendix A.9 (table 6); their sum is UB.

Theta: parameters of encoder and classifier;  l: dimension of a code;  n, alpha: abundant classes, and codes of each;
K, k: clients, and clients per round;  nu = k/K;  T, T_p: rounds, and rounds of stage I.
"""


def of_codes(quota: int, classes: int, latent: int, parameters: int) -> float:
    """Return r_1 = alpha n l / Theta: one client's codes relative to one copy of the model."""
    return quota * classes * latent / parameters


def expected_downloads(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """Return E = k (1 - (1 - nu)^(T - T_p)) / nu: expected clients of stage II; each downloads the decoder."""
    nu = per_round / clients
    return per_round * (1 - (1 - nu) ** (rounds - preliminary)) / nu


def of_decoder(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """Return r_2 = E Theta / (2 k Theta T), for a decoder of Theta parameters, without its one upload."""
    return expected_downloads(rounds, preliminary, clients, per_round) / (2 * per_round * rounds)
