"""A running Ray: what jobs have asked for and nobody uses any longer is given back."""

from types import SimpleNamespace

import pytest

from vitray import cluster


def held():
    """The placement groups that are there."""
    from ray.util.placement_group import placement_group_table

    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


# ---- what jobs leave -------------------------------------------------------------------------------------------------


def room(**settings):
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 0.01}], **settings)
    assert group.wait(60)
    return group.id.hex()


@pytest.mark.ray
def test_a_job_gives_back_what_it_asked_for(ray_cluster):
    kept, asked = room(lifetime="detached"), room()
    assert {kept, asked} <= held()
    cluster.reclaim()  # of jobs that are over, not of this one
    assert {kept, asked} <= held()
    cluster.give_back()
    assert held() & {kept, asked} == {kept}


@pytest.mark.ray
def test_what_a_job_has_left_is_removed_unless_something_of_it_lives(ray_cluster, monkeypatch):
    """Ray answers that this job is over: the moment in which it would forget a group cannot be hit at will."""
    import ray
    from ray.util import state

    asked, job = room(), ray.get_runtime_context().get_job_id()
    monkeypatch.setattr(state, "list_jobs", lambda **_: [SimpleNamespace(job_id=job, status="SUCCEEDED")])
    monkeypatch.setattr(state, "list_actors", lambda **_: [SimpleNamespace(job_id=job)])
    cluster.reclaim()
    assert asked in held()
    monkeypatch.setattr(state, "list_actors", lambda **_: [])
    cluster.reclaim()
    assert asked not in held()
