"""Deltas: with their base they give the network bit for bit, and any other base is rejected."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
import torch
from mlflow import MlflowClient
from mlflow.pyfunc import load_model as load_logged
from safetensors.torch import load_file, save_file
from test_serving import encoded, pictures
from test_tracking import Server

from pipelines.__main__ import main
from vitray import load_deltas
from vitray.config import Model, Run
from vitray.errors import ConfigError
from vitray.models.vit import ViT
from vitray.serving.flavor import log_model
from vitray.system import storage
from vitray.tracking.model_registry import VersionScore, holder_of, move_champion, register_model
from vitray.weights import addresses, flatten_model, identity_of, load_model, open_weights, save_model
from vitray.weights.addresses import resolve_uri

Changed = Callable[[str], bool]
SMALL = Model(name="vit_u2x2_8", image_size=32, num_classes=5)


def is_attention(name: str) -> bool:
    return ".attn" in name


def fresh(model: Model = SMALL, seed: int = 0) -> ViT:
    vit = ViT(model).eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in vit.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).abs() * 0.2)
    return vit


def tuned(base: ViT, changed: Changed = is_attention, seed: int = 1, **settings) -> ViT:
    """Return a network with the tensors of `base`, except changed ones and those of another shape."""
    vit = fresh(Model.model_validate(base.model.model_dump() | settings), seed)
    old = base.state_dict()
    for name, tensor in vit.state_dict().items():
        if name in old and old[name].shape == tensor.shape and not changed(name):
            tensor.copy_(old[name])
    return vit


def save(place: Path, vit: ViT, base: Path | str | None = None, classes: list[str] | None = None) -> str:
    save_model(str(place), Run(model=vit.model), vit, classes, relative_to=None if base is None else str(base))
    return str(place)


def is_same(one: ViT, other: ViT) -> bool:
    """Whether two networks are identical bit for bit."""
    return one.model == other.model and identity_of(one.state_dict()) == identity_of(other.state_dict())


def answer(vit: ViT) -> torch.Tensor:
    with torch.inference_mode():
        return vit(torch.randn(2, 3, *vit.model.image_shape, generator=torch.Generator().manual_seed(9)))


@pytest.fixture
def base(tmp_path) -> ViT:
    """A network saved at `base`."""
    save(tmp_path / "base", vit := fresh())
    return vit


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_an_identity_depends_only_on_the_tensors(tmp_path):
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.empty(0)}
    identity = identity_of(state)
    save_file(state, tmp_path / "w.safetensors", metadata={"any": "thing"})
    reloaded = load_file(tmp_path / "w.safetensors")
    assert identity == identity_of(reloaded) == identity_of(dict(reversed(state.items())))
    assert identity == identity_of(state | {"a": state["a"].T.contiguous().T})
    others = [
        state | {"a": state["a"] + 1e-6},
        state | {"a": -state["a"]},  # -0.0 instead of 0.0
        state | {"a": state["a"].reshape(3, 2)},
        state | {"b": torch.tensor(3, dtype=torch.int32)},
        {"a": state["a"], "d": state["b"], "c": state["c"]},
        {"a": state["a"], "b": state["b"]},
    ]
    assert len({identity, *map(identity_of, others)}) == 1 + len(others)
    assert identity_of({"x": torch.ones(4, dtype=torch.bfloat16)}) != identity_of({"x": torch.ones(4).half()})


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        (is_attention, {}),
        (lambda name: ".attn" in name or name.startswith(("head", "positions")), {"num_classes": 3, "image_size": 48}),
        (lambda name: False, {}),
        (lambda name: True, {}),
        (lambda name: False, {"num_classes": None}),
        (lambda name: name.endswith("running_var"), {}),
        (is_attention, {"layerscale": 0.1, "head": {"kind": "mlp", "hidden": 8}}),
    ],
)
def test_a_delta_restores_the_network_bit_for_bit_and_holds_only_changed_tensors(tmp_path, changed, settings):
    base = fresh(SMALL.model_copy(update={"name": "vit_u2x2_8_hmlp_bn"}))
    vit = tuned(base, changed, **settings)
    save(tmp_path / "base", base)
    classes = None if vit.model.num_classes is None else [f"c{label}" for label in range(vit.model.num_classes)]
    run = Run(seed=7, model=vit.model)
    saved = save_model(str(tmp_path / "d"), run, vit, classes, relative_to=str(tmp_path / "base"))
    loaded = load_model(str(tmp_path / "d"))
    assert (loaded.run, loaded.classes) == (run, classes)
    assert is_same(loaded.vit, vit)
    assert torch.equal(answer(loaded.vit), answer(vit))

    own = load_file(tmp_path / "d" / "model.safetensors")
    old, new = base.state_dict(), vit.state_dict()
    assert set(own) == {name for name in new if name not in old or not torch.equal(new[name], old[name])}
    assert saved == (sum(t.nbytes for t in own.values()), sum(t.nbytes for t in new.values()))
    assert saved.share == saved.bytes / saved.whole


def test_tensors_are_compared_by_bits(tmp_path):
    base = fresh()
    base.norm.weight.data[:] = 0.0
    vit = tuned(base, lambda name: False)
    vit.norm.weight.data[:] = -0.0
    save(tmp_path / "base", base)
    save(tmp_path / "d", vit, tmp_path / "base")
    assert set(load_file(tmp_path / "d" / "model.safetensors")) == {"norm.weight"}
    assert is_same(load_model(str(tmp_path / "d")).vit, vit)


def test_a_whole_model_replaces_an_incomplete_delta(tmp_path, base):
    save(tmp_path / "d", tuned(base), tmp_path / "base")
    (tmp_path / "d" / "run.yaml").unlink()  # the state after an interrupted write
    saved = save_model(str(tmp_path / "d"), Run(model=base.model), base)
    assert saved.share == 1
    assert not (tmp_path / "d" / "delta.json").exists()
    assert is_same(load_model(str(tmp_path / "d")).vit, base)


def test_fine_tuning_only_attention_stores_a_third_of_a_vit_b16(tmp_path):
    def filled(model: Model, value: Callable[[str], float]) -> ViT:
        with torch.device("meta"):
            vit = ViT(model)
        state = {name: torch.full(tensor.shape, value(name)) for name, tensor in vit.state_dict().items()}
        vit.load_state_dict(state, assign=True)
        return vit

    def is_tuned(name: str) -> bool:
        return ".attn" in name or name.startswith(("head", "positions"))

    small, large = (Model(name="vit_b12x1_16", image_size=size) for size in (224, 384))
    save(tmp_path / "base", filled(small, lambda name: 0.0))
    vit = filled(large, lambda name: float(is_tuned(name)))
    saved = save_model(str(tmp_path / "d"), Run(model=large), vit, relative_to=str(tmp_path / "base"))
    size, base_size = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("d", "base"))
    print(f"384: {size:,} of {base_size:,} bytes, {size / base_size:.2%}; of its own whole file {saved.share:.2%}")
    assert size / base_size < 0.345
    assert saved.share < 0.345
    # At 224 there are fewer positions. With the head and the positions of the base, only attention is left.
    sizes = {name: tensor.nbytes for name, tensor in vit.state_dict().items() if is_tuned(name)}
    fewer = sizes["positions.table"] * (1 - 14**2 / 24**2)
    attention = sum(size for name, size in sizes.items() if ".attn" in name)
    print(f"224: {(size - fewer) / base_size:.2%}; attention alone {attention / base_size:.2%}")
    assert (size - fewer) / base_size < 0.340
    assert attention / base_size < 0.330


# ---- chains, and changed or missing bases ----------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path, base) -> list[ViT]:
    """Three networks: `base`, `d1` (a delta of base) and `d2` (a delta of d1)."""
    first = tuned(base, num_classes=3)
    second = tuned(first, lambda name: name.startswith(("head", "blocks.1.ffn")), seed=2)
    save(tmp_path / "d1", first, tmp_path / "base")
    save(tmp_path / "d2", second, tmp_path / "d1")
    return [base, first, second]


def test_deltas_of_deltas_compose(tmp_path, chain):
    assert [is_same(load_model(str(tmp_path / n)).vit, vit) for n, vit in zip(("base", "d1", "d2"), chain, strict=True)]
    assert all(".attn" not in name for name in load_file(tmp_path / "d2" / "model.safetensors"))
    # Relative to the first network, the last one also has the changed tensors of the middle one.
    save(tmp_path / "d3", chain[2], tmp_path / "base")
    assert is_same(load_model(str(tmp_path / "d3")).vit, chain[2])


def test_a_changed_base_is_rejected(tmp_path, chain):
    for place, other in (("base", chain[2]), ("d1", chain[1])):
        shutil.rmtree(tmp_path / place)
        save(tmp_path / place, tuned(other, lambda name: name == "norm.bias", seed=5))
        wanted = json.loads((tmp_path / "d2" / "delta.json").read_text())["base"]
        got = identity_of(load_model(str(tmp_path / place)).vit.state_dict())
        with pytest.raises(ConfigError) as rejected:
            load_model(str(tmp_path / ("d1" if place == "base" else "d2")))
        assert f"a delta of {tmp_path / place}, which has changed: got identity {got[:12]}, expected" in str(
            rejected.value
        )
    assert wanted["identity"][:12] in str(rejected.value)


@pytest.mark.parametrize("missing", ["base", "d1"])
def test_a_missing_base_is_named(tmp_path, chain, missing):
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError, match=rf"a delta of {tmp_path / missing} \(identity \w{{12}}\), which is not there;"
    ):
        load_model(str(tmp_path / "d2"))
    (tmp_path / "elsewhere").rename(tmp_path / missing)
    assert is_same(load_model(str(tmp_path / "d2")).vit, chain[2])


def test_a_base_and_its_deltas_can_be_moved_together(tmp_path, chain, monkeypatch):
    (tmp_path / "new").mkdir()
    for place in ("base", "d1", "d2"):
        (tmp_path / place).rename(tmp_path / "new" / place)
    assert is_same(load_model(str(tmp_path / "new" / "d2")).vit, chain[2])
    monkeypatch.chdir(tmp_path / "new" / "d1")
    assert is_same(load_model("../d2").vit, chain[2])


def test_a_base_named_from_one_folder_is_found_from_another(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model("d", Run(model=base.model), tuned(base), relative_to="base")
    (tmp_path / "other" / "place").mkdir(parents=True)
    (tmp_path / "d").rename(tmp_path / "other" / "place" / "d")
    monkeypatch.chdir(tmp_path / "other")
    assert is_same(load_model("place/d").vit, tuned(base))


def test_a_circle_of_deltas_is_rejected(tmp_path, chain):
    delta = json.loads((tmp_path / "d1" / "delta.json").read_text())
    delta["base"]["url"] = str(tmp_path / "d2")
    (tmp_path / "d1" / "delta.json").write_text(json.dumps(delta))
    with pytest.raises(ConfigError, match=r"d2: a delta of itself, .*d2 -> .*d1 -> .*d2; expected a whole network"):
        load_model(str(tmp_path / "d2"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "delta.json: not JSON"),
        ("[]", "delta.json: not a delta.json: expected a JSON object with a format"),
        ("\xff", "delta.json: not JSON"),
        ('{"format": 2}', "delta.json: format: got 2, expected 1: written by another vitray"),
        ('{"format": 1, "taken": []}', "delta.json.*base"),
        ('{"format": 1, "base": {"url": "x", "identity": "12"}, "taken": []}', "delta.json.*identity"),
        ('{"format": 1, "base": {"url": "x", "identify": "12"}, "taken": []}', "delta.json.*identify"),
    ],
)
def test_a_corrupt_delta_is_rejected(tmp_path, base, text, fault):
    save(tmp_path / "d", tuned(base), tmp_path / "base")
    (tmp_path / "d" / "delta.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=fault):
        load_model(str(tmp_path / "d"))


def test_wrong_tensor_names_in_delta_json_are_rejected(tmp_path, base):
    save(tmp_path / "d", tuned(base), tmp_path / "base")
    delta = json.loads((tmp_path / "d" / "delta.json").read_text())
    for taken, fault in (
        ([*delta["taken"], "blocks.9.attn1.qkv.weight"], "takes blocks.9.attn1.qkv.weight from the base"),
        ([*delta["taken"], "blocks.0.attn1.qkv.weight"], "takes blocks.0.attn1.qkv.weight from the base"),
        ([name for name in delta["taken"] if name != "norm.bias"], "norm.bias is missing"),
    ):
        (tmp_path / "d" / "delta.json").write_text(json.dumps(delta | {"taken": taken}))
        with pytest.raises(ConfigError, match=fault):
            load_model(str(tmp_path / "d"))


def test_a_base_may_be_a_file_of_another_library(tmp_path):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    _, vit, _ = open_weights(str(tmp_path / "w.safetensors"), {"heads": 3, "normalize": {}})
    save(tmp_path / "d", other := tuned(vit), tmp_path / "w.safetensors")
    assert all(map(is_attention, load_file(tmp_path / "d" / "model.safetensors")))
    assert is_same(open_weights(str(tmp_path / "d")).vit, other)
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"w.safetensors .*, which is not there"):
        load_model(str(tmp_path / "d"))


def test_a_delta_of_a_missing_base_is_not_written(tmp_path, base):
    with pytest.raises(ConfigError, match="absent: no such file"):
        save(tmp_path / "d", base, tmp_path / "absent")
    assert not (tmp_path / "d").exists()


def test_deltas_are_saved_on_s3_too(tmp_path, base, s3_server):
    folder = f"s3://bucket/{tmp_path.name}"
    for name in storage.list_files(str(tmp_path / "base")):
        storage.upload(tmp_path / "base" / name, storage.join(folder, "base", name))
    vit = tuned(base)
    save_model(f"{folder}/d", Run(model=vit.model), vit, relative_to=f"{folder}/base")
    assert is_same(load_model(f"{folder}/d").vit, vit)
    flatten_model(f"{folder}/d", f"{folder}/whole")
    storage.remove(f"{folder}/base")
    assert is_same(load_model(f"{folder}/whole").vit, vit)
    with pytest.raises(ConfigError, match=f"a delta of {folder}/base .*, which is not there"):
        load_model(f"{folder}/d")
    content = storage.read_bytes(f"{folder}/d/delta.json")
    assert b"KEY" not in content
    assert b"SECRET" not in content


# ---- several deltas, and flattening ----------------------------------------------------------------------------------


def test_deltas_of_one_base_share_its_tensors(tmp_path, chain):
    base, first, second = chain
    third = tuned(base, lambda name: name.startswith("stem"), seed=3)
    save(tmp_path / "d3", third, tmp_path / "base")
    family = load_deltas(str(tmp_path / "base"), {name: str(tmp_path / name) for name in ("d1", "d2", "d3")})
    loaded = list(family.members.values())
    for member, expected in zip(loaded, (first, second, third), strict=True):
        assert identity_of(member.state) == identity_of(expected.state_dict())
        assert member.run.model == expected.model
    pointers = [{name: tensor.data_ptr() for name, tensor in member.state.items()} for member in loaded]
    for name, tensor in base.state_dict().items():
        is_shared = [
            torch.equal(vit.state_dict()[name], tensor) if vit.state_dict()[name].shape == tensor.shape else False
            for vit in (first, second, third)
        ]
        users = {tensors[name] for tensors, shares in zip(pointers, is_shared, strict=True) if shares}
        assert users <= {family.base[name].data_ptr()}, name
        others = [tensors[name] for tensors, shares in zip(pointers, is_shared, strict=True) if not shares]
        assert len(set(others) - users) == len(others), name


def test_deltas_of_one_base_need_no_other_folder(tmp_path, chain):
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "d1").rename(tmp_path / "again")
    family = load_deltas(str(tmp_path / "moved"), {"again": str(tmp_path / "again")})
    assert identity_of(family.member("again").state) == identity_of(chain[1].state_dict())


def test_a_delta_of_another_base_is_named(tmp_path, chain):
    save(tmp_path / "other", fresh(seed=8))
    save(tmp_path / "stranger", tuned(fresh(seed=8)), tmp_path / "other")
    names = {name: str(tmp_path / name) for name in ("d1", "stranger")}
    with pytest.raises(
        ConfigError, match=r"stranger: it is a delta of .*other \(\w{12}\); expected a delta of .*base \("
    ):
        load_deltas(str(tmp_path / "base"), names)
    with pytest.raises(ConfigError, match=r"other: it is whole \(.*other\); expected a delta of .*base"):
        load_deltas(str(tmp_path / "base"), {"x": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"d1: it is a delta of .*base \(\w{12}\); expected a delta of .*d2"):
        load_deltas(str(tmp_path / "d2"), {"x": str(tmp_path / "d1")})
    with pytest.raises(ConfigError, match=r"absent: no run.yaml, so no model folder"):
        load_deltas(str(tmp_path / "base"), {"x": str(tmp_path / "absent")})


def test_a_flattened_delta_equals_the_folder_of_the_whole_model(tmp_path, chain):
    names = [f"c{label}" for label in range(3)]
    save(tmp_path / "whole", chain[2], classes=names)
    save(tmp_path / "d", chain[2], tmp_path / "d1", classes=names)
    saved = flatten_model(str(tmp_path / "d"), str(tmp_path / "flat"))
    assert saved.share == 1
    flat, whole = tmp_path / "flat", tmp_path / "whole"
    assert storage.list_files(str(flat)) == storage.list_files(str(whole))
    assert [
        name for name in storage.list_files(str(flat)) if (flat / name).read_bytes() != (whole / name).read_bytes()
    ] == []


def test_the_verb_shows_and_flattens(tmp_path, chain, capsys):
    def result(*args: str) -> dict:
        assert main(["weights", *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    delta, whole = result("show", str(tmp_path / "d1")), result("show", str(tmp_path / "base"))
    sizes = {name: tensor.nbytes for name, tensor in chain[1].state_dict().items()}
    own = load_file(tmp_path / "d1" / "model.safetensors")
    assert delta == {
        "url": str(tmp_path / "d1"),
        "model": "vit_u2x2_8",
        "kind": "delta",
        "types": ["float32"],
        "base": str(tmp_path / "base"),
        "base_identity": identity_of(chain[0].state_dict()),
        "taken": len(sizes) - len(own),
        "kept": len(own),
        "bytes": sum(tensor.nbytes for tensor in own.values()),
        "whole": sum(sizes.values()),
        "share": sum(tensor.nbytes for tensor in own.values()) / sum(sizes.values()),
    }
    assert (whole["kind"], whole["base"], whole["taken"], whole["share"]) == ("whole", None, 0, 1)
    flat = result("flatten", str(tmp_path / "d2"), str(tmp_path / "flat"))
    assert (flat["kind"], flat["url"]) == ("whole", str(tmp_path / "flat"))
    assert is_same(load_model(str(tmp_path / "flat")).vit, chain[2])
    for args in (["show", "a", "b"], ["flatten", "a"]):
        with pytest.raises(SystemExit):
            main(["weights", *args])
        assert "expected" in capsys.readouterr().err
    assert main(["weights", "show", str(tmp_path / "absent")]) == 2


# ---- MLflow addresses ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[MlflowClient]:
    """An MLflow database with one experiment."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        client = MlflowClient()
        client.create_experiment("deltas", artifact_location=str(folder / "artifacts"))
        yield client


