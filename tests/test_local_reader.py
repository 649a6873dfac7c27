"""Images decoded by processes of this machine: those of the order, bit for bit; no process outlives its use."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from test_layers import ROOT
from test_stream import broken, jpeg, train_stream, write

from vitray.config.augmentation import Augment, CenterCrop
from vitray.data.augment.decode import decode_image
from vitray.data.decode_processes import DecodeProcesses
from vitray.data.stream.batches import Share, StreamSpec
from vitray.data.stream.decoder import DecodeThread
from vitray.data.stream.decoding import decode_positions, decoded_bytes
from vitray.data.stream.epoch_order import positions_of
from vitray.data.stream.local_reader import LocalReader
from vitray.data.stream.stream import Stream
from vitray.errors import ConfigError, RunError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """2,500 images in 27 row groups: one full region of the order and a part of another."""
    return write(tmp_path_factory.mktemp("local") / "data", [jpeg(index) for index in range(2500)])


@pytest.fixture(scope="module")
def processes():
    with DecodeProcesses(3) as started:
        yield started


def local(stream: Stream, processes: DecodeProcesses) -> Stream:
    return Stream(stream.dataset, stream.spec, lambda own: LocalReader(own, processes))


def expected(stream: Stream, step: int, rank: int, workers: int):
    """The images of a step, decoded here, all at once."""
    epoch, within = divmod(step, stream.steps)
    positions = positions_of(within, stream.spec.batch, rank, workers)
    [images] = decode_positions([positions], stream.rows, stream.order(epoch), stream.view(epoch))
    return stream._batch(images, len(positions), epoch)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ({}, 1),
        ({}, 3),
        ({"batch": 50}, 2),
        ({"repeats": 3}, 2),
        ({"cache": "decoded"}, 1),
        ({"cache": "decoded", "repeats": 3}, 2),
        ({"crop": Augment.model_validate({"policy": "randaugment", "on": "device"})}, 1),
        ({"row_mask": np.arange(2500) % 3 != 0}, 1),
        ({"row_mask": np.arange(2500) % 3 != 0, "balance": {"a": 4.0, "c": 0.3}}, 3),
    ],
)
def test_each_step_has_its_images(dataset, processes, kind, workers):
    wanted = train_stream(dataset, **kind)
    first, last = wanted.steps - 3, wanted.steps + 5  # from within one epoch into the next
    for rank in range(workers):
        batches = list(local(wanted, processes).train(first, last, Share(rank, workers)))
        assert len(batches) == last - first
        for step, batch in zip(range(first, last), batches, strict=True):
            own = expected(wanted, step, rank, workers)
            for name in ("images", "labels", "positions", "rows", "epoch"):
                assert np.array_equal(getattr(batch, name), getattr(own, name)), name
            for drawn, wanted_draws in zip(batch.draws, own.draws, strict=True):
                for column, other in zip(drawn, wanted_draws, strict=True):
                    assert np.array_equal(column, other)


def test_an_evaluation_has_each_image_once_in_order_without_corrupt_ones(tmp_path, processes):
    spec = StreamSpec("train", 32, (16, 16), CenterCrop(), max_corrupt=0.01)
    stream = Stream(broken(tmp_path), spec, lambda own: LocalReader(own, processes))
    rows = []
    for workers in (1, 2):
        each = [list(stream.evaluate(Share(rank, workers))) for rank in range(workers)]
        assert {len(batches) for batches in each} == {10}
        assert {len(batch.images) for batches in each for batch in batches} == {32 // workers}
        rows.append(sorted(np.concatenate([batch.rows for batches in each for batch in batches]).tolist()))
    assert rows == [[row for row in range(300) if row not in (7, 130)]] * 2
    assert len(stream.corrupt) == 2


def test_pixels_are_kept_for_all_epochs_and_streams(tmp_path, monkeypatch):
    """The second epoch and an evaluation decode no image again."""
    dataset, thread = broken(tmp_path), DecodeThread()  # of 300 images, two corrupt ones
    evaluated = StreamSpec("train", 30, (16, 16), CenterCrop(), max_corrupt=0.01, cache="decoded")
    specs = [*(train_stream(dataset, batch=30, max_corrupt=0.01, cache=each).spec for each in ("decoded", "none"))]
    kept, plain, evaluation = (
        Stream(dataset, spec, lambda own: LocalReader(own, thread)) for spec in (*specs, evaluated)
    )
    decoded = []

    def counted(content):
        decoded.append(image := decode_image(content))
        return image

    monkeypatch.setattr("vitray.data.stream.decoder.decode_image", counted)
    monkeypatch.setattr("vitray.data.stream.decoding.decode_image", counted)
    batches = list(kept.train(0, 2 * kept.steps, Share(0, 1)))
    assert len(list(evaluation.evaluate(Share(0, 1)))) == 10
    assert len(decoded) == 298
    for batch, wanted in zip(batches, plain.train(0, 2 * plain.steps, Share(0, 1)), strict=True):
        assert np.array_equal(batch.images, wanted.images)
        assert np.array_equal(batch.rows, wanted.rows)
    thread.close()


def test_pixels_beyond_half_of_the_free_memory_are_refused(dataset, processes, monkeypatch):
    memory = SimpleNamespace(available=7 * 2**20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    kept = train_stream(dataset, cache="decoded")
    assert decoded_bytes(kept.rows) == sum(decode_image(jpeg(index)).size for index in range(2500))
    message = r"'train' decodes to \d+ MiB, expected at most 0.5 of this machine's free memory of 7 MiB; set"
    with pytest.raises(ConfigError, match=message):
        local(kept, processes)


def test_an_error_of_a_process_is_the_stream_s_own(tmp_path, processes):
    stream = local(train_stream(broken(tmp_path), batch=32), processes)
    with pytest.raises(ConfigError, match="images cannot be decoded, more than max_corrupt"):
        list(stream.train(0, stream.steps, Share(0, 1)))
    with DecodeProcesses(2) as killed:
        whole = local(train_stream(write(tmp_path / "whole", [jpeg(at) for at in range(300)])), killed)
        batches = whole.train(0, 100, Share(0, 1))
        next(batches)
        for child in killed._children:
            os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="a process that decodes images ended with status -9"):
            list(batches)


def test_processes_end_with_the_one_that_was_killed():
    code = (
        "import time; from vitray.data.decode_processes import DecodeProcesses\n"
        "with DecodeProcesses(2): print('started', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.kill()
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_ctrl_c_is_for_the_process_that_trains(dataset):
    with DecodeProcesses(1) as processes:
        batches = local(train_stream(dataset), processes).train(0, 30, Share(0, 1))
        next(batches)
        os.kill(processes._children[0].pid, signal.SIGINT)
        time.sleep(0.1)
        assert len(list(batches)) == 29
