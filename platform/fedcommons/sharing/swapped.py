"""The number of real images to swap for a share p, in a separate file so that its import does not load torch."""


def n_swapped(p: float, n: int) -> int:
    """Return int(p n), as in Fedssyn's released code; but 0.29 * 100 = 28.999... counts as 29."""
    return int(round(p * n, 9))
