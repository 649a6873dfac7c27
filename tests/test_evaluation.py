"""Evaluation: every image counts once for any batch size, and the scores equal those of a slow loop."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from vitray.config import load_run
from vitray.config.augmentation import Normalize
from vitray.config.sections import TaskTraits
from vitray.data.augment.mixing import DeviceBatch
from vitray.data.stream.batches import HostBatch, Share
from vitray.metrics.multilabel import score_labels
from vitray.metrics.scores import MAX_MISTAKES, EvaluationSet, Mistake, evaluate, evaluate_labels, evaluate_loss
from vitray.tasks.build import build_task
from vitray.training import evaluator
from vitray.training.evaluator import Scorer


class Reader(torch.nn.Module):
    """A network that returns the first 7 pixels as logits."""

    def forward(self, images_BCHW):
        return images_BCHW.flatten(1)[:, :7]


PLAIN = Normalize(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
CPU = torch.device("cpu")


class PixelLoss(torch.nn.Module):
    """A task without labels: the mean of the first pixel."""

    def forward(self, images_BCHW):
        return images_BCHW.flatten(1)[:, 0].mean()

    def pictures(self, images_BCHW):
        return images_BCHW[None]

    def read_metrics(self, *, training):
        assert not training
        return {}


def data(count):
    rng = np.random.default_rng(count)
    images, labels = torch.from_numpy(rng.integers(0, 256, (count, 4, 4, 3), np.uint8)), rng.integers(0, 7, count)
    # More equal mistakes than are kept, and these the most confident ones.
    images[10:30], labels[10:30] = torch.zeros(4, 4, 3, dtype=torch.uint8), 3
    images[10:30, 0, 0, 0] = 255
    return images, labels


def batches(images, labels, size, device=CPU):
    """The images in batches of `size`, the last one padded with black images of weight 0."""
    for start in range(0, len(images), size):
        yield batch_of(images[start : start + size], labels[start : start + size], start, size, device)


def batch_of(images, labels, start, size, device=CPU):
    real = len(images)
    pixels = torch.cat([images, torch.zeros(size - real, 4, 4, 3, dtype=torch.uint8)])
    padded = torch.from_numpy(np.concatenate([labels, np.zeros((size - real, *labels.shape[1:]), labels.dtype)]))
    rows = np.arange(start, start + real)
    return DeviceBatch(pixels.to(device), padded.to(device), np.arange(start, start + size), rows)


def score(images, labels, size, count=None):
    return score_of(batches(images, labels, size), count or len(images))


def score_of(parts, count, vit=None, device=CPU):
    return evaluate(Reader() if vit is None else vit, EvaluationSet(parts, count, PLAIN), 7, device, nullcontext())


def loss_of(parts, count, forward=None, device=CPU):
    data = EvaluationSet(parts, count, PLAIN)
    return evaluate_loss(PixelLoss(), TaskTraits(()), data, device, nullcontext(), forward)


def check_slow_loop(scored, images, labels):
    """Compare a score with a loop over single images in float64."""
    logits = (images.permute(0, 3, 1, 2).double() / 255).flatten(1)[:, :7].numpy()
    confusion, top1, top5, loss, wrong = np.zeros((7, 7), int), 0, 0, 0.0, []
    for row, (values, label) in enumerate(zip(logits, labels, strict=True)):
        order = np.argsort(-values, kind="stable")
        shares = np.exp(values) / np.exp(values).sum()
        confusion[label, order[0]] += 1
        top1 += int(order[0] == label)
        top5 += int(label in order[:5])
        loss -= np.log(shares[label])
        if order[0] != label:
            wrong.append((shares[order[0]], row, label, order[0]))
    count = len(images)
    assert (scored.images, scored.top1, scored.top5) == (count, top1 / count, top5 / count)
    assert scored.loss == pytest.approx(loss / count, rel=1e-6)
    assert np.array_equal(scored.confusion, confusion)
    recalls = [confusion[label, label] / confusion[label].sum() for label in range(7) if confusion[label].any()]
    assert scored.others["mean_per_class"] == pytest.approx(np.mean(recalls), rel=1e-12)
    worst = sorted(wrong, reverse=True)[:MAX_MISTAKES]
    assert [(each.row, each.label, each.predicted) for each in scored.mistakes] == [each[1:] for each in worst]
    assert [each.probability for each in scored.mistakes] == pytest.approx([each[0] for each in worst], rel=1e-6)


@pytest.mark.parametrize("size", [1, 4, 9, 64])
@pytest.mark.parametrize("count", [50, 5])
def test_the_score_equals_a_slow_loop_for_any_batch_size(size, count):
    images, labels = data(50)
    images, labels = images[:count], labels[:count]
    scored = score(images, labels, size)
    check_slow_loop(scored, images, labels)
    assert all(type(value) is kind for value, kind in zip(scored.mistakes[0], (float, int, int, int), strict=True))
    if count == 50:  # of equal mistakes, the last rows come first
        assert [each.row for each in scored.mistakes] == list(range(29, 13, -1))
    else:
        assert 0 < len(scored.mistakes) <= 5


def test_the_top_5_is_exact():
    rng = np.random.default_rng(1)
    images = torch.from_numpy(np.stack([rng.permutation(48) for _ in range(40)]).reshape(40, 4, 4, 3).astype(np.uint8))
    labels = rng.integers(0, 7, 40)
    logits = images.permute(0, 3, 1, 2).flatten(1)[:, :7].numpy()
    hits = sum(label in np.argsort(-values)[:5] for values, label in zip(logits.astype(int), labels, strict=True))
    assert 0 < hits < 40
    assert score(images, labels, 16).top5 == hits / 40


def test_of_equal_logits_the_lower_class_comes_first():
    rng = np.random.default_rng(2)
    images = torch.from_numpy(rng.integers(0, 3, (200, 4, 4, 3)).astype(np.uint8))
    labels = rng.integers(0, 7, 200)
    scored = score(images, labels, 16)
    logits = images.permute(0, 3, 1, 2).flatten(1)[:, :7].numpy()
    orders = [np.argsort(-values.astype(int), kind="stable") for values in logits]
    ranks = [order.tolist().index(label) for order, label in zip(orders, labels, strict=True)]
    assert scored.top1 == np.mean([rank == 0 for rank in ranks])
    assert scored.top5 == np.mean([rank < 5 for rank in ranks])
    assert scored.top1 == np.trace(scored.confusion) / 200


def test_a_batch_of_padding_adds_nothing():
    images, labels = data(50)
    padding = batch_of(images[:0], labels[:0], 50, 9)
    plain, padded = score(images, labels, 9), score_of([*batches(images, labels, 9), padding], 50)
    assert all(np.array_equal(one, other) for one, other in zip(plain[:5], padded[:5], strict=True))
    assert plain.mistakes == padded.mistakes
    assert loss_of([*batches(images, labels, 9), padding], 50).loss == loss_of(batches(images, labels, 9), 50).loss


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_a_mean_loss_counts_no_padding(size):
    images, labels = data(50)
    scored = loss_of(batches(images, labels, size), 50)
    assert scored.loss == pytest.approx(float(images[:, 0, 0, 0].double().mean() / 255), rel=1e-6)
    assert np.array_equal(scored.pictures[0], images[: min(8, size)].permute(0, 3, 1, 2).float() / 255)


def states_of(count: int) -> np.ndarray:
    """The states of 7 classes; some are unknown."""
    return np.random.default_rng(7).choice(np.array([0, 0, 1, -1], np.int8), (count, 7))


def labels_score_of(parts, count):
    return evaluate_labels(Reader(), EvaluationSet(parts, count, PLAIN), 7, CPU, nullcontext())


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_the_score_of_several_labels_is_that_of_all_images_at_once(size):
    images, states = data(50)[0], states_of(50)
    scored = labels_score_of(batches(images, states, size), 50)
    probabilities = 1 / (1 + np.exp(-(images.permute(0, 3, 1, 2).double() / 255).flatten(1)[:, :7].numpy()))
    found = score_labels(probabilities.astype(np.float32), states, [str(row) for row in range(50)], draws=2)
    assert (scored.images, scored.top1, scored.main) == (50, None, ("map", scored.map))
    assert scored.map == pytest.approx(found.intervals["map"].estimate, rel=1e-9)
    known = states >= 0
    losses = -np.where(states == 1, np.log(probabilities), np.log(1 - probabilities))
    assert scored.loss == pytest.approx(losses[known].mean(), rel=1e-6)
    assert scored.thresholds == pytest.approx([each.best_threshold for each in found.classes], rel=1e-6)


def evaluate_share(rank: int, folder: str) -> None:
    """Evaluate the images of one of two workers; the first saves the score."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    images, labels = data(50)
    parts = list(batches(images, labels, 4))[rank::2]
    parts += [batch_of(images[:0], labels[:0], 52, 4)] * rank
    scored, loss = score_of(parts, 50), loss_of(parts, 50).loss
    states = states_of(50)
    several = list(batches(images, states, 4))[rank::2]
    several += [batch_of(images[:0], states[:0], 52, 4)] * rank
    labeled = labels_score_of(several, 50)
    if rank == 0:
        mistakes = [tuple(mistake) for mistake in scored.mistakes]
        of_labels = labeled.images, labeled.loss, labeled.map, labeled.thresholds
        torch.save((scored.images, scored.loss, scored.top1, scored.top5, mistakes, loss, of_labels), f"{folder}/score")
        np.save(f"{folder}/confusion.npy", scored.confusion)
    dist.destroy_process_group()


