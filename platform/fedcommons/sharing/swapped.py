"""The number of real images that ``shuffled_real`` swaps, in a file that can be imported without loading torch."""


def n_swapped(p: float, n: int) -> int:
    """Return int(p n), the number of a client's n images to swap, without rounding errors: 0.29 * 100 counts as 29."""
    return int(round(p * n, 9))
