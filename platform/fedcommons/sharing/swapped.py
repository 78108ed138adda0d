"""How many images a share p is, where real images are swapped; apart from the stage, as it needs no torch."""


def n_swapped(p: float, n: int) -> int:
    """int(p n), as in Fedssyn's released code; but 0.29 * 100 = 28.999... is 29."""
    return int(round(p * n, 9))
