"""`vitray demo`: the recipe demo on images of its own, as a registered model."""

import pytest

from pipelines import demo, shard, train
from pipelines.__main__ import main


@pytest.mark.parametrize(
    ("given", "name"), [([], "tracking.register_as=demo"), (["tracking.register_as=mine"], "tracking.register_as=mine")]
)
def test_the_demo_registers_its_network_as_demo_unless_another_name_is_given(tmp_path, monkeypatch, given, name):
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard, "main", lambda _: None)
    monkeypatch.setattr(train, "main", lambda args: calls.append(args) or {"model": "m"})
    assert main(["demo", *given]) == 0
    assert calls == [["demo", f"data.url={demo.DATA}", name]]