def new_run(store: MlflowClient, experiment: str = "deltas") -> str:
    return store.create_run(store.get_experiment_by_name(experiment).experiment_id).info.run_id


@pytest.fixture(scope="module")
def logged(store, tmp_path_factory) -> dict[str, str]:
    """A network registered as version 1 of `vit`, the champion, and its delta, registered as version 2."""
    folder = tmp_path_factory.mktemp("models")
    run_id = new_run(store)
    whole = log_model(run_id, save(folder / "base", fresh(), classes=list("abcde")))
    move_champion(store, register_model(store, whole, "vit", VersionScore("val/top1", 0.5), "val"))
    delta = log_model(new_run(store), save(folder / "d", tuned(fresh()), "models:/vit@champion", list("abcde")))
    register_model(store, delta, "vit", VersionScore("val/top1", 0.25), "val")
    return {"run": run_id, "whole": whole, "delta": delta}


def test_models_load_from_every_kind_of_mlflow_address(store, logged, tmp_path):
    store.log_artifacts(logged["run"], str(Path(resolve_uri(logged["whole"]))), "weights/model")
    addresses = ["models:/vit@champion", "models:/vit/1", logged["whole"]]
    addresses += [f"runs:/{logged['run']}/{path}" for path in ("vit_u2x2_8", "weights/model", "weights/model/")]
    for number, address in enumerate(addresses):
        for loaded in (load_model(address), open_weights(address)):
            assert is_same(loaded.vit, fresh()), address
        save(tmp_path / str(number), tuned(fresh()), address)
        assert is_same(load_model(str(tmp_path / str(number))).vit, tuned(fresh())), address
    family = load_deltas("models:/vit@champion", {"two": "models:/vit/2"})
    assert identity_of(family.member("two").state) == identity_of(tuned(fresh()).state_dict())
    assert resolve_uri("models") == "models"
    assert Path(resolve_uri("models:/vit/1")).is_dir()  # no copy
    assert main(["model", "models:/vit/1"]) == 0


