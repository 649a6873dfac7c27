"""The sizes of the workers' shares of a global batch. Arithmetic only; `epoch_order` says which images they hold."""

PAIR = 2


def share_sizes(batch: int, workers: int) -> list[int]:
    """Return the number of images of each worker's share, by rank."""
    unit = dealt_unit(batch, workers)
    units = -(-batch // unit)
    sizes = [unit * len(range(rank, units, workers)) for rank in range(workers)]
    sizes[(units - 1) % workers] -= units * unit - batch  # the last image of an odd batch has no neighbor
    return sizes


def dealt_unit(batch: int, workers: int) -> int:
    """Return the number of neighboring images that go to the same worker."""
    if batch < workers:
        raise ValueError(f"got a global batch of {batch}, expected at least an image for each of {workers} workers")
    is_odd = batch % workers == 0 and batch // workers % PAIR
    return 1 if is_odd or batch // PAIR < workers else PAIR
