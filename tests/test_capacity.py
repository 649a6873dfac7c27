"""Capacity of a cluster: the number of complete trials that fit, and one message if none fits."""

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitray.config import load_run
from vitray.sweeps.capacity import Capacity, Node, TrialResources, describe_capacity, fit_trials
from vitray.sweeps.plan import trial_resources, trials_that_fit

nodes = st.lists(
    st.builds(Node, cpus=st.integers(0, 12) | st.sampled_from([1.5, 3.75]), gpus=st.integers(0, 4)), max_size=4
)
resources = st.builds(
    TrialResources,
    workers=st.integers(1, 4),
    cpus=st.sampled_from([0.25, 0.49, 0.5, 0.99, 1, 1.5, 2, 3]),
    gpus=st.sampled_from([0, 0, 0.25, 0.3, 0.5, 1, 2]),
    data_cpus=st.integers(0, 3),
    driver_cpus=st.sampled_from([0, 0.01, 0.1, 0.5, 1]),
)


def fraction(number):
    return Fraction(str(number))


def place(free_cpus, gpus, cpus, gpu):
    """Place a part on the first node and GPU with room; return whether there was room."""
    for index, available in enumerate(free_cpus):
        room = [device for device, share in enumerate(gpus[index]) if share >= min(gpu, 1)] if gpu else []
        if available < cpus or len(room) < (1 if 0 < gpu < 1 else gpu):
            continue
        free_cpus[index] -= cpus
        for device in room[: 1 if gpu < 1 else int(gpu)]:
            gpus[index][device] -= min(gpu, 1)
        return True
    return False


@given(nodes, resources)
@settings(deadline=None, max_examples=300)
def test_an_admitted_packing_can_be_placed(cluster, trial):
    capacity = fit_trials(cluster, trial)
    assert sum(capacity.workers) == capacity.concurrent * trial.workers
    free_cpus = [fraction(node.cpus) for node in cluster]
    gpus = [[Fraction(1)] * int(node.gpus) for node in cluster]
    for index, workers in enumerate(capacity.workers):
        node_cpus, devices = [free_cpus[index]], [gpus[index]]
        assert all(place(node_cpus, devices, fraction(trial.cpus), fraction(trial.gpus)) for _ in range(workers))
        free_cpus[index] = node_cpus[0]
    assert all(place(free_cpus, gpus, 1, 0) for _ in range(capacity.concurrent * trial.data_cpus))
    assert all(place(free_cpus, gpus, fraction(trial.driver_cpus), 0) for _ in range(capacity.concurrent))


def fits(cluster, trial, number):
    """Whether this many trials fit, by an exhaustive search over the node of every part."""
    slots = [
        int(node.gpus) * int(1 / fraction(trial.gpus)) if 0 < trial.gpus < 1 else int(node.gpus) for node in cluster
    ]
    gpus_each = 0 if not trial.gpus else max(1, int(trial.gpus))
    parts = [(fraction(trial.cpus), gpus_each)] * (trial.workers * number)
    parts += [(Fraction(1), 0)] * (trial.data_cpus * number) + [(fraction(trial.driver_cpus), 0)] * number

    @cache
    def fit_parts(index, nodes):
        if index == len(parts):
            return True
        cpus, slot = parts[index]
        for node, (free_cpus, free_gpus) in enumerate(nodes):
            after = tuple(sorted((*nodes[:node], (free_cpus - cpus, free_gpus - slot), *nodes[node + 1 :])))
            if (
                free_cpus >= cpus
                and free_gpus >= slot
                and (free_cpus, free_gpus) not in nodes[:node]
                and fit_parts(index + 1, after)
            ):
                return True
        return False

    return fit_parts(0, tuple(sorted(zip((fraction(node.cpus) for node in cluster), slots, strict=True))))


@given(nodes.filter(lambda cluster: len(cluster) <= 3), resources.filter(lambda trial: trial.workers <= 3))
@settings(deadline=None, max_examples=200)
def test_the_greedy_packing_equals_an_exhaustive_search(cluster, trial):
    capacity = fit_trials(cluster, trial, trials=2)
    assert capacity.concurrent == max(number for number in (0, 1, 2) if fits(cluster, trial, number))


@given(nodes, st.builds(Node, cpus=st.integers(0, 12), gpus=st.integers(0, 4)), resources)
@settings(deadline=None, max_examples=200)
def test_one_more_node_never_admits_fewer_trials(cluster, node, trial):
    assert fit_trials([*cluster, node], trial).concurrent >= fit_trials(cluster, trial).concurrent
    assert fit_trials([node, *cluster], trial).concurrent == fit_trials([*cluster, node], trial).concurrent


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.sampled_from([0.25, 0.5, 1, 2]), st.integers(1, 4))
@settings(deadline=None)
def test_all_gpus_are_used_if_cpus_suffice(counts, gpus, workers):
    capacity = fit_trials([Node(1000, count) for count in counts], TrialResources(workers, 4, gpus, 8, 0.01))
    slots = sum(int(count / gpus) for count in counts)
    assert capacity.concurrent == slots // workers
    assert not capacity.concurrent or "GPU" in capacity.limit