def test_a_base_named_by_an_alias_is_pinned_to_its_version(store, logged, tmp_path):
    save(tmp_path / "d", tuned(fresh()), "models:/vit@champion")
    assert json.loads((tmp_path / "d" / "delta.json").read_text())["base"]["url"] == "models:/vit/1"
    store.set_registered_model_alias("vit", "champion", "2")
    try:
        assert is_same(load_model(str(tmp_path / "d")).vit, tuned(fresh()))
    finally:
        store.set_registered_model_alias("vit", "champion", "1")


def test_a_logged_delta_stays_a_delta_and_names_its_base(store, logged):
    place = Path(resolve_uri(logged["delta"]))
    assert sorted(file.name for file in place.iterdir()) == [
        "classes.json",
        "delta.json",
        "model.safetensors",
        "run.yaml",
    ]
    assert all(map(is_attention, load_file(place / "model.safetensors")))
    tags = {"vitray.base": "models:/vit/1", "vitray.base_identity": identity_of(fresh().state_dict())}
    assert tags.items() <= store.get_logged_model(logged["delta"].removeprefix("models:/")).tags.items()
    version = store.get_model_version("vit", "2")
    assert {name: version.tags[name] for name in tags} == tags
    link = "[models:/vit/1](#/models/vit/versions/1)"
    assert version.description.startswith(f"A delta of {link} (identity {tags['vitray.base_identity'][:12]})")
    whole = store.get_model_version("vit", "1")
    assert not whole.description
    assert "vitray.base" not in whole.tags
    assert "vitray.base" not in store.get_logged_model(logged["whole"].removeprefix("models:/")).tags


