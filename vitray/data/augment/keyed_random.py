"""Random generators keyed by text: a draw depends on neither order, process nor number of workers."""

from hashlib import blake2b

import numpy as np


def generator(seed: int, epoch: int, key: str, copy: int = 0, view: str = "") -> np.random.Generator:
    """Return the generator for one copy of one image in one epoch, or for one of several views of that copy."""
    return _keyed(f"image {seed} {epoch} {copy}{view} {key}")


def step_generator(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Return the generator for one global batch; each purpose has independent draws."""
    return _keyed(f"batch {seed} {step} {purpose}")


def raw_draws(text: str, count: int, skip: int = 0) -> np.ndarray:
    """Return `count` random 64-bit numbers of a key: a bit stream that is the same in every version of numpy.

    The first `skip` numbers, a multiple of four, are left out without drawing them.
    """
    bits = _philox(text)
    bits.advance(skip // 4)  # its counter, which yields four numbers at a time
    return np.asarray(bits.random_raw(count))


def _keyed(text: str) -> np.random.Generator:
    return np.random.Generator(_philox(text))


def _philox(text: str) -> np.random.Philox:
    # Philox encrypts a counter under a key: independent streams without state, 8 us each.
    key = np.frombuffer(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "<u8")
    return np.random.Philox(key=key)
