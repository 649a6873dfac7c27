"""Probabilities follow the loss of the training, everywhere alike: sigmoids after bce, else a softmax."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset, write_network
from mlflow.exceptions import MlflowException

from vitray import Run, load_model, save_model
from vitray.data.augment.crops import crop_center
from vitray.data.augment.decode import decode_image
from vitray.data.augment.mixing import normalized
from vitray.data.augment.views import decode_views, usable
from vitray.evaluation.evaluate import Request, compute_evaluation
from vitray.inference.answers import probabilities
from vitray.inference.listing import list_images
from vitray.inference.models import describe_network
from vitray.inference.networks import views_of
from vitray.inference.parts import arrays_of, load_networks, predict_batch
from vitray.inference.plan import Options, Plan, check_options
from vitray.models.probabilities import probabilities_of, probability_of
from vitray.serving.pyfunc import ImageClassifier
from vitray.weights import load_deltas

BCE = {"task.loss": "bce"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "softmax"),
        (BCE, "sigmoid"),
        ({"task": {"kind": "finetune", "weights": "w", "loss": "bce"}}, "sigmoid"),
        ({"task": {"kind": "finetune", "weights": "w"}}, "softmax"),
        ({"task": {"kind": "masked"}, "model.num_classes": None}, "softmax"),
    ],
)
def test_the_loss_decides(changes, expected):
    assert probability_of(Run().replace(changes)) == expected


@pytest.mark.parametrize("changes", [{}, BCE])
def test_every_door_gives_the_same_probabilities(tmp_path, changes):
    write_dataset(tmp_path / "data", {"val": 12})
    run, vit, classes = load_model(str(write_network(tmp_path / "plain")))
    url = str(tmp_path / "model")
    save_model(url, run.replace(changes), vit, classes)
    plan_images = list_images(str(tmp_path / "data"))
    encoded = [image.content for image in plan_images.read(range(12))]
    pixels = [decode_image(content) for content in encoded]
    views = [crop_center(each, run.data.eval_crop, (32, 32)) for each in pixels]
    with torch.inference_mode():
        logits = vit(normalized(torch.from_numpy(np.stack(views)), run.data.normalize)).double().numpy()
    shares = np.exp(logits)
    expected = 1 / (1 + np.exp(-logits)) if changes else shares / shares.sum(1, keepdims=True)

    spec = describe_network(url)[0]
    plan = Plan((spec,), plan_images, check_options([spec], Options(top_k=len(SHAPES), batch=12)), "")
    batches, reasons = decode_views(encoded, views_of([spec]))
    rows = predict_batch(plan, load_networks(plan), batches, usable(reasons)).to_pylist()
    predicted = np.array([[row["probabilities"][row["classes"].index(name)] for name in SHAPES] for row in rows])
    np.testing.assert_allclose(predicted, expected, atol=1e-5)

    family = load_deltas(url, {"task": url})
    served = probabilities(family, views, [family.members["task"]] * 12)
    np.testing.assert_allclose(np.stack(served), expected, atol=1e-5)

    model = ImageClassifier()
    model.load_context(SimpleNamespace(artifacts={"model": url}))
    answers = model.predict(np.stack(pixels))
    np.testing.assert_allclose([answer["probabilities"] for answer in answers], expected, atol=1e-5)

    request = Request([url], str(tmp_path / "data"), out=str(tmp_path / "out"), workers=1)
    scored = compute_evaluation(request)[0].results[0].scored
    np.testing.assert_allclose(scored.classification.confidences, expected.max(1), atol=1e-5)
    errors = expected.copy()
    errors[np.arange(12), scored.labels] -= 1
    assert scored.values["brier"] == pytest.approx((errors**2).sum() / 12, abs=1e-4)
    gaps = [each.images * abs(each.accuracy - each.confidence) for each in scored.bins if each.images]
    assert scored.intervals["ece"].estimate == pytest.approx(sum(gaps) / 12)
    assert sum(each.confidence * each.images for each in scored.bins if each.images) == pytest.approx(
        expected.max(1).sum(), abs=1e-4
    )
    assert (scored.temperature is None) == bool(changes)


def test_large_sigmoids_keep_the_order_of_their_logits(tmp_path):
    url = str(write_network(tmp_path / "model"))
    spec = describe_network(url)[0]._replace(probability="sigmoid")
    logits = torch.zeros(1, len(SHAPES)).index_fill(1, torch.tensor([0]), 40.0).index_fill(1, torch.tensor([2]), 60.0)
    assert len(set(probabilities_of(logits, "sigmoid")[0, [0, 2]].tolist())) == 1
    arrays = arrays_of(Options(top_k=3), spec, {"logits": logits})
    assert arrays["classes"].to_pylist() == [SHAPES[2], SHAPES[0], SHAPES[1]]


def test_logits_that_are_not_finite_have_no_probabilities(tmp_path):
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.inf], [-torch.inf, 0.0], [torch.nan, 0.0]])
    for probability in ("softmax", "sigmoid"):
        rows = probabilities_of(logits, probability)
        assert rows.isnan().any(1).tolist() == rows.isnan().all(1).tolist() == [False, True, True, True]
    run, vit, classes = load_model(str(write_network(tmp_path / "plain")))
    vit.head.weight.data.fill_(3e38)
    save_model(str(tmp_path / "model"), run, vit, classes)
    model = ImageClassifier()
    model.load_context(SimpleNamespace(artifacts={"model": str(tmp_path / "model")}))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
    with pytest.raises(MlflowException, match="image 0: the network's logits are not finite"):
        model.predict(pixels)