@pytest.mark.parametrize("folder", ["it's/runs/base", 'a "b"/runs/base'])
def test_the_version_of_a_delta_links_to_the_run_of_its_base(store, tmp_path, folder):
    base = save(tmp_path / folder / "model", fresh())
    run_id, name = new_run(store), folder[0]
    store.set_tag(run_id, "vitray.home", str(tmp_path / folder))
    register_model(store, log_model(new_run(store), save(tmp_path / "d", tuned(fresh()), base)), name, None, None)
    description = store.get_model_version(name, "1").description
    store.delete_registered_model(name)  # another test lists the registered models
    experiment = store.get_run(run_id).info.experiment_id
    link = f"[{base}](#/experiments/{experiment}/runs/{run_id})"
    assert description.startswith(f"A delta of {link} " if '"' not in folder else f"A delta of `{base}` ")


def test_a_served_delta_is_combined_with_its_base(logged, tmp_path):
    save(tmp_path / "whole", tuned(fresh()), classes=list("abcde"))
    request = [{"image": encoded(image)} for image in pictures(2)]
    answers = load_logged(logged["delta"]).predict(request)
    expected = load_logged(log_model(new_run(MlflowClient()), str(tmp_path / "whole"))).predict(request)
    assert answers == expected


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("models:/vit@champoin", r"vit has no alias champoin; it has champion \(version 1\); did you mean champion"),
        ("models:/vti@champion", "no model is registered as vti; registered are vit; did you mean vit"),
        ("models:/vit/7", "vit has no version 7; it has 1, 2"),
        ("models:/m-0", "there is no model m-0; registered are vit"),
        ("runs:/0123/model", "there is no run 0123"),
        (
            "models:/vit",
            "not an address of a model; expected models:/name@alias, models:/name/3, models:/m-<id> or runs:/",
        ),
    ],
)
def test_a_missing_model_is_named_with_the_existing_ones(logged, tmp_path, address, fault):
    with pytest.raises(ConfigError, match=f"{address}: .*{fault}"):
        load_model(address)
    with pytest.raises(ConfigError, match=fault):
        save(tmp_path / "d", fresh(), address)


