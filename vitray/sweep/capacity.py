"""How many whole trials fit on a cluster at the same time, so that none waits for a part of itself.

A trial is its workers, each of which lies on one node and its part of a GPU on one GPU; its driver; and CPUs that stay
free for decoding images, one by one on any node. What Ray places by itself it may place in part, and wait without end.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Needs(NamedTuple):
    """What one trial takes."""

    workers: int
    cpus: float
    """Of a worker."""
    gpus: float
    """Of a worker: a whole number, or a part of one GPU."""
    data_cpus: float
    """Left free for decoding, one whole CPU by one on any node."""
    driver_cpus: float
    """At most 1; what no whole number of drivers fills is rounded up, as 0.3 to a third."""


class Node(NamedTuple):
    """What one machine has."""

    cpus: float
    gpus: float = 0


class Admission(NamedTuple):
    """What fits."""

    concurrent: int
    """Whole trials at the same time."""
    workers: tuple[int, ...]
    """How many workers of them each node takes."""
    needs: Needs
    why: str
    """Why no more."""

    def waves(self, trials: int) -> int:
        """How often so many trials at a time are begun until all have run."""
        assert self.concurrent, self.why
        return -(-trials // self.concurrent)


class _Packing(NamedTuple):
    """Workers on the nodes so far, and what they leave."""

    whole: int
    """Free CPUs, node by node without their fractions: for decoding."""
    fine: int
    """Free shares of a driver's size."""
    here: int
    """Workers on the last node."""
    before: "_Packing | None"


def admit(nodes: Sequence[Node], needs: Needs, trials: int = 1000) -> Admission:
    """As many whole trials, of so many, as fit on these nodes at once, by trying every way to spread the workers."""
    workers, data = needs.workers, math.ceil(needs.data_cpus)
    assert workers > 0, needs
    assert 0 <= needs.driver_cpus <= 1, needs
    assert needs.cpus > 0 or needs.gpus > 0, needs
    # So many drivers share a CPU: what no decoding takes then holds as many of them wherever it lies.
    drivers = int(1 / _exact(needs.driver_cpus)) if needs.driver_cpus else 0
    packings = {0: [_Packing(0, 0, 0, None)]}
    for node in nodes:
        packings = _with_node(packings, node, needs, drivers, trials * workers)
    best, spread = 0, packings[0][0]
    for placed, found in packings.items():
        number, rest = divmod(placed, workers)
        for packing in found:
            fits = packing.whole >= number * data and packing.fine >= number * (data * drivers + (drivers > 0))
            if not rest and number > best and fits:
                best, spread = number, packing
    return Admission(best, _workers(spread), needs, _why(nodes, needs, trials, best))


def sentence(admission: Admission, trials: int, nodes: Sequence[Node], seconds_per_trial: float | None = None) -> str:
    """`24 trials, 6 at a time on 8 GPUs, 4 waves, about 3 h`, the hours where a trial's seconds are known."""
    if not admission.concurrent:
        return admission.why
    waves = admission.waves(trials)
    said = [
        _count(trials, "trial"),
        f"{min(trials, admission.concurrent)} at a time on {_devices(nodes, admission.needs)}",
        _count(waves, "wave"),
    ]
    if seconds_per_trial is not None:
        minutes = waves * seconds_per_trial / 60
        said.append(f"about {minutes / 60:.0f} h" if minutes >= 90 else f"about {max(1, round(minutes))} min")
    return ", ".join(said)


def _exact(number: float) -> Fraction:
    """0.1 as a tenth."""
    return Fraction(str(number))


def _slots(node: Node, needs: Needs) -> int | None:
    """Workers that the GPUs of a node hold; None where a worker takes none."""
    if not needs.gpus:
        return None
    gpus = _exact(needs.gpus)
    return int(int(node.gpus) // gpus) if gpus >= 1 else int(node.gpus) * int(1 / gpus)


def _room(node: Node, needs: Needs) -> int:
    """Workers that a node holds."""
    slots, cpus = _slots(node, needs), _exact(needs.cpus)
    return min(room for room in (slots, int(_exact(node.cpus) // cpus) if cpus else None) if room is not None)


def _with_node(
    packings: dict[int, list[_Packing]], node: Node, needs: Needs, drivers: int, most: int
) -> dict[int, list[_Packing]]:
    """What packings become with one more node, by how many workers are placed: those that none other is as good as."""
    left = [_exact(node.cpus) - here * _exact(needs.cpus) for here in range(_room(node, needs) + 1)]
    leaves = [(int(free), int(free * max(1, drivers))) for free in left]
    wider: dict[int, list[_Packing]] = {}
    for placed, found in packings.items():
        for here, (whole, fine) in enumerate(leaves[: most - placed + 1]):
            rivals = wider.setdefault(placed + here, [])
            for packing in found:
                new = _Packing(packing.whole + whole, packing.fine + fine, here, packing)
                if not any(other.whole >= new.whole and other.fine >= new.fine for other in rivals):
                    rivals[:] = [other for other in rivals if other.whole > new.whole or other.fine > new.fine] + [new]
    return wider


def _workers(packing: _Packing) -> tuple[int, ...]:
    """How many lie on each node."""
    here: list[int] = []
    while packing.before:
        here.append(packing.here)
        packing = packing.before
    return tuple(reversed(here))


def _devices(nodes: Sequence[Node], needs: Needs) -> str:
    if needs.gpus:
        return _count(sum(int(node.gpus) for node in nodes), "GPU")
    return _count(sum(node.cpus for node in nodes), "CPU")


def _why(nodes: Sequence[Node], needs: Needs, trials: int, best: int) -> str:
    """What one more trial would lack."""
    gpus_hold = sum(_slots(node, needs) or 0 for node in nodes) // needs.workers if needs.gpus else None
    cpus = _count(sum(node.cpus for node in nodes), "CPU")
    if best:
        full = _devices(nodes, needs) if gpus_hold == best else cpus
        return "all fit" if best == trials else f"no more than {best} fit on {full}"
    worker = " and ".join([*([_count(needs.gpus, "GPU")] if needs.gpus else []), _count(needs.cpus, "CPU")])
    has = f"{_devices(nodes, needs)} and {cpus}" if needs.gpus else cpus
    lacks = "too few GPUs" if gpus_hold == 0 else "too few CPUs"
    if not any(_room(node, needs) for node in nodes):
        lacks = "and no node has enough for one worker"
    return (
        f"not one trial fits: it takes {_count(needs.workers, 'worker')} of {worker},"
        f" {_count(needs.data_cpus, 'CPU')} to decode images and {needs.driver_cpus:g} for its driver;"
        f" the cluster has {has} on {_count(len(nodes), 'node')}, {lacks}"
    )


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