def test_two_workers_get_the_score_of_one(tmp_path):
    torch.multiprocessing.spawn(evaluate_share, (str(tmp_path),), nprocs=2)
    images, labels = data(50)
    alone = score(images, labels, 4)
    *sums, mistakes, loss, of_labels = torch.load(tmp_path / "score", weights_only=True)
    assert sums == pytest.approx(list(alone[:4]), rel=1e-12)
    assert [Mistake(*mistake) for mistake in mistakes] == alone.mistakes
    assert np.array_equal(np.load(tmp_path / "confusion.npy"), alone.confusion)
    assert loss == pytest.approx(loss_of(batches(images, labels, 4), 50).loss, rel=1e-12)
    labeled = labels_score_of(batches(images, states_of(50), 4), 50)
    assert of_labels[0] == labeled.images
    assert of_labels[1] == pytest.approx(labeled.loss, rel=1e-12)
    assert of_labels[2:] == (labeled.map, labeled.thresholds)


def test_a_missing_or_doubled_image_stops_the_evaluation():
    images, labels = data(10)
    for claimed in (9, 11):
        with pytest.raises(AssertionError, match="10 images were counted"):
            score(images, labels, 4, claimed)


def test_a_corrupt_image_counts_in_no_score():
    images, labels = data(50)
    kept = np.arange(50) % 10 != 3  # five are missing in their batches
    parts = [
        batch_of(images[at : at + 10][kept[:10]], labels[at : at + 10][kept[:10]], at, 10) for at in range(0, 50, 10)
    ]
    corrupt = EvaluationSet(parts, 50, PLAIN, lambda: list("edcba"))
    scored = evaluate(Reader(), corrupt, 7, CPU, nullcontext())
    assert scored.corrupt == list("abcde")
    assert scored.images == 45
    plain = score_of(parts, 45)
    assert (scored.loss, scored.top1, scored.top5) == (plain.loss, plain.top1, plain.top5)
    lost = evaluate_loss(PixelLoss(), TaskTraits(()), corrupt, CPU, nullcontext())
    assert (lost.images, lost.loss) == (45, loss_of(parts, 45).loss)
    with pytest.raises(AssertionError, match="49 images were counted"):
        evaluate(Reader(), corrupt._replace(corrupt=lambda: ["a"] * 4), 7, CPU, nullcontext())