def test_a_path_of_a_run_without_a_model_is_rejected(logged):
    with pytest.raises(ConfigError, match=r"runs:/\w+/nothing: no run.yaml, so no model folder"):
        load_model(f"runs:/{logged['run']}/nothing")


def test_an_unreachable_mlflow_is_one_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:geheim@127.0.0.1:9")
    assert main(["weights", "show", "models:/vit/1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vitray: models:/vit/1: MLflow at http://127.0.0.1:9 cannot find it")
    assert "geheim" not in error
    assert error.count("\n") == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"models:/vit/1: no .*mlruns.db; expected the folder that training ran in"):
        load_model("models:/vit/1")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Iterator[dict[str, object]]:
    """The answers of the server of MLFLOW_TRACKING_URI, {a part of the path: JSON, or None for an endless answer}."""
    answers: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            answer = next((value for part, value in answers.items() if part in self.path), {})
            self.wfile.write(b"" if answer is None else json.dumps(answer).encode())
            while answer is None and not over.wait(0.05):
                with suppress(OSError):
                    self.wfile.write(b" ")
                    self.wfile.flush()

        def log_message(self, *_) -> None:
            pass

    over = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
        yield answers
        over.set()
        server.shutdown()


def test_a_server_that_sends_byte_by_byte_holds_no_call(hostile, capsys):
    hostile |= {"model-versions": None, "registered-models": None}
    start = time.monotonic()
    assert main(["weights", "show", "models:/vit/1"]) == 2
    assert time.monotonic() - start < 20
    assert "cannot find it: TimeoutError: no whole answer within 1 s" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not answer: TimeoutError: no whole answer within 1 s"):
        holder_of("vit", "champion")


