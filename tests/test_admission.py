"""Whole trials on a cluster: as many as fit, never more, and one sentence where not one does."""

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitray.sweep.capacity import Admission, Needs, Node, admit, sentence

nodes = st.lists(
    st.builds(Node, cpus=st.integers(0, 12) | st.sampled_from([1.5, 3.75]), gpus=st.integers(0, 4)), max_size=4
)
needs = st.builds(
    Needs,
    workers=st.integers(1, 4),
    cpus=st.sampled_from([0.25, 0.49, 0.5, 0.99, 1, 1.5, 2, 3]),
    gpus=st.sampled_from([0, 0, 0.25, 0.3, 0.5, 1, 2]),
    data_cpus=st.integers(0, 3),
    driver_cpus=st.sampled_from([0, 0.01, 0.1, 0.5, 1]),
)


def exact(number):
    return Fraction(str(number))


def place(free, gpus, cpus, gpu):
    """Put one thing on the first node, and GPU, that has room for it; whether there was one."""
    for index, left in enumerate(free):
        room = [device for device, share in enumerate(gpus[index]) if share >= min(gpu, 1)] if gpu else []
        if left < cpus or len(room) < (1 if 0 < gpu < 1 else gpu):
            continue
        free[index] -= cpus
        for device in room[: 1 if gpu < 1 else int(gpu)]:
            gpus[index][device] -= min(gpu, 1)
        return True
    return False


@given(nodes, needs)
@settings(deadline=None, max_examples=300)
def test_no_node_is_promised_twice(cluster, trial):
    found = admit(cluster, trial)
    assert sum(found.workers) == found.concurrent * trial.workers
    free = [exact(node.cpus) for node in cluster]
    gpus = [[Fraction(1)] * int(node.gpus) for node in cluster]
    for index, workers in enumerate(found.workers):
        here, devices = [free[index]], [gpus[index]]
        assert all(place(here, devices, exact(trial.cpus), exact(trial.gpus)) for _ in range(workers))
        free[index] = here[0]
    assert all(place(free, gpus, 1, 0) for _ in range(found.concurrent * trial.data_cpus))
    assert all(place(free, gpus, exact(trial.driver_cpus), 0) for _ in range(found.concurrent))


def fits(cluster, trial, number):
    """Whether so many trials fit, by trying every node for every part of them."""
    slots = [int(node.gpus) * int(1 / exact(trial.gpus)) if 0 < trial.gpus < 1 else int(node.gpus) for node in cluster]
    each = 0 if not trial.gpus else max(1, int(trial.gpus))
    parts = [(exact(trial.cpus), each)] * (trial.workers * number)
    parts += [(Fraction(1), 0)] * (trial.data_cpus * number) + [(exact(trial.driver_cpus), 0)] * number

    @cache
    def go(index, free):
        if index == len(parts):
            return True
        cpus, slot = parts[index]
        for node, (left, room) in enumerate(free):
            after = tuple(sorted((*free[:node], (left - cpus, room - slot), *free[node + 1 :])))
            if left >= cpus and room >= slot and (left, room) not in free[:node] and go(index + 1, after):
                return True
        return False

    return go(0, tuple(sorted(zip((exact(node.cpus) for node in cluster), slots, strict=True))))


@given(nodes.filter(lambda cluster: len(cluster) <= 3), needs.filter(lambda trial: trial.workers <= 3))
@settings(deadline=None, max_examples=200)
def test_as_many_are_admitted_as_fit(cluster, trial):
    found = admit(cluster, trial, trials=2)
    assert found.concurrent == max(number for number in (0, 1, 2) if fits(cluster, trial, number))


@given(nodes, st.builds(Node, cpus=st.integers(0, 12), gpus=st.integers(0, 4)), needs)
@settings(deadline=None, max_examples=200)
def test_one_node_more_never_admits_less(cluster, another, trial):
    assert admit([*cluster, another], trial).concurrent >= admit(cluster, trial).concurrent
    assert admit([another, *cluster], trial).concurrent == admit([*cluster, another], trial).concurrent


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.sampled_from([0.25, 0.5, 1, 2]), st.integers(1, 4))
@settings(deadline=None)
def test_gpus_are_used_up_where_cpus_suffice(counts, gpus, workers):
    found = admit([Node(1000, count) for count in counts], Needs(workers, 4, gpus, 8, 0.01))
    slots = sum(int(count / gpus) for count in counts)
    assert found.concurrent == slots // workers
    assert not found.concurrent or "GPU" in found.why


