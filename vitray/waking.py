"""Loaded before all else by every process of ours, so that Python seldom looks for garbage while modules are loaded.

Its look after every 700 objects more took about a tenth of a start's CPU time, and modules leave none. Workers of Ray
load this by `RAY_preload_python_modules`.
"""

import gc

BEFORE = gc.get_threshold()
gc.set_threshold(50_000, 20, 50)


def settle() -> None:
    """All is loaded: garbage is looked for as before, since a cycle may hold a GPU's memory, and not among modules."""
    gc.freeze()
    gc.set_threshold(*BEFORE)