RUN = {"info": {"run_id": "0", "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0"}}
EVIL = {"name": "vit", "model_id": "../../evil"}
OUTPUT = {"outputs": {"model_outputs": [EVIL]}}


def test_a_download_that_arrives_byte_by_byte_is_given_up(hostile, monkeypatch, tmp_path):
    monkeypatch.setattr(addresses, "MINUTE", 0.5)
    hostile |= {"runs/get": {"run": RUN}, "artifacts?": {"files": [{"path": "a", "is_dir": False}]}}
    hostile["artifacts/"] = None
    with pytest.raises(ConfigError, match=r"runs:/0/vit: .*TimeoutError: only \d+ bytes arrived"):
        resolve_uri("runs:/0/vit")


def test_the_id_of_a_model_is_no_path(hostile):
    hostile |= {"runs/get": {"run": RUN | OUTPUT}, "/evil": {"model": {"info": EVIL}}}
    with pytest.raises(ConfigError, match=r"names a model '\.\./\.\./evil', expected m-<id>"):
        resolve_uri("runs:/0/vit")


def test_files_on_another_server_are_refused(hostile):
    hostile |= {"get-download-uri": {"artifact_uri": "http://127.0.0.1:9/x"}}
    hostile["model-versions/get?"] = {"model_version": {"name": "vit", "version": "1"}}
    with pytest.raises(
        ConfigError, match=r"models:/vit/1: its files are at http://127.0.0.1:9/x, outside of MLflow at"
    ):
        resolve_uri("models:/vit/1")