def test_the_network_returns_to_training():
    images, labels = data(3)
    reader = Reader().train()
    evaluate(reader, EvaluationSet(batches(images, labels, 2), 3, PLAIN), 7, CPU, nullcontext())
    assert reader.training


# ---- the device is never waited for ----------------------------------------------------------------------------------


class Waiting(Reader):
    """A network that waits for the device."""

    def forward(self, images_BCHW):
        return super().forward(images_BCHW) + images_BCHW.sum().item()


def batches_before_a_wait(evaluation, device):
    """The number of batches read before the host reads a number: tensors of the meta device have none."""
    read = []

    def counted():
        for batch in batches(*data(50), 9, device):
            read.append(batch)
            yield batch
        read.append("the end")

    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        evaluation(counted(), 50, device=device)
    return len(read)


def test_an_evaluation_waits_for_the_device_once_at_its_end():
    meta = torch.device("meta")
    assert batches_before_a_wait(score_of, meta) == 7
    assert batches_before_a_wait(loss_of, meta) == 7
    assert batches_before_a_wait(lambda *args, device: score_of(*args, Waiting(), device), meta) == 1


@pytest.mark.gpu
def test_no_batch_of_an_evaluation_waits_for_a_gpu():
    device = torch.device("cuda")

    def watched():
        parts = list(batches(*data(50), 9, device))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield from parts
        finally:
            torch.cuda.set_sync_debug_mode("default")

    check_slow_loop(score_of(watched(), 50, device=device), *data(50))
    assert loss_of(watched(), 50, device=device).loss == pytest.approx(loss_of(batches(*data(50), 9), 50).loss)
    with pytest.raises(RuntimeError, match="synchroniz"):
        score_of(watched(), 50, Waiting(), device)


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["labels", "no labels"])
def test_padded_batches_are_compiled_once(kind):
    torch.compiler.reset()
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph

    network = Reader() if kind == "labels" else PixelLoss()
    forward = torch.compile(network, backend=backend, dynamic=False)
    images, labels = data(50)
    for _ in range(2):
        parts = batches(images, labels, 9)
        if kind == "labels":
            check_slow_loop(score_of(parts, 50, forward), images, labels)
        else:
            assert loss_of(parts, 50, forward).loss == loss_of(batches(images, labels, 9), 50).loss
    assert len(compiled) == 1


