"""Several views of each image: decoded once, with draws of their own, the same on tasks and device, on any workers."""

import math

import numpy as np
import pytest
import torch
from test_augment import encoded, photo
from test_layers import ROOT
from test_stream import jpeg, on_workers, write

from vitray.config import load_run
from vitray.config.augmentation import Augment, DinoColors, RandomResizedCrop
from vitray.config.self_supervised import BY_DATA, by_data
from vitray.config.views import LARGE, SMALL, Views
from vitray.data.augment.crops import augment_image
from vitray.data.augment.draws import draw_policy
from vitray.data.augment.keyed_random import generator
from vitray.data.augment.masks import draw_view_masks
from vitray.data.augment.views import ViewKind, view_kinds
from vitray.data.stream import decoding
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.decoder import DecodeThread
from vitray.data.stream.decoding import decode_positions
from vitray.data.stream.local_reader import LocalReader
from vitray.data.stream.prefetch import Prefetcher
from vitray.data.stream.ray_reader import RayReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError

LARGE_VIEWS = ViewKind((24, 32), Augment(crop=RandomResizedCrop(scale=(0.4, 1.0)), policy=LARGE), 2)
SMALL_VIEWS = ViewKind((8, 8), Augment(crop=RandomResizedCrop(scale=(0.05, 0.4)), policy=SMALL), 3)
KINDS = (LARGE_VIEWS, SMALL_VIEWS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write(tmp_path_factory.mktemp("views") / "data", [jpeg(index) for index in range(90)])


def spec_of(*kinds: ViewKind, **settings) -> StreamSpec:
    return StreamSpec("train", 20, (1, 1), Augment(), seed=3, views=kinds)._replace(**settings)


def local(dataset, *kinds: ViewKind) -> Stream:
    return Stream(dataset, spec_of(*kinds), lambda own: LocalReader(own, DecodeThread()))


def on_device(kind: ViewKind) -> ViewKind:
    return kind._replace(crop=kind.crop.model_copy(update={"on": "device"}))


def block_of(dataset, *kinds: ViewKind, epoch=1) -> dict[str, np.ndarray]:
    stream = local(dataset, *kinds)
    [block] = decode_positions([np.arange(30)], stream.rows, stream.order(epoch), stream.view(epoch))
    return block


# ---- draws of each view ----------------------------------------------------------------------------------------------


def test_a_view_is_a_function_of_seed_epoch_image_and_view(dataset, monkeypatch):
    decoded = []
    monkeypatch.setattr(decoding, "decode_image", lambda data: decoded.append(data) or photo(50, 40, len(data)))
    block = block_of(dataset, *KINDS)
    assert len(decoded) == 30  # once for five views
    stream = local(dataset, *KINDS)
    stored = decoding.read_rows(np.unique(block["row"]), stream.rows)
    for number, kind in enumerate(KINDS):
        views = block["image1" if number else "image"]
        assert views.shape == (30, kind.number, *kind.size, 3)
        for at, row in enumerate(block["row"].tolist()):
            data, _, key = stored[row]
            for view in range(kind.number):
                rng = generator(3, 1, key, 0, f":{number}.{view}")
                wanted = augment_image(photo(50, 40, len(data)), kind.crop, kind.size, rng, view=view)
                assert np.array_equal(views[at, view], wanted)


def test_a_view_does_not_change_with_the_number_of_others(dataset):
    block = block_of(dataset, *KINDS)
    more = block_of(dataset, LARGE_VIEWS._replace(number=4), SMALL_VIEWS._replace(number=1))
    assert np.array_equal(more["image"][:, :2], block["image"])
    assert np.array_equal(more["image1"], block["image1"][:, :1])
    assert not np.array_equal(block["image"][:, 0], block["image"][:, 1])
    assert "image1" not in block_of(dataset, LARGE_VIEWS)


def test_the_device_gives_the_pixels_of_the_tasks(dataset):
    tasks, device = local(dataset, *KINDS), local(dataset, *map(on_device, KINDS))
    pairs = zip(tasks.train(2, 6, Share(0, 1)), device.train(2, 6, Share(0, 1)), strict=True)
    for own, sent in pairs:
        assert (len(own.draws), len(sent.draws)) == (0, 2)
        assert not np.array_equal(own.images, sent.images)
        [finished] = Prefetcher(iter([sent]), torch.device("cpu"))
        assert np.array_equal(finished.images.numpy(), own.images)
        assert np.array_equal(finished.views.numpy(), own.views)


def test_scaled_decoding_has_the_pixels_that_the_finest_view_needs(tmp_path):
    large = write(tmp_path / "large", [encoded(photo(400, 300, index), "JPEG", quality=90) for index in range(6)])
    scaled = [kind._replace(crop=kind.crop.model_copy(update={"decode": "scaled"})) for kind in KINDS]
    stream = Stream(large, spec_of(*scaled, batch=6), lambda own: LocalReader(own, DecodeThread()))
    full = Stream(large, spec_of(*KINDS, batch=6), lambda own: LocalReader(own, DecodeThread()))
    [own], [other] = (list(each.train(0, 1, Share(0, 1))) for each in (stream, full))
    for views, whole in ((own.images, other.images), (own.views, other.views)):
        assert not np.array_equal(views, whole)
        assert np.abs(views.astype(int) - whole).mean() < 12


def test_dinos_colors_come_as_often_and_as_strong_as_they_say():
    policy = DinoColors(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1, blur=(1.0, 0.1), solarize=(0.0, 0.2))
    for view, (blur, solarize) in enumerate([(1.0, 0.0), (0.1, 0.2), (0.1, 0.2)]):
        drawn = [draw_policy(policy, (9, 9), generator(0, 0, "d", copy), view) for copy in range(4000)]
        names = [[operation.name for operation in each] for each in drawn]
        for name, chance in {"hue": 0.8, "gray": 0.2, "blur": blur, "solarize": solarize}.items():
            found = np.mean([name in each for each in names])
            assert found == pytest.approx(chance, abs=0 if chance in (0, 1) else 0.03), (view, name)
        jitter = [each[:4] for each in names if "hue" in each]
        assert {tuple(sorted(each)) for each in jitter} == {("brightness", "color", "contrast", "hue")}
        assert len({tuple(each) for each in jitter}) == 24  # in every order
        amounts = {name: [op.amount for each in drawn for op in each if op.name == name] for name in names[0]}
        for name, low, high in (("brightness", 0.6, 1.4), ("contrast", 0.7, 1.3), ("color", 0.8, 1.2)):
            if name in amounts:
                assert low <= min(amounts[name]) < low + 0.02
                assert high - 0.02 < max(amounts[name]) <= high


@pytest.mark.parametrize(("size", "share"), [((224, 300), 1.0), ((96, 96), 1.0), ((48, 32), 1 / 3)])
def test_dinos_blur_is_less_on_small_views(size, share):
    policy = DinoColors(jitter=0.0, gray=0.0, blur=(1.0,))
    sigmas = [draw_policy(policy, size, generator(0, 0, "d", copy))[0].amount for copy in range(2000)]
    assert 0.1 * share <= min(sigmas) < 0.11 * share
    assert 1.99 * share < max(sigmas) <= 2.0 * share


# ---- steps and workers -----------------------------------------------------------------------------------------------


def test_workers_share_a_step_and_a_later_start_has_the_same_views(dataset):
    [whole] = [list(local(dataset, *KINDS).train(3, 7, Share(0, 1)))]
    parts = [list(local(dataset, *KINDS).train(3, 7, Share(rank, 3))) for rank in range(3)]
    for step, batch in enumerate(whole):
        shares = [part[step] for part in parts]
        order = np.argsort(np.concatenate([each.positions for each in shares]))
        for name in ("images", "views", "labels", "rows"):
            assert np.array_equal(np.concatenate([getattr(each, name) for each in shares])[order], getattr(batch, name))
    [later] = local(dataset, *KINDS).train(6, 7, Share(0, 1))
    assert np.array_equal(later.views, whole[-1].views)
    assert all(views.any(axis=(2, 3, 4)).all() for views in (later.images, later.views))


def test_an_evaluation_has_the_same_views_each_time_and_pads_them(dataset):
    stream = local(dataset, *KINDS)
    first, second = ([*stream.evaluate(Share(0, 1))] for _ in range(2))
    assert [len(batch.rows) for batch in first] == [20, 20, 20, 20, 10]
    assert first[-1].views.shape == (20, 3, 8, 8, 3)
    assert not first[-1].views[10:].any()
    for own, other in zip(first, second, strict=True):
        assert np.array_equal(own.views, other.views)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_data_gives_the_same_views(ray_cluster, dataset):
    streams = [Stream(dataset, spec_of(*kinds), RayReader) for kinds in (KINDS, tuple(map(on_device, KINDS)))]
    for stream in streams:
        wanted = local(dataset, *stream.spec.views)
        for batch, own in zip(stream.train(0, 6, Share(0, 1)), wanted.train(0, 6, Share(0, 1)), strict=True):
            assert np.array_equal(batch.images, own.images)
            assert np.array_equal(batch.views, own.views)
            for drawn, other in zip(batch.draws, own.draws, strict=True):
                assert all(np.array_equal(*columns) for columns in zip(drawn, other, strict=True))
    both = on_workers(streams[0], 2, lambda own, share: own.train(0, 2, share))
    assert sorted(len(batch.images) for batches in both for batch in batches) == [10] * 4


# ---- masks of views --------------------------------------------------------------------------------------------------


def test_masks_are_a_function_of_seed_epoch_position_and_view():
    mask = load_run(None, TASK).task.mask
    whole = draw_view_masks(mask, (8, 8), 5, 2, range(40), 2)
    assert np.array_equal(draw_view_masks(mask, (8, 8), 5, 2, [17, 3], 2), whole[[17, 3]])
    assert np.array_equal(draw_view_masks(mask, (8, 8), 5, 2, range(40), 3)[:, :2], whole)
    for other in (draw_view_masks(mask, (8, 8), 5, 3, range(40), 2), draw_view_masks(mask, (8, 8), 6, 2, range(40), 2)):
        assert not np.array_equal(other, whole)
    assert draw_view_masks(mask, (8, 8), 5, 2, [], 2).shape == (0, 2, 64)


def test_masks_hide_as_much_as_they_say():
    mask = load_run(None, [*TASK, "task.mask.chance=0.6"]).task.mask
    shares = draw_view_masks(mask, (8, 8), 0, 0, range(2000), 1).mean(axis=2).ravel()
    assert (shares > 0).mean() == pytest.approx(0.6, abs=0.03)
    hidden = shares[shares > 0]
    assert hidden.min() >= 6 / 64
    assert hidden.max() <= 0.5
    assert hidden.mean() == pytest.approx(0.3, abs=0.02)


# ---- settings --------------------------------------------------------------------------------------------------------

TASK = ["task=self_distillation", "model.num_classes=null", "model.name=vit_u2x1_4", "model.image_size=32"]


def sizes_of(*settings: str) -> tuple:
    run = load_run(None, [*TASK, *settings])
    kinds = view_kinds(run.data.chosen_views, run.model.image_shape, run.model.shape.patch, run.data.augment)
    return tuple((kind.number, kind.size) for kind in kinds)


def test_sizes_follow_the_network_unless_they_are_set():
    assert sizes_of() == ((2, (32, 32)), (8, (12, 12)))  # 13.7 is nearer to 3 patches than to 4
    assert Views().small_size((224, 224), 16) == (96, 96)  # DINO's
    chosen = "data.views={global: {count: 3, size: 24}, local: {count: 4, size: 8}}"
    assert sizes_of(chosen) == ((3, (24, 24)), (4, (8, 8)))
    assert sizes_of("data.views.local=null") == ((2, (32, 32)),)


def test_a_kind_of_views_completes_its_own_policy():
    views = load_run(None, [*TASK, "data.views.global.policy.gray=0", "data.views.local.policy=none"]).data.views
    assert views.large.policy == LARGE.model_copy(update={"gray": 0.0})
    assert views.small.policy.kind == "none"
    assert Views().large.policy == LARGE


def test_a_recipe_of_views_loads_to_the_same_run(tmp_path):
    run = load_run(None, [*TASK, "data.views.global.scale=[0.5, 1]"])
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert load_run(tmp_path / "run.yaml") == run
    assert "data.views.global.policy.blur" in run.dotted()


@pytest.mark.parametrize("images", [1, 20_000, 20_001, 50_000, 10**9])
def test_a_number_of_images_has_one_row(images):
    row = by_data(images)
    assert images <= row.images
    assert all(images > other.images for other in BY_DATA[: BY_DATA.index(row)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.views.local.size=10"], "data.views.local.size: got 10, expected a multiple of the patch of vit_u2x1_4"),
        (["data.views.global.size=30"], "data.views.global.size: got 30, expected a multiple of the patch"),
        (["data.views.local.size=36"], "data.views.local.size: got 36, expected at most 32, the side of a global view"),
        (["data.augment.policy=three_augment"], "data.augment.policy does not apply to task self_distillation: set"),
        (["data.repeats=2"], "data.repeats: got 2, expected 1: task self_distillation has data.views in its place"),
        (["optim.batch=1"], "optim.batch: got 1, expected at least 2: task self_distillation compares images"),
        (["compute.local_batch=8"], "compute.local_batch: got 8 with task self_distillation, expected null: its loss"),
        (["compute.compile=max-autotune"], "compute.compile: got max-autotune with task self_distillation, whose loss"),
        (["optim.ema={}"], "optim.ema: got an average with task self_distillation, expected null: its teacher is one"),
        (
            ["task.compares=class_token", "model.class_token=false", "model.pool=mean"],
            "task.compares: got class_token, which model.class_token false leaves out; expected patches, or pool",
        ),
        (
            ["task={kind: self_distillation, dino: 0, ibot: 0}"],
            "task: dino and ibot: got 0 and 0, expected at least one of them above 0",
        ),
        (["task.ibot=0", "task.shared_head=false"], "shared_head: got false with ibot 0, expected true"),
        (["data.views={global: {count: 1}, local: null}"], "data.views: got one view, expected at least two"),
        (["task.dino=0", "guard.on_collapse=stop"], "guard.on_collapse stop needs evaluate.probes with knn or rank"),
        (["data.val=null", "guard.on_collapse=stop"], "guard.on_collapse stop needs evaluate.probes with knn or rank"),
        (["model.name=vit_u2x1_16_conv"], "task.ibot: got 1 with vit_u2x1_16_conv, whose stem shows masked pixels"),
        (["optim={weight_decay: 0, weight_decay_end: 0.4}"], "weight_decay_end: got 0.4 with weight_decay 0"),
        (
            ["data.views.globl.count=2"],
            "data.views.globl: unknown setting, expected one of global, local; did you mean",
        ),
        (
            ["model.num_classes=10"],
            "model.num_classes: got 10, expected null: task self_distillation learns no classes",
        ),
    ],
)
def test_bad_settings_get_one_message(settings, message):
    given = {setting.partition("=")[0] for setting in settings}
    with pytest.raises(ConfigError) as error:
        load_run(None, [*(each for each in TASK if each.partition("=")[0] not in given), *settings])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


RELATIVE = ("model.class_token=false", "model.pool=mean", "model.positions=relative")


def test_other_tasks_have_no_views():
    with pytest.raises(
        ConfigError, match=r"data\.views does not apply to task supervised, which takes one view of each"
    ):
        load_run(None, ["data.views.local.count=3"])
    with pytest.raises(ConfigError, match=r"model\.positions relative are those of one grid, and some views have"):
        load_run(None, [*TASK, *RELATIVE])
    with pytest.raises(ConfigError, match=r"model\.positions relative are those of one grid, and some views have"):
        load_run(None, [*TASK, *RELATIVE, "data.views={global: {size: 16}, local: null}"])
    assert load_run(None, [*TASK, *RELATIVE, "data.views={local: null}"]).model.positions.kind == "relative"


def test_the_page_has_the_table_of_settings_by_data():
    rows = [row for row in (ROOT / "docs/pretraining.md").read_text().splitlines() if row.endswith(" epochs |")]
    assert len(rows) == len(BY_DATA)
    for text, row in zip(rows, BY_DATA, strict=True):
        start, end = row.of_task("self_distillation")["teacher_temperature"]
        most = "more" if math.isinf(row.images) else f"{row.images:,}"
        temperature = f"{end:g}" if start == end else f"{start:g} to {end:g}"
        cells = (most, f"{row.prototypes:,}", temperature, f"{row.momentum:g}", f"{row.epochs} epochs")
        assert text == f"| {' | '.join(cells)} |"