def test_small_clusters():
    # A worker of a whole CPU beside the decoding would wait forever; a little less runs.
    assert fit_trials([Node(2)], TrialResources(1, 1, 0, 1, 0.01)).concurrent == 0
    assert fit_trials([Node(2)], TrialResources(1, 0.99, 0, 1, 0.01)).concurrent == 1
    assert fit_trials([Node(2)], TrialResources(2, 0.49, 0, 1, 0.01)).concurrent == 1
    # Two halves of a CPU on two nodes cannot decode.
    assert fit_trials([Node(1.5), Node(1.5)], TrialResources(2, 1, 0, 1, 0)).concurrent == 0
    # Both workers belong on the first node: one on each would leave no room for decoding and driver.
    assert fit_trials([Node(2.5), Node(1.5)], TrialResources(2, 1.25, 0, 1, 0.5)).concurrent == 1
    assert fit_trials([Node(3), Node(1)], TrialResources(2, 0.4, 0, 0, 0.5)).concurrent == 3
    # Two workers of 0.6 GPU do not share a GPU, and none is split over two.
    assert fit_trials([Node(8, 3)], TrialResources(1, 1, 0.6, 1, 0)).concurrent == 3
    # The number of trials is a limit too.
    assert fit_trials([Node(64)] * 64, TrialResources(1, 1, 0, 1, 0.01), trials=24) == Capacity(
        24, (*[1] * 24, *[0] * 40), TrialResources(1, 1, 0, 1, 0.01), "all fit"
    )


def test_the_description_is_one_line():
    cluster = [Node(64, 8)]
    capacity = fit_trials(cluster, TrialResources(1, 8, 1, 2, 0.01))
    assert (capacity.concurrent, capacity.limit) == (6, "no more than 6 fit on 64 CPUs")
    assert describe_capacity(capacity, 24, cluster) == "24 trials, 6 at a time on 8 GPUs, 4 waves"
    assert describe_capacity(capacity, 1, cluster) == "1 trial, 1 at a time on 8 GPUs, 1 wave"
    assert [capacity.waves(trials) for trials in (1, 6, 7, 24)] == [1, 1, 2, 4]
    capacity = fit_trials(cluster, TrialResources(1, 1, 1, 1, 0.01))
    assert capacity.limit == "no more than 8 fit on 8 GPUs"
    assert describe_capacity(fit_trials([Node(16)], TrialResources(2, 1, 0, 1, 0.01)), 10, [Node(16)]).startswith(
        "10 trials, 5 at a time on 16 C"
    )


@pytest.mark.parametrize(
    ("cluster", "trial", "message"),
    [
        (
            [Node(64, 2)],
            TrialResources(4, 8, 1, 1, 0.01),
            "takes 4 workers of 1 GPU and 8 CPUs, 1 CPU to decode images and 0.01",
        ),
        ([Node(64, 2)], TrialResources(4, 8, 1, 1, 0.01), "the cluster has 2 GPUs and 64 CPUs on 1 node, too few GPUs"),
        ([Node(4), Node(4)], TrialResources(1, 6, 0, 1, 0), "8 CPUs on 2 nodes, and no node has enough for one worker"),
        ([Node(2)], TrialResources(1, 1, 0, 1, 0.01), "the cluster has 2 CPUs on 1 node, too few CPUs"),
        ([], TrialResources(1, 1, 0, 1, 0.01), "the cluster has 0 CPUs on 0 nodes"),
    ],
)
def test_the_message_for_a_trial_that_does_not_fit_names_the_lack(cluster, trial, message):
    capacity = fit_trials(cluster, trial)
    assert capacity.concurrent == 0
    assert capacity.limit.startswith("not one trial fits: ")
    assert message in capacity.limit


@pytest.mark.parametrize(
    ("overrides", "gpus", "concurrent"),
    [
        ([], [4, 4], 8),
        (["evaluate.where=cpu"], [4, 4], 8),
        (["evaluate.where=gpu"], [4, 4], 7),
        (["evaluate.where=gpu", "evaluate.gpus=0.5"], [4, 4], 7),
        (["evaluate.where=gpu"], [1], 0),
        (["evaluate.where=gpu", "compute.workers=4"], [4, 4], 1),
        (["compute.workers=1", "compute.gpus=0.25"], [1], 4),
        (["evaluate.where=gpu", "evaluate.gpus=0.25", "compute.workers=1", "compute.gpus=0.25"], [1], 2),
        (["evaluate.where=gpu", "evaluate.gpus=0.25", "compute.workers=1", "compute.gpus=0.75"], [1], 1),
        (["evaluate.where=gpu", "evaluate.gpus=0.5", "compute.workers=1", "compute.gpus=0.75"], [1, 1], 1),
        (["evaluate.where=gpu", "compute.workers=1", "compute.device=cpu"], [1], 16),
    ],
)
def test_the_trials_leave_room_for_evaluations_on_a_gpu(overrides, gpus, concurrent, monkeypatch):
    run, cluster = load_run(None, overrides), [Node(100, each) for each in gpus]
    monkeypatch.setattr("vitray.sweeps.plan.cluster_nodes", lambda: cluster)
    assert trials_that_fit(run, trial_resources(run, cluster), trials=16) == concurrent
