"""The stream: an order that is a function, exact batches for any number of workers, exact resumption, exact counts."""

import hashlib
import io
import json
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from math import gcd
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ray.exceptions import RayError
from test_layers import ROOT

from pipelines.__main__ import main
from vitray.config.augmentation import Augment, CenterCrop
from vitray.data.augment.draws import Draws, read_draws
from vitray.data.augment.keyed_random import raw_draws
from vitray.data.augment.ops_tensor import apply_draws
from vitray.data.augment.views import ViewKind
from vitray.data.shards import checking
from vitray.data.shards.manifest import Columns, Dataset, Duplicates, Rejects, Shard, Split, open_dataset, save_dataset
from vitray.data.shares import PAIR
from vitray.data.stream import decoding, epoch_order, ray_reader
from vitray.data.stream.batches import HostBatch, Share, StreamSpec
from vitray.data.stream.cache import decoded_split, forget_decoded
from vitray.data.stream.decoding import decode_positions, locate_rows, read_rows
from vitray.data.stream.epoch_order import DEAL, FIRST, LANES, REGION, Cut, EpochOrder, positions_of, ranks_of
from vitray.data.stream.prefetch import dealt_order
from vitray.data.stream.preview import sample_sheet
from vitray.data.stream.ray_reader import RayReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError
from vitray.system import storage

sys.path.insert(0, str(ROOT / "experiments"))
from measure_scaling import ThreadBroadcast

GROUPS = st.lists(st.integers(1, 400), min_size=1, max_size=40).map(np.array)
DIVIDED = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda pair: (pair[0] * pair[1], pair[1]))
# (global batch, workers) with at least one image for each worker
SLOW_WORKERS = [pytest.param(workers, marks=pytest.mark.slow) for workers in (3, 4)]
SHARED = st.tuples(st.integers(1, 300), st.integers(1, 20)).filter(lambda pair: pair[0] >= pair[1])


def shuffle_rows(groups, seed, epoch, identity="") -> np.ndarray:
    return EpochOrder(groups, None, (identity, seed, epoch)).at(np.arange(groups.sum()))[0]


# ---- the epoch order and the shares of workers -----------------------------------------------------------------------