class Noticing(torch.nn.Module):
    """A network that notices its compilation; it computes nothing, so that no C++ compiler starts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("eager", torch.eye(7)[0].expand(8, 7).clone())
        self.register_buffer("compiled", torch.eye(7)[1].expand(8, 7).clone())

    def forward(self, _images_BCHW):
        return self.compiled if torch.compiler.is_compiling() else self.eager


class Val:
    """An evaluation stream of ten images of 32 x 32 pixels, none of them corrupt."""

    images = 10
    corrupt = ()

    def check_corrupt(self, names):
        assert not names

    def evaluate(self, _share):
        for start in (0, 8):
            real = min(8, 10 - start)
            images, labels = np.zeros((8, 32, 32, 3), np.uint8), np.zeros(8, np.int64)
            positions = np.arange(start, start + 8)
            yield HostBatch(images, labels, positions, positions[:real], 0)


@pytest.mark.parametrize("compile_it", ["false", "true"])
def test_evaluation_is_compiled_when_training_is(compile_it, monkeypatch):
    torch.compiler.reset()
    settings = ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=7", "evaluate.examples=0"]
    run = load_run(None, [*settings, f"compute.compile={compile_it}"])
    task = build_task(run)
    task.vit = Noticing()
    scorer = Scorer(SimpleNamespace(run=run), Val(), task, Share(0, 1), CPU)
    expected = 0.0 if compile_it == "true" else 1.0
    assert [scorer.score().top1 for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(("limit", "passes"), [(10 * 32 * 32 * 3 // 2, 1), (10 * 32 * 32 * 3 // 2 - 1, 3)])
def test_images_that_fit_are_decoded_once_for_all_evaluations(monkeypatch, limit, passes):
    """On each worker of two half of them, whose limit decides for both."""
    monkeypatch.setattr(evaluator, "KEPT_BYTES", limit)
    run = load_run(None, ["model.name=vit_u2x1_8", "model.image_size=32", "model.num_classes=7", "evaluate.examples=0"])
    task, val, read = build_task(run), Val(), []
    task.vit = Noticing()
    monkeypatch.setattr(val, "evaluate", lambda share: read.append(share) or Val.evaluate(val, share), raising=False)
    scorer = Scorer(SimpleNamespace(run=run), val, task, Share(0, 2), CPU)
    first, *others = [scorer.score() for _ in range(3)]
    assert (first.images, first.loss) == (10, others[0].loss) == (10, others[1].loss)
    assert len(read) == passes
