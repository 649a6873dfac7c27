"""Random generators keyed by text: a draw depends on neither order, process nor number of workers."""

from hashlib import blake2b

import numpy as np


def generator(seed: int, epoch: int, key: str, copy: int = 0) -> np.random.Generator:
    """Return the generator for one copy of one image in one epoch."""
    return _keyed(f"image {seed} {epoch} {copy} {key}")


def step_generator(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Return the generator for one global batch; each purpose has independent draws."""
    return _keyed(f"batch {seed} {step} {purpose}")


def raw_draws(text: str, count: int) -> np.ndarray:
    """Return `count` random 64-bit numbers of a key: a bit stream that is the same in every version of numpy."""
    return np.asarray(_keyed(text).bit_generator.random_raw(count))


def _keyed(text: str) -> np.random.Generator:
    # Philox encrypts a counter under a key: independent streams without state, 8 us each.
    key = np.frombuffer(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "<u8")
    return np.random.Generator(np.random.Philox(key=key))
