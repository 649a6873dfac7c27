"""Random generators that are functions of a key, so that neither order nor process nor worker changes a draw."""

from hashlib import blake2b

import numpy as np


def generator(seed: int, epoch: int, key: str, copy: int = 0) -> np.random.Generator:
    """The source of every draw for one copy of one image in one epoch."""
    return _keyed(f"image {seed} {epoch} {copy} {key}")


def step_generator(seed: int, step: int, purpose: str) -> np.random.Generator:
    """The source of every draw of one purpose for one global batch: what erases does not move what mixes."""
    return _keyed(f"batch {seed} {step} {purpose}")


def _keyed(text: str) -> np.random.Generator:
    # Philox is a cipher of a counter under a key: no state to carry, no two keys alike, 8 us to make.
    key = np.frombuffer(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).digest(), "<u8")
    return np.random.Generator(np.random.Philox(key=key))


def raw_draws(text: str, count: int) -> np.ndarray:
    """`count` random 64-bit numbers of a key, for orders: a bit stream that no version of numpy changes."""
    return np.asarray(_keyed(text).bit_generator.random_raw(count))