def test_what_a_small_machine_holds():
    # Two workers of a CPU beside the decoding would wait for ever; a little less each, and they run.
    assert admit([Node(2)], Needs(1, 1, 0, 1, 0.01)).concurrent == 0
    assert admit([Node(2)], Needs(1, 0.99, 0, 1, 0.01)).concurrent == 1
    assert admit([Node(2)], Needs(2, 0.49, 0, 1, 0.01)).concurrent == 1
    # Half a CPU free here and half a CPU there decode nothing.
    assert admit([Node(1.5), Node(1.5)], Needs(2, 1, 0, 1, 0)).concurrent == 0
    # Both workers on the first node, so that the other decodes and drives; one on each would leave room for neither.
    assert admit([Node(2.5), Node(1.5)], Needs(2, 1.25, 0, 1, 0.5)).concurrent == 1
    assert admit([Node(3), Node(1)], Needs(2, 0.4, 0, 0, 0.5)).concurrent == 3
    # Two workers of 0.6 GPU do not share one, and none takes its part from two.
    assert admit([Node(8, 3)], Needs(1, 1, 0.6, 1, 0)).concurrent == 3
    # No more than there is work for.
    assert admit([Node(64)] * 64, Needs(1, 1, 0, 1, 0.01), trials=24) == Admission(
        24, (*[0] * 63, 24), Needs(1, 1, 0, 1, 0.01), "all fit"
    )


def test_a_plan_is_one_sentence():
    cluster = [Node(64, 8)]
    found = admit(cluster, Needs(1, 8, 1, 2, 0.01))
    assert (found.concurrent, found.why) == (6, "no more than 6 fit on 64 CPUs")
    assert sentence(found, 24, cluster) == "24 trials, 6 at a time on 8 GPUs, 4 waves"
    assert sentence(found, 24, cluster, 45 * 60) == "24 trials, 6 at a time on 8 GPUs, 4 waves, about 3 h"
    assert sentence(found, 1, cluster, 20) == "1 trial, 1 at a time on 8 GPUs, 1 wave, about 1 min"
    assert [found.waves(trials) for trials in (1, 6, 7, 24)] == [1, 1, 2, 4]
    found = admit(cluster, Needs(1, 1, 1, 1, 0.01))
    assert found.why == "no more than 8 fit on 8 GPUs"
    assert sentence(admit([Node(16)], Needs(2, 1, 0, 1, 0.01)), 10, [Node(16)]).startswith(
        "10 trials, 5 at a time on 16 C"
    )


@pytest.mark.parametrize(
    ("cluster", "trial", "message"),
    [
        (
            [Node(64, 2)],
            Needs(4, 8, 1, 1, 0.01),
            "takes 4 workers of 1 GPU and 8 CPUs, 1 CPU to decode images and 0.01",
        ),
        ([Node(64, 2)], Needs(4, 8, 1, 1, 0.01), "the cluster has 2 GPUs and 64 CPUs on 1 node, too few GPUs"),
        ([Node(4), Node(4)], Needs(1, 6, 0, 1, 0), "8 CPUs on 2 nodes, and no node has enough for one worker"),
        ([Node(2)], Needs(1, 1, 0, 1, 0.01), "the cluster has 2 CPUs on 1 node, too few CPUs"),
        ([], Needs(1, 1, 0, 1, 0.01), "the cluster has 0 CPUs on 0 nodes"),
    ],
)
def test_a_trial_that_fits_nowhere_is_told_what_is_missing(cluster, trial, message):
    found = admit(cluster, trial)
    assert found.concurrent == 0
    assert found.why.startswith("not one trial fits: ")
    assert message in found.why
    assert sentence(found, 24, cluster) == found.why