@given(groups=GROUPS, seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_has_every_image_once(groups, seed, epoch):
    order = shuffle_rows(groups, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(groups.sum()))
    assert np.array_equal(order, shuffle_rows(groups, seed, epoch))


def test_the_order_is_a_function_of_dataset_seed_and_epoch():
    groups = np.full(60, 100)
    order = shuffle_rows(groups, 0, 0, "a")
    others = [shuffle_rows(groups, 0, 0, "b"), shuffle_rows(groups, 1, 0, "a"), shuffle_rows(groups, 0, 1, "a")]
    assert all((order != other).mean() > 0.99 for other in others)
    # Pinned, so that a later version of vitray or numpy resumes a run with the same images.
    assert order[:4].tolist() == [4825, 2871, 5842, 3037]
    assert hashlib.sha256(order.tobytes()).hexdigest()[:16] == "be8f5d2e53c3d509"
    copied = EpochOrder(groups, None, ("a", 0, 0), repeats=3).at(np.arange(6000))[0]
    assert hashlib.sha256(copied.tobytes()).hexdigest()[:16] == "f4fa62e8a37b7691"


def test_the_tasks_of_a_process_permute_an_epoch_once(monkeypatch):
    """The same key with other row groups, of another split or a hold-out, is another order."""
    keys = []
    monkeypatch.setattr(
        epoch_order, "raw_draws", lambda text, *rest, **skip: keys.append(text) or draws(text, *rest, **skip)
    )
    draws = raw_draws
    epoch_order._permute_groups.cache_clear()

    def permutations(groups, epoch):
        keys.clear()
        shuffle_rows(groups, 0, epoch, "a")
        return sum(key.startswith("groups ") for key in keys)

    wide, narrow = np.full(60, 100), np.full(60, 90)
    asked = [(wide, 0), (wide, 0), (wide, 1), (wide, 0), (wide, 1), (narrow, 1), (narrow, 1), (wide, 0)]
    assert [permutations(*each) for each in asked] == [1, 0, 1, 0, 0, 1, 0, 1]
    assert epoch_order._permute_groups.cache_info().currsize == 2


@given(shared=SHARED, step=st.integers(0, 9))
def test_workers_take_each_global_batch_exactly(shared, step):
    batch, workers = shared
    shares = [positions_of(step, batch, rank, workers) for rank in range(workers)]
    assert sorted(np.concatenate(shares)) == list(range(step * batch, (step + 1) * batch))
    sizes = [len(share) for share in shares]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 2
    if batch % workers == 0:
        assert min(sizes) == max(sizes)
    for rank, share in enumerate(shares):
        assert np.array_equal(share, np.sort(share))
        assert np.array_equal(share - step * batch, positions_of(0, batch, rank, workers))


@given(shared=SHARED)
def test_pairs_stay_together_unless_shares_are_odd_or_pairs_too_few(shared):
    batch, workers = shared
    dealt_singly = batch // 2 < workers or (batch % workers == 0 and batch // workers % 2)
    for rank in range(workers):
        share = positions_of(0, batch, rank, workers)
        if dealt_singly:
            assert np.array_equal(share, np.arange(rank, batch, workers))
        else:
            paired = share[share < batch // 2 * 2]
            assert (paired[0::2] % 2 == 0).all()
            assert (paired[1::2] == paired[0::2] + 1).all()


@given(divided=DIVIDED, step=st.integers(0, 9))
def test_equal_shares_are_dealt_in_turn(divided, step):
    batch, workers = divided
    unit = 2 if batch // workers % 2 == 0 else 1
    dealt = step * batch + np.arange(batch).reshape(-1, workers, unit)
    for rank in range(workers):
        assert np.array_equal(positions_of(step, batch, rank, workers), dealt[:, rank].ravel())


# ---- pairs, which mixup and cutmix mix -------------------------------------------------------------------------------


def pairs_of(groups, epoch=0, repeats=1) -> np.ndarray:
    """Return the rows of the pairs of an epoch, in order."""
    rows = EpochOrder(groups, None, ("", 0, epoch), repeats).at(np.arange(groups.sum()))[0]
    return rows[: len(rows) // 2 * 2].reshape(-1, 2)


def groups_of(rows, groups) -> np.ndarray:
    return np.searchsorted(np.cumsum(groups), rows, side="right")


def cifar_groups(size) -> np.ndarray:
    """Return the row groups of 50,000 images."""
    return np.diff([*range(0, 50_000, size), 50_000])


@given(groups=st.lists(st.integers(0, 128), min_size=1, max_size=60).map(np.array), repeats=st.integers(1, 4))
def test_no_pair_shares_a_row_group_unless_the_rest_of_an_epoch_has_too_few(groups, repeats):
    # With repeats, the epoch ends before the rest of the images.
    order = EpochOrder(groups, None, ("", 0, 0), repeats)
    positions = np.arange(groups.sum() // 2 * 2 * repeats)
    pairs = order.at(positions)[0].reshape(-1, 2)
    group_pairs, copy_numbers = groups_of(pairs, groups), order.at(positions)[1][::2]
    for copy in range(repeats):
        is_same = (group_pairs[:, 0] == group_pairs[:, 1])[copy_numbers == copy]
        whole, rest = np.split(is_same, [len(is_same) * 2 // REGION * REGION // 2])
        assert not whole.any()
        rest_groups = group_pairs[copy_numbers == copy][len(whole) :]
        largest = np.bincount(rest_groups.ravel()).max() if len(rest) else 0
        # The rows of a group that has more than half of all rows meet each other.
        assert rest.sum() <= max(0, largest - len(rest))


@pytest.mark.parametrize("size", [16, 128])
def test_pairs_are_as_random_as_if_drawn_from_the_whole_split(size):
    groups, watched = cifar_groups(size), np.arange(0, 50_000, 13)
    met, same = [], []
    for epoch in range(100):
        pairs = pairs_of(groups, epoch)
        partner = np.empty(50_000, np.int64)
        partner[pairs] = pairs[:, ::-1]
        met.append(partner[watched])
        group_pairs = groups_of(pairs[epoch::100], groups)
        same.append((group_pairs[:, 0] == group_pairs[:, 1]).mean())
    assert np.mean(same) <= 1.5 * (groups * (groups - 1)).sum() / 50_000 / 49_999
    met = np.sort(np.stack(met, axis=1))
    distinct = 1 + (np.diff(met) > 0).sum(axis=1)
    assert distinct.mean() > 99.5  # as of random pairs: 99.9
    assert distinct.min() >= 95
    # A partner is as likely from any part of the split.
    distance = (met - watched[:, np.newaxis]) % 50_000
    assert np.histogram(distance, 8, (0, 50_000))[0] == pytest.approx(distance.size / 8, rel=0.02)


@pytest.mark.parametrize("groups", [[101], [20, 20, 1], [30, 60]], ids=str)
def test_every_two_images_of_a_small_split_meet_and_any_is_left_out(groups):
    groups = np.array(groups)
    images = int(groups.sum())
    met, alone = np.eye(images, dtype=bool), set()
    for epoch in range(1500):
        pairs = pairs_of(groups, epoch)
        met[pairs[:, 0], pairs[:, 1]] = met[pairs[:, 1], pairs[:, 0]] = True
        alone |= {*range(images)} - {*pairs.ravel().tolist()}
    assert len(alone) == (images if images % 2 else 0)
    number = groups_of(np.arange(images), groups)
    may_meet = (number[:, np.newaxis] != number) | (groups[number] > images // 2)
    assert np.array_equal(met, may_meet | np.eye(images, dtype=bool))


@pytest.mark.parametrize(("size", "most"), [(150, 0.0), (500, 0.0042), (1000, 0.0084)])
def test_larger_row_groups_of_other_writers_are_paired_with_each_other(size, most):
    pairs = pairs_of(np.full(120_000 // size, size)) // size
    assert (pairs[:, 0] == pairs[:, 1]).mean() <= 1.5 * most


@given(groups=GROUPS, repeats=st.integers(1, 4))
def test_repeated_augmentation_repeats_first_images_and_exchanges_second_ones(groups, repeats):
    order = shuffle_rows(groups, 0, 0)
    rows, copy_numbers = EpochOrder(groups, None, ("", 0, 0), repeats).at(np.arange(len(order)))
    assert len(rows) == len(order)
    assert len({*zip(rows.tolist(), copy_numbers.tolist(), strict=True)}) == len(rows)
    pairs = pairs_of(groups, repeats=repeats)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    once = pairs_of(groups)[np.arange(len(pairs)) // repeats]
    assert np.array_equal(pairs[:, 0], once[:, 0])
    first = copy_numbers[: 2 * len(pairs) : 2] == 0
    assert np.array_equal(pairs[first], once[first])
    if repeats == 1:
        assert np.array_equal(rows, order)


@pytest.mark.parametrize("size", [16, 109, 128])
def test_copies_of_an_image_have_other_partners_and_mostly_the_same_step(size):
    groups, repeats, batch = np.full(20 * REGION // size, size), 3, 2048
    images = len(groups) * size // REGION * REGION
    order = EpochOrder(groups, None, ("", 0, 0), repeats)
    rows, copy_numbers = order.at(np.arange(images * repeats))
    by_copy = [rows[copy_numbers == copy].reshape(-1, 2) for copy in range(repeats)]
    partner = np.empty((repeats, rows.max() + 1), np.int64)
    for copy, pairs in enumerate(by_copy):
        assert np.array_equal(np.sort(pairs.ravel()), np.sort(by_copy[0].ravel()))  # each image once in each copy
        partner[copy, pairs] = pairs[:, ::-1]
        assert not (pairs[:, 0] // size == pairs[:, 1] // size).any()
    partner = np.sort(partner[:, by_copy[0].ravel()], axis=0)
    # Unless a lane's group has one or two rows in its second half.
    assert (partner[1:] != partner[:-1]).all(axis=0).mean() > 0.998
    steps = np.empty((repeats, rows.max() + 1), np.int64)
    steps[copy_numbers, rows] = np.arange(len(rows)) // batch
    used = steps[:, by_copy[0].ravel()]
    assert (used == used[0]).all(axis=0).mean() > 0.93


def test_the_copies_of_a_large_number_need_no_more_memory():
    order = EpochOrder(np.full(100, 100), None, ("", 0, 0), repeats=10_000)
    tracemalloc.start()
    _, copy_numbers = order.at(np.arange(0, 10_000, 7))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert copy_numbers.max() > 4990
    assert peak < 5 * 10**6


def test_each_place_of_an_epoch_is_as_likely_for_an_image():
    groups = np.full(50, 60)  # a whole region and a part of one
    places = np.array([np.argsort(shuffle_rows(groups, 0, epoch))[[0, 59, 1500]] for epoch in range(500)])
    assert scipy.stats.kstest(places.ravel() / 3000, "uniform").pvalue > 1e-3
    assert scipy.stats.binomtest(int((places % 2).sum()), places.size).pvalue > 1e-3


def test_a_worker_without_an_image_is_rejected():
    with pytest.raises(ValueError, match="a global batch of 3, expected at least an image for each of 4 workers"):
        positions_of(0, 3, 1, 4)


@given(
    shared=SHARED,
    repeats=st.integers(1, 3),
    rows=st.sampled_from([16, 128, 256, 1024]),
    held=st.sampled_from([0, 3000, 9000, 10**6]),
    steps=st.tuples(st.integers(0, 40), st.integers(1, 60)),
    hurried=st.booleans(),
    nodes=st.integers(1, 8),
)
def test_pieces_deal_each_worker_its_positions_in_turn(shared, repeats, rows, held, steps, hurried, nodes):
    batch, workers = shared
    cut = Cut(batch, workers, repeats, rows, held)
    cut = cut._replace(executions=gcd(cut.teams, nodes))
    readers = workers // cut.executions
    start, end = steps[0] * batch, (steps[0] + steps[1]) * batch
    pieces = list(cut.pieces(0, start, end, hurried=hurried))
    assert not hurried or pieces[0].end - start <= max(FIRST, rows)
    dealt_by = []
    for execution in range(cut.executions):
        own = [piece for piece in pieces if piece.team % cut.executions == execution]
        dealt_by.append([share for piece in own for share in cut.shares(piece)])
        assert len(dealt_by[-1]) % readers == 0
        ranks = range(execution, workers, cut.executions)
        assert sorted(cut.place(rank) for rank in ranks) == list(range(readers))
    positions = np.arange(start, end)
    for rank in range(workers):
        shares = dealt_by[rank % cut.executions][cut.place(rank) :: readers]
        assert all(np.array_equal(share, np.sort(share)) for share in shares)
        worker_positions = np.concatenate(shares)
        assert np.array_equal(np.sort(worker_positions), positions[ranks_of(positions, batch, workers) == rank])


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_ranks_are_dealt_to_the_nodes_in_turn(sizes, data):
    nodes = data.draw(st.permutations([str(node) for node, size in enumerate(sizes) for _ in range(size)]))
    order = dealt_order(nodes)
    assert order[0] == 0
    assert sorted(order) == list(range(len(nodes)))
    if len(set(sizes)) == 1:
        dealt, count = [nodes[rank] for rank in order], len(sizes)
        assert all(dealt[rank] == dealt[rank % count] for rank in range(len(nodes)))


@pytest.mark.parametrize("size", [160, 224, 384, 512])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 16, 24, 32, 64])
def test_a_task_reads_few_row_groups(workers, size):
    groups, batch = np.full(2000, 109), 1536
    cut = Cut.fitting(3 * size * size, 5 * 10**9, batch, workers)
    order, bounds = EpochOrder(groups, None, ("", 0, 0)), np.cumsum(groups)
    rows_read = rows_used = largest = 0
    for piece in cut.pieces(0, 0, 100 * batch):
        rows = order.at(np.concatenate(cut.shares(piece)))[0]
        rows_read += 109 * len(np.unique(np.searchsorted(bounds, rows, side="right")))
        rows_used, largest = rows_used + len(rows), max(largest, len(rows))
    assert rows_used == 100 * batch
    assert rows_read / rows_used <= 1.6
    assert largest <= max(1024, 16 * workers * cut.members)


@pytest.mark.parametrize(("memory", "rows"), [(5e9, 128), (100e9, 128), (400e9, 512), (1600e9, 1024)])
def test_64_workers_get_larger_blocks_where_memory_holds_eight_tasks_a_worker(memory, rows):
    cut = Cut.fitting(3 * 224 * 224, int(memory), 64 * 64, 64)
    assert cut.rows == rows * cut.members
    assert 8 * 64 * cut.rows * 224 * 224 * 3 <= memory or cut.rows <= 1024
    shares = [[len(share) for share in cut.shares(piece)] for piece in cut.pieces(0, 0, 16 * REGION)]
    assert {sum(lengths) for lengths in shares} == {min(cut.rows, 16 * REGION // 8)}


def test_neighbors_in_an_epoch_come_from_distant_rows():
    groups = np.full(1000, 100)
    order = shuffle_rows(groups, 0, 0)
    place = np.empty(len(order))
    place[order] = np.arange(len(order))
    assert abs(np.corrcoef(place, np.arange(len(order)))[0, 1]) < 0.1
    batches = (order // 100)[: len(order) // 256 * 256].reshape(-1, 256)
    assert min(len(set(batch.tolist())) for batch in batches) >= 16  # row groups in a batch
    assert REGION % (PAIR * LANES) == 0
    assert sorted(DEAL) == list(range(LANES))


def test_the_modules_of_the_coordinator_load_no_torch():
    code = "import sys, vitray.data.stream.ray_reader; print({'torch', 'torchvision', 'mlflow'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- on Ray ----------------------------------------------------------------------------------------------------------


def jpeg(index: int) -> bytes:
    rng = np.random.default_rng(index)
    pixels = rng.integers(0, 256, (4, 5, 3)).astype(np.uint8).repeat(6, 0).repeat(6, 1)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def write(folder, images: list[bytes], per_shard=900, row_group=100) -> Dataset:
    """Write a dataset of these images; the label of an image is its index modulo 7."""
    folder.mkdir()
    shards = []
    for start in range(0, len(images), per_shard):
        part = images[start : start + per_shard]
        name = f"train-{len(shards):05d}.parquet"
        numbers = range(start, start + len(part))
        columns = {"image": part, "label": [n % 7 for n in numbers], "key": [f"key {n}" for n in numbers]}
        pq.write_table(pa.table(columns), folder / name, compression="none", row_group_size=row_group)
        sizes = [min(row_group, len(part) - at) for at in range(0, len(part), row_group)]
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        size = (folder / name).stat().st_size
        shards.append(Shard(name=name, rows=len(part), bytes=size, sha256=sha256, row_groups=tuple(sizes)))
    split = Split(shards=tuple(shards), class_counts=(1,) * 7)
    no_rejects = {"rejects": Rejects(count=0, reasons={}), "duplicates": Duplicates(within={}, across=0, removed=0)}
    metadata = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "source": "test", "seed": 0, "settings": {}}
    dataset = Dataset(
        splits={"train": split}, classes=tuple("abcdefg"), columns=Columns(), url=str(folder), **metadata, **no_rejects
    )
    save_dataset(dataset)
    return open_dataset(str(folder))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """2500 images in 3 shards with 27 row groups: one full region of the epoch order and a part of another."""
    return write(tmp_path_factory.mktemp("stream") / "data", [jpeg(index) for index in range(2500)])


def train_stream(dataset, **kind) -> Stream:
    spec = StreamSpec("train", **({"batch": 48, "size": (16, 16), "crop": Augment(), "seed": 3} | kind))
    return Stream(dataset, spec, RayReader)


def on_workers(stream: Stream, workers: int, batches, nodes=1) -> list[list[HostBatch]]:
    """Return the batches of each worker; workers are concurrent threads, each with its own stream."""
    broadcast = ThreadBroadcast(workers)
    streams = [Stream(stream.dataset, stream.spec, RayReader) for _ in range(workers)]

    def work(rank: int) -> list[HostBatch]:
        return list(batches(streams[rank], Share(rank, workers, broadcast, nodes)))

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(work, range(workers)))
    for own in streams:
        for name, count in own.corrupt.items():
            stream.corrupt[name] = stream.corrupt.get(name, 0) + count
    return results


def finished(images: np.ndarray, *draws: Draws) -> np.ndarray:
    """Return the images after the augmentation that a worker applies."""
    views = torch.from_numpy(images.copy())
    for each in draws:
        apply_draws(views, each)
    return views.numpy()


def images_of_epoch(stream: Stream, workers: int, epoch=0, step=0, nodes=1) -> dict[int, tuple[int, int, str]]:
    """Return {position: (row, label, pixels)} of an epoch, and check the steps and shares of every worker."""
    images, start, end = {}, epoch * stream.steps + step, (epoch + 1) * stream.steps
    trained = on_workers(stream, workers, lambda own, share: own.train(start, end, share), nodes)
    for rank, batches in enumerate(trained):
        assert len(batches) == end - start
        for batch in batches:
            assert len(batch.images) == len(positions_of(0, stream.spec.batch, rank, workers))
            views = finished(batch.images, *batch.draws)
            for at, row, label, image in zip(batch.positions, batch.rows, batch.labels, views, strict=True):
                assert int(at) not in images
                images[int(at)] = int(row), int(label), hashlib.sha256(image.tobytes()).hexdigest()
    return images


@pytest.fixture(scope="module")
def one_worker(dataset, ray_cluster):
    return images_of_epoch(train_stream(dataset), 1)


def broken(folder, rows=(7, 130)):
    """A dataset of 300 images, some of which are cut off or no images."""
    images = [jpeg(index) for index in range(300)]
    for row in rows:
        images[row] = images[row][:40] if row % 2 else b"not an image"
    return write(folder / "broken", images, per_shard=100, row_group=30)


def test_the_limit_of_corrupt_images_counts_those_of_all_workers(tmp_path):
    dataset = broken(tmp_path)
    streams = [train_stream(dataset, batch=20, max_corrupt=0.01) for _ in range(2)]
    names = []
    for stream, rows in zip(streams, ([-1, 7, 7, 130], [7, 250, 251]), strict=True):
        stream._count_corrupt(np.array(rows))
        names += stream.new_corrupt()
    assert len(set(names)) == 4
    for stream in streams:
        with pytest.raises(ConfigError, match=r"4 of 300 images cannot be decoded, more than max_corrupt 0.01: "):
            stream.merge_corrupt(names)
        assert stream.new_corrupt() == []
        assert {name.rpartition("/")[2] for name in stream.corrupt} == {
            "train-00000.parquet:7",
            "train-00001.parquet:30",
            "train-00002.parquet:50",
            "train-00002.parquet:51",
        }


def test_an_evaluation_leaves_out_corrupt_images(tmp_path, monkeypatch):
    spec = StreamSpec("train", 32, (16, 16), CenterCrop(), max_corrupt=0.01)
    stream = Stream(broken(tmp_path), spec, RayReader)
    [images] = decode_positions([np.arange(300)], stream.rows, stream.order(None), stream.view(0))
    monkeypatch.setattr(ray_reader, "_started", lambda _: iter([images | {"epoch": np.array(0)}]))
    monkeypatch.setattr(stream._reader, "_evaluation", [None])
    batches = list(stream.evaluate(Share(0, 1)))
    assert {len(batch.images) for batch in batches} == {32}
    rows = np.concatenate([batch.rows for batch in batches]).tolist()
    assert rows == [row for row in range(300) if row not in (7, 130)]
    assert all(np.array_equal(batch.labels[: len(batch.rows)], batch.rows % 7) for batch in batches)
    assert len(stream.corrupt) == 2


def test_a_preview_leaves_out_corrupt_images(tmp_path):
    dataset = broken(tmp_path, rows=(0, 150))
    assert len(sample_sheet(dataset, "train", [ViewKind((16, 16), Augment())], (3, 1))) > 0
    with pytest.raises(ConfigError, match="none of 1 images of split train can be decoded"):
        sample_sheet(dataset, "train", [ViewKind((16, 16), Augment())], (1, 1))


@pytest.mark.ray
def test_the_stream_follows_the_planned_order(dataset, one_worker):
    stream = train_stream(dataset)
    planned = stream.order(0).at(np.arange(2500))[0]
    assert len(one_worker) == 2500 // 48 * 48
    assert [one_worker[at][:2] for at in range(len(one_worker))] == [
        (row, row % 7) for row in planned[: len(one_worker)]
    ]


@pytest.mark.ray
@pytest.mark.parametrize("workers", [2, *SLOW_WORKERS, 5])
def test_any_number_of_workers_sees_the_same_pixels(dataset, one_worker, workers):
    assert images_of_epoch(train_stream(dataset), workers) == one_worker


@pytest.mark.ray
def test_each_node_may_have_its_own_execution(dataset, one_worker, monkeypatch):
    execute, shares = RayReader._execute, []

    def observed(reader, pieces, cut, *, shuffled):
        shares.append({piece.team % cut.executions for piece in pieces})
        return execute(reader, pieces, cut, shuffled=shuffled)

    monkeypatch.setattr(RayReader, "_execute", observed)
    monkeypatch.setattr(ray_reader, "CPUS_PER_EXECUTION", 1)
    assert images_of_epoch(train_stream(dataset), 4, nodes=2) == one_worker
    assert sorted(shares, key=min) == [{0}, {1}]


@pytest.mark.parametrize(
    ("cpus", "nodes", "divided"),
    [
        ([96.0] * 8, 8, (8, True)),
        ([96.0] * 8 + [4.0], 8, (8, False)),  # the head decodes, too
        ([96.0] * 16, 16, (8, False)),  # one for two nodes
        ([96.0] * 3, 3, (1, False)),  # no team of 24 workers is on one of three nodes
        ([16.0] * 4, 4, (2, False)),
        ([4.0] * 8, 8, (1, False)),
        ([96.0], 1, (1, False)),
    ],
)
def test_large_nodes_have_their_own_executions(dataset, monkeypatch, cpus, nodes, divided):
    alive = [{"Alive": True, "Resources": {"CPU": number}} for number in cpus]
    lost = [{"Alive": False, "Resources": {"CPU": 96.0}}, {"Alive": True, "Resources": {}}]
    monkeypatch.setattr(ray_reader.ray, "nodes", lambda: [*alive, *lost])
    cut = Cut.fitting(3 * 16 * 16, 10**9, 16 * 8 * nodes, 8 * nodes)
    cut = RayReader(train_stream(dataset))._divided(cut, nodes)
    assert (cut.executions, cut.is_local) == divided


AUGMENT = Augment.model_validate({"policy": {"kind": "randaugment", "chance": 0.8}, "jitter": 0.3})
ON_DEVICE = AUGMENT.model_copy(update={"on": "device"})


@pytest.mark.parametrize("augment", [AUGMENT, Augment()])
def test_a_task_that_sends_draws_gives_the_same_views(tmp_path, augment):
    images = [jpeg(index) for index in range(100)]
    images[30] = b"not an image"  # its replacement has draws of its own
    stream = train_stream(write(tmp_path / "data", images), repeats=2, crop=augment)
    parts = [np.arange(40), np.arange(40, 40), np.arange(40, 100)]
    sent = stream.spec.kinds[0]._replace(crop=augment.model_copy(update={"on": "device"}))
    sending = stream.view(1)._replace(kinds=(sent,))
    whole = decode_positions(parts, stream.rows, stream.order(1), stream.view(1))
    crops = decode_positions(parts, stream.rows, stream.order(1), sending)
    for expected, block in zip(whole, crops, strict=True):
        assert block.keys() - expected.keys() == {"flip", "operation", "amount"}
        views = finished(block["image"], read_draws(block, augment))
        assert np.array_equal(views, expected["image"])
        assert all(np.array_equal(block[name], expected[name]) for name in expected.keys() - {"image"})


@pytest.mark.ray
@pytest.mark.parametrize(
    ("cache", "workers"), [pytest.param("none", 2, marks=pytest.mark.slow), ("none", 5), ("decoded", 3)]
)
def test_views_are_the_same_on_the_device(tmp_path, ray_cluster, cache, workers):
    small = write(tmp_path / "small", [jpeg(index) for index in range(300)])
    kind = {"repeats": 2, "batch": 20}
    plain = train_stream(small, crop=AUGMENT, **kind)
    [block] = decode_positions([np.arange(300)], plain.rows, plain.order(1), plain.view(1))
    views = [hashlib.sha256(view.tobytes()).hexdigest() for view in block["image"]]
    expected = dict(enumerate(zip(block["row"].tolist(), block["label"].tolist(), views, strict=True)))
    try:
        on_device = train_stream(small, crop=ON_DEVICE, cache=cache, **kind)
        assert images_of_epoch(on_device, workers, epoch=1) == expected
    finally:
        forget_decoded(small, "train")


@pytest.mark.ray
def test_only_decoding_processes_load_torch(dataset, ray_cluster):
    broadcast = ThreadBroadcast(2)
    streams = [train_stream(dataset).train(0, 50, Share(rank, 2, broadcast)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(next, streams))
    coordinators = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            coordinators += [child] if "SplitCoordinator" in " ".join(child.cmdline()) else []
    assert coordinators
    assert not any("libtorch" in library.path for child in coordinators for library in child.memory_maps())


@pytest.mark.ray
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_change_of_executions_changes_nothing(dataset, one_worker, monkeypatch, ahead):
    monkeypatch.setattr(ray_reader, "PIECES_AT_ONCE", 1)  # of 1,024 images: 21 steps
    monkeypatch.setattr(ray_reader, "PIECES_AHEAD", ahead)
    assert images_of_epoch(train_stream(dataset), 2) == one_worker


@pytest.mark.ray
def test_a_closed_stream_broadcasts_no_more(dataset, ray_cluster, monkeypatch):
    """After a rewind, the next stream would receive the broadcasts of the closed one."""
    monkeypatch.setattr(ray_reader, "PIECES_AT_ONCE", 1)
    monkeypatch.setattr(ray_reader, "PIECES_AHEAD", 1)  # the next execution starts with the first step
    broadcast, ended = ThreadBroadcast(2), []

    def broadcast_and_count(value, rank=0):
        value = broadcast(value, rank)
        ended.append(value)
        return value

    def read_one_batch(rank: int) -> None:
        batches = train_stream(dataset).train(0, 50, Share(rank, 2, broadcast_and_count))
        next(batches)
        batches.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read_one_batch, range(2)))
    assert len(ended) == 2 * 3  # the cut and two executions


def test_executions_of_several_workers_begin_short_and_double(dataset, monkeypatch):
    """Ray stores all pieces of an execution before it starts the first."""
    monkeypatch.setattr(ray_reader, "FIRST_PIECES", 2)
    monkeypatch.setattr(ray_reader, "PIECES_AT_ONCE", 8)
    stream = train_stream(dataset, memory=10**9)
    reader, steps = RayReader(stream), range(5, 2_000)
    cut = reader._cut(2, 1)
    executions, _ = reader._execution_ranges(steps, cut)
    assert [step for each in executions for step in each] == list(steps)
    rows = min(cut.rows, stream.steps * 48)  # of a piece
    first, most = 2 * rows // 48, 8 * rows // 48
    assert [len(each) for each in executions[:4]] == [first, 2 * first, 4 * first, most]


STEP_BYTES = 48 * 16 * 16 * 3


@pytest.mark.parametrize(("memory", "most"), [(3 * STEP_BYTES * 9, 9), (3 * STEP_BYTES - 1, 0), (10**9, 9042)])
def test_executions_in_bulk_double_while_memory_holds_three_and_shrink_at_the_end(dataset, memory, most):
    reader = RayReader(train_stream(dataset, in_bulk=True, memory=memory))
    cut = reader._cut(1, 1)
    assert reader._bulk(cut) == most
    assert reader._bulk(reader._cut(2, 1)) == RayReader(train_stream(dataset, memory=memory))._bulk(cut) == 0
    executions, ahead = reader._execution_ranges(range(5, 400), cut)
    assert [step for steps in executions for step in steps] == list(range(5, 400))
    if most:
        least = len(executions[0])
        assert least == max(1, cut.rows // 48) <= most
        for before, after in pairwise(executions):
            assert len(after) == min(2 * len(before), most, max(least, (400 - after.start) // 2), 400 - after.start)
        assert len(executions[-1]) <= least
        assert ahead == most  # the next one starts with the reading of each


@pytest.mark.ray
@pytest.mark.parametrize(("step", "memory"), [(0, None), (50, None), (0, 3 * STEP_BYTES * 9), (0, 3 * STEP_BYTES - 1)])
def test_executions_in_bulk_change_no_image(dataset, one_worker, step, memory):
    expected = {at: image for at, image in one_worker.items() if at >= step * 48}
    assert images_of_epoch(train_stream(dataset, in_bulk=True, memory=memory), 1, step=step) == expected


@pytest.mark.ray
def test_no_loop_of_ray_runs_beside_the_reading_in_bulk(dataset, ray_cluster):

    def loops() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]

    def wait_until(is_reached) -> bool:
        end = time.monotonic() + 60
        while not is_reached() and time.monotonic() < end:
            time.sleep(0.001)
        return is_reached()

    batches = train_stream(dataset, in_bulk=True, memory=3 * STEP_BYTES * 40).train(0, 60, Share(0, 1))
    next(batches)
    assert wait_until(lambda: len(loops()) > 0)  # of the second execution
    assert wait_until(lambda: not loops())
    assert len(list(batches)) == 59


@pytest.mark.ray
@pytest.mark.parametrize(("step", "workers"), [(1, 2), (50, 4), (51, 1)])
def test_a_cursor_resumes_on_another_number_of_workers(dataset, one_worker, step, workers):
    resumed = images_of_epoch(train_stream(dataset), workers, step=step)
    assert resumed == {at: image for at, image in one_worker.items() if at >= step * 48}


@pytest.mark.ray
def test_the_end_of_an_epoch_has_no_batches(dataset, ray_cluster):
    stream = train_stream(dataset)
    assert list(stream.train(stream.steps, stream.steps, Share(0, 1))) == []


@pytest.mark.ray
def test_epochs_and_seeds_differ_in_order_and_pixels(dataset, one_worker, ray_cluster):
    for stream, epoch in ((train_stream(dataset), 1), (train_stream(dataset, seed=4), 0)):
        other = images_of_epoch(stream, 1, epoch)
        assert sum(other[at][0] == one_worker[at][0] for at in other) < 20
        by_row = {row: pixels for row, _, pixels in one_worker.values()}
        assert sum(by_row.get(row) == pixels for row, _, pixels in other.values()) < 100


@pytest.mark.ray
def test_repeated_copies_differ_and_spread_over_workers(dataset, ray_cluster):
    stream = train_stream(dataset, repeats=3)
    images = images_of_epoch(stream, 2)
    assert images == images_of_epoch(stream, 1)
    rows = [images[at][0] for at in range(len(images))]
    assert rows[0] == rows[2] == rows[4] != rows[6]
    assert len({rows[1], rows[3], rows[5]}) == 3
    assert len({images[at][2] for at in (0, 2, 4)}) == 3


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 2, *SLOW_WORKERS])
def test_an_evaluation_streams_every_image_exactly_once(dataset, ray_cluster, workers):
    stream = Stream(dataset, StreamSpec("train", batch=128, size=(16, 16), crop=CenterCrop()), RayReader)
    rows, steps = [], set()
    for rank, batches in enumerate(on_workers(stream, workers, Stream.evaluate)):
        steps.add(len(batches))
        for batch in batches:
            assert len(batch.images) == len(positions_of(0, 128, rank, workers))
            assert not batch.images[len(batch.rows) :].any()
            rows += batch.rows.tolist()
    assert steps == {20}
    assert sorted(rows) == list(range(2500))


@pytest.mark.ray
def test_masked_rows_are_neither_trained_on_nor_evaluated(dataset, ray_cluster):
    is_used = np.arange(int(locate_rows(dataset, "train").starts[-1])) % 3 == 0
    stream = train_stream(dataset, row_mask=is_used)
    assert stream.images == is_used.sum()
    trained = [row for row, _, _ in images_of_epoch(stream, 2).values()]
    assert len(trained) == len(set(trained)) == stream.steps * stream.spec.batch
    assert is_used[trained].all()
    batches = list(chain.from_iterable(on_workers(stream, 2, Stream.evaluate)))
    evaluated = np.concatenate([batch.rows for batch in batches])
    assert np.array_equal(np.sort(evaluated), np.flatnonzero(is_used))


@pytest.mark.ray
def test_a_worker_without_a_real_image_still_takes_its_steps(tmp_path, ray_cluster):
    dataset = write(tmp_path / "few", [jpeg(index) for index in range(5)])
    stream = Stream(dataset, StreamSpec("train", batch=8, size=(16, 16), crop=CenterCrop()), RayReader)
    batches = on_workers(stream, 4, Stream.evaluate)
    assert [[len(batch.rows) for batch in own] for own in batches] == [[2], [2], [1], [0]]
    assert {len(batch.images) for own in batches for batch in own} == {2}


@pytest.mark.ray
def test_a_corrupt_image_is_named_counted_and_replaced_by_the_next(tmp_path, ray_cluster):
    dataset = broken(tmp_path)
    streams = {workers: train_stream(dataset, batch=20, max_corrupt=0.01) for workers in (1, 2)}
    epochs = {workers: images_of_epoch(stream, workers) for workers, stream in streams.items()}
    assert epochs[1] == epochs[2]
    order = streams[1].order(0).at(np.arange(300))[0]
    for row in (7, 130):
        at = int(np.flatnonzero(order == row)[0])
        assert epochs[1][at][:2] == (order[(at + 1) % 300], order[(at + 1) % 300] % 7)
    for stream in streams.values():
        counts = {name.rpartition("/")[2]: count for name, count in stream.corrupt.items()}
        assert counts == {"train-00000.parquet:7": 1, "train-00001.parquet:30": 1}
    with pytest.raises(ConfigError, match=r"images cannot be decoded, more than max_corrupt 0.001: .*parquet:"):
        images_of_epoch(train_stream(dataset, batch=20), 1)


@pytest.mark.ray
def test_a_task_that_dies_is_retried_without_changing_the_sequence(dataset, ray_cluster):
    stream = train_stream(dataset, size=(160, 160))
    undisturbed = images_of_epoch(stream, 1)
    batches = stream.train(0, stream.steps, Share(0, 1))
    received, decoding = [], []
    # An idle process has no task name. If no decoding process is ever found, `next` raises at the end of the epoch.
    while not decoding:
        received.append(next(batches))
        # The decoding processes among the descendants of this test.
        decoding = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.status() != psutil.STATUS_ZOMBIE and "decode_piece" in " ".join(process.cmdline())
        ]
    for process in decoding:
        process.kill()
    received += batches
    hashes = {
        int(at): (int(row), int(label), hashlib.sha256(image.tobytes()).hexdigest())
        for batch in received
        for at, row, label, image in zip(batch.positions, batch.rows, batch.labels, batch.images, strict=True)
    }
    assert hashes == undisturbed


@pytest.mark.ray
def test_a_decoded_split_changes_no_pixel_and_is_decoded_once(tmp_path, ray_cluster):
    images = [jpeg(index) for index in range(700)]
    images[7] = images[7][:40]
    images[130] = b"not an image"
    small = write(tmp_path / "small", images, per_shard=300, row_group=50)
    kind = {"batch": 20, "max_corrupt": 0.01}
    plain = train_stream(small, **kind)
    evaluation = {"batch": 64, "size": (16, 16), "crop": CenterCrop(), "max_corrupt": 0.01}
    evaluated = list(Stream(small, StreamSpec("train", **evaluation), RayReader).evaluate(Share(0, 1)))
    expected = images_of_epoch(plain, 1), images_of_epoch(plain, 1, epoch=1)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: decoded_split(small, "train"), range(4)))
    assert all(each.blocks == results[0].blocks for each in results)
    for shard in (tmp_path / "small").glob("*.parquet"):
        shard.unlink()  # the cached stream must not read the files again
    cached = train_stream(small, cache="decoded", **kind)
    try:
        assert (images_of_epoch(cached, 2), images_of_epoch(cached, 3, epoch=1)) == expected
        cached_evaluation = Stream(small, StreamSpec("train", cache="decoded", **evaluation), RayReader)
        for one, other in zip(cached_evaluation.evaluate(Share(0, 1)), evaluated, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
        assert cached.corrupt.keys() == plain.corrupt.keys()
        assert len(cached.corrupt) == 2
    finally:
        forget_decoded(small, "train")
    forget_decoded(small, "train")


@pytest.mark.ray
def test_a_split_that_could_not_be_decoded_is_decoded_again(tmp_path, ray_cluster):
    dataset = write(tmp_path / "away", [jpeg(index) for index in range(30)])
    rows = locate_rows(dataset, "train")
    [shard] = rows.addresses
    read_rows(np.arange(1), rows)  # this process keeps it open
    Path(shard).rename(tmp_path / "elsewhere")
    with pytest.raises(RayError):
        decoded_split(dataset, "train")
    (tmp_path / "elsewhere").rename(shard)
    assert len(decoded_split(dataset, "train").blocks) == 1
    forget_decoded(dataset, "train")


@pytest.mark.ray
def test_a_split_that_decodes_to_more_than_half_the_object_store_is_rejected(tmp_path, ray_cluster):
    # 12 images of 16 million pixels in a store of 500 MB
    Image.new("RGB", (4000, 4000)).save(content := io.BytesIO(), "JPEG")
    large = write(tmp_path / "large", [content.getvalue()] * 12)
    stream = train_stream(large, batch=4, cache="decoded")
    message = r"'train' decodes to 549 MiB, expected at most 0.5 of the cluster's object store of 477 MiB; set"
    with pytest.raises(ConfigError, match=message):
        next(stream.train(0, stream.steps, Share(0, 1)))


@pytest.mark.ray
@pytest.mark.timeout(120)  # without the large buffer the streams would deadlock
def test_an_idle_stream_releases_its_cpu(dataset, ray_cluster):
    broadcast = ThreadBroadcast(6)
    # Six blocks a task, and a limit that the first tasks reach.
    streams = [train_stream(dataset, size=(224, 224), memory=100 * 10**6) for _ in range(6)]
    unread = [stream.train(0, stream.steps, Share(rank, 6, broadcast)) for rank, stream in enumerate(streams)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(next, unread))
    assert len(images_of_epoch(train_stream(dataset), 1)) == 2500 // 48 * 48


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # torch's DataLoader forks
@pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding:DeprecationWarning"
)  # from the data loader of the comparison
def test_the_ingest_benchmark_measures_and_draws(dataset, ray_cluster, tmp_path, capsys):
    args = ["--image-size", "16", "--images", "256", "--rounds", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(["bench", "ingest", dataset.url, *args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["pipeline"] for row in result["rows"]][:2] == ["plain loop", "stream"]
    assert all(row["cpu_us"] >= 0 and row["images_per_second"] > 0 for row in result["rows"])
    assert (tmp_path / "ingest.png").stat().st_size > 1000


def test_the_ingest_benchmark_measures_the_places_of_an_augmentation(dataset, tmp_path, capsys):
    args = ["--image-size", "16", "--images", "128", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", "ingest", dataset.url, *args, "--augment", "three_augment", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    places = [
        "crop and flip",
        "crop and flip, scaled",
        "on tasks: the task",
        "on device: the task",
        "on device: the worker, ",
    ]
    assert all(row["pipeline"].startswith(place) for row, place in zip(rows, places, strict=True))
    assert rows[0]["cpu_ratio"] == 1


def test_a_preview_is_a_picture_of_the_dataset(dataset, tmp_path, capsys):
    target = tmp_path / "look.png"
    args = ["shard", "--look", dataset.url, str(target), "size=32", "samples=3", "copies=2"]
    assert main([*args, "augment.policy=three_augment", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["samples"] == 3
    with Image.open(target) as sheet:
        assert sheet.width > 3 * 144
    for override, message in (("augment.flp=1", "did you mean flip"), ("split=trian", "did you mean train")):
        assert main([*args, override]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.ray
def test_a_batch_larger_than_the_split_is_rejected(dataset, capsys, ray_cluster):
    with pytest.raises(ConfigError, match="a global batch of 2501, expected at most the 2500 images"):
        next(train_stream(dataset, batch=2501).train(0, 1, Share(0, 1)))
    assert main(["bench", "ingest", dataset.url, "--images", "10", "--image-size", "16"]) == 2
    assert "--batch 64: expected at most the 10 images of an epoch" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        main(["bench", "ingest", dataset.url, "--rounds", "0"])
    assert exited.value.code == 2


def test_a_process_opens_a_remote_shard_once(tmp_path, s3_server, monkeypatch):
    write(s3_server / "bucket/shards", [jpeg(index) for index in range(40)], per_shard=2, row_group=1)
    rows = locate_rows(open_dataset("s3://bucket/shards"), "train")
    opened, filesystem = [], storage.filesystem
    monkeypatch.setattr(storage, "filesystem", lambda url: opened.append(url) or filesystem(url))
    for start in (0, 1):
        stored = read_rows(np.arange(start, 40, 2), rows)
        assert [label for _, label, _ in stored.values()] == [row % 7 for row in range(start, 40, 2)]
    assert len(opened) == len(set(opened)) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:99] + bytes([content[99] ^ 1]) + content[100:], "its sha256 is not that"),
        (lambda content: content + b"x", "has [0-9]+ bytes, expected [0-9]+ bytes as in dataset.json"),
    ],
)
def test_a_local_shard_with_other_content_is_refused(tmp_path, change, message):
    dataset = write(tmp_path / "data", [jpeg(index) for index in range(40)], per_shard=20, row_group=5)
    rows = locate_rows(dataset, "train")
    shard = Path(rows.addresses[1])
    shard.write_bytes(change(shard.read_bytes()))
    assert len(read_rows(np.arange(20), rows)) == 20, "the other shard is whole"
    with pytest.raises(ConfigError, match=f"train-00001.parquet: {message}"):
        read_rows(np.arange(20, 40), rows)


def test_a_remote_shard_of_another_size_or_layout_is_refused(tmp_path, s3_server):
    """Its content would have to be fetched."""
    dataset, url = (
        write(tmp_path / "d", [jpeg(index) for index in range(20)], row_group=5),
        f"s3://bucket/{tmp_path.name}",
    )
    [shard] = dataset.splits["train"].shards
    storage.upload(tmp_path / "d" / shard.name, f"{url}/{shard.name}")
    for wrong, message in (
        ({"bytes": shard.bytes + 1}, f"has {shard.bytes} bytes, expected {shard.bytes + 1} bytes as in dataset.json"),
        ({"row_groups": (10, 10)}, "its row groups are not those of dataset.json"),
    ):
        split = dataset.splits["train"].model_copy(update={"shards": (shard.model_copy(update=wrong),)})
        save_dataset(dataset.model_copy(update={"splits": {"train": split}, "url": url}))
        rows = locate_rows(open_dataset(url), "train")
        with pytest.raises(ConfigError, match=f"train-00000.parquet: {message}"):
            read_rows(np.arange(20), rows)


def test_a_shard_is_read_whole_once_on_a_machine(tmp_path, monkeypatch):
    dataset = write(tmp_path / "data", [jpeg(index) for index in range(40)], per_shard=20, row_group=5)
    read, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file.name) or digest(file, name))
    rows = locate_rows(dataset, "train")
    for _ in range(2):
        checking.check_shard.cache_clear()  # as in another process
        read_rows(np.arange(40), rows)
    assert read == rows.addresses
    shard = Path(rows.addresses[0])
    shard.write_bytes(shard.read_bytes())  # the same bytes, in a file that has changed
    checking.check_shard.cache_clear()
    read_rows(np.arange(40), rows)
    assert read == [*rows.addresses, rows.addresses[0]]


def test_a_call_that_has_checked_shards_for_long_leaves_the_others_to_later_calls(tmp_path, monkeypatch):
    dataset = write(tmp_path / "data", [jpeg(index) for index in range(40)], per_shard=10, row_group=5)
    checked = []
    monkeypatch.setattr(decoding, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(decoding, "check_shard", lambda url, *_: checked.append(url) or time.sleep(0.03))
    rows = locate_rows(dataset, "train")
    assert len(read_rows(np.arange(40), rows)) == 40
    assert checked == rows.addresses[: len(checked)]
    assert 1 <= len(checked) <= 2


def test_a_task_permutes_the_row_groups_once_and_draws_each_region_once(dataset, monkeypatch):
    stream, drawn = train_stream(dataset), []
    monkeypatch.setattr(
        epoch_order, "raw_draws", lambda *key, **skip: drawn.append((key, skip)) or raw_draws(*key, **skip)
    )
    # Four members of a team, whose positions lie in both regions.
    parts = [np.arange(2000 + member, 2100, 4) for member in range(4)]
    blocks = list(decode_positions(parts, stream.rows, stream.order(0), stream.view(0)))
    assert [block["position"].tolist() for block in blocks] == [part.tolist() for part in parts]
    assert len(drawn) == 3


def test_a_missing_split_names_the_nearest(dataset):
    with pytest.raises(ConfigError, match=r"no split 'trian', expected one of train; did you mean train"):
        Stream(dataset, StreamSpec("trian", batch=8, size=(16, 16), crop=CenterCrop()), RayReader)


settings.register_profile("plan", deadline=None, max_examples=60)
settings.load_profile("plan")
