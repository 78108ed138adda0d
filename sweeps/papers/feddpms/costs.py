"""Communication of FedDPMS beyond FedAvg's: the closed forms of appendix A.9 of its paper (table 6).

Theta: number of parameters of encoder and classifier;  l: dimension of a code (latent vector);  n: abundant classes of
a client, of which it has many images;  alpha: codes per abundant class (quota);  K: clients;  k: clients per round;
nu = k/K;  T: rounds;  T_p: rounds of stage I, before clients exchange codes. The paper calls the sum of the forms UB.
"""


def of_codes(quota: int, classes: int, latent: int, parameters: int) -> float:
    """Return r_1 = alpha n l / Theta: numbers in a client's codes, divided by the model's parameters.

    A client has alpha (``quota``) codes of dimension l (``latent``) for each of n (``classes``) classes.
    """
    return quota * classes * latent / parameters


def expected_downloads(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """Return E = k (1 - (1 - nu)^(T - T_p)) / nu: expected number of clients that download the decoder in stage II.

    k: clients per round; nu: share of the clients in a round; T: rounds; T_p: rounds of stage I (``preliminary``).
    """
    nu = per_round / clients
    return per_round * (1 - (1 - nu) ** (rounds - preliminary)) / nu


def of_decoder(rounds: int, preliminary: int, clients: int, per_round: int) -> float:
    """Return r_2 = E Theta / (2 k Theta T): bytes of decoder downloads divided by bytes of the model in a run.

    E: expected number of downloads; Theta: number of parameters of the model, which the decoder is assumed to have
    too; k: clients per round; T: rounds.
    """
    return expected_downloads(rounds, preliminary, clients, per_round) / (2 * per_round * rounds)