@pytest.mark.slow  # starts a server
def test_artifacts_of_a_server_are_downloaded_once(tmp_path, store, monkeypatch):
    server = Server(tmp_path)
    monkeypatch.setenv("VITRAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri.replace("://", "://somebody:geheim@"))
    server.start()
    try:
        client = MlflowClient()
        run_id = client.create_run(client.create_experiment("served")).info.run_id
        uri = log_model(run_id, save(tmp_path / "base", fresh(), classes=list("abcde")))
        assert client.get_logged_model(uri.removeprefix("models:/")).artifact_location.startswith("mlflow-artifacts:/")
        save(tmp_path / "d", tuned(fresh()), uri)
        assert is_same(load_model(str(tmp_path / "d")).vit, tuned(fresh()))
        client.log_artifacts(run_id, str(tmp_path / "base"), "weights")
        assert is_same(load_model(f"runs:/{run_id}/weights").vit, fresh())
        assert is_same(load_model(f"runs:/{run_id}/vit_u2x2_8").vit, fresh())
        shutil.rmtree(tmp_path / "artifacts")
        assert resolve_uri(uri) == str(
            tmp_path / "home" / "models" / uri.removeprefix("models:/") / "artifacts" / "model"
        )
        assert is_same(load_model(str(tmp_path / "d")).vit, tuned(fresh()))
        assert "geheim" not in (tmp_path / "d" / "delta.json").read_text()
    finally:
        server.kill()
