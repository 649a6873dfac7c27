"""The values over many images: each image once, one chunk at a time, the same in this process and on actors."""

import numpy as np
import pytest
import torch
from image_sets import SHAPES, write_dataset
from networks import scrambled

from vitray import inspection as inside
from vitray.config import Model, Run
from vitray.data.augment.decode import decode_image
from vitray.data.augment.views import decode_views
from vitray.inference import engine
from vitray.inference.images import open_images
from vitray.inference.models import describe_network, open_network
from vitray.inference.network_spec import Numerics, Wanted
from vitray.inference.networks import Networks, prepared
from vitray.inspection.report import inspect_networks, measuring
from vitray.inspection.report.figures import FIGURES
from vitray.inspection.report.inspect_networks import Request, make_figures
from vitray.inspection.report.measuring import CHUNK, MeasureBatch, spans_of
from vitray.inspection.report.subjects import MOST_SHOWN, at_even_distances
from vitray.models.vit import ViT
from vitray.weights import save_model

NAMES = [name for name, figure in FIGURES.items() if figure.measure]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset with 75 validation images of which two cannot be decoded, and two networks."""
    folder = tmp_path_factory.mktemp("measuring")
    write_dataset(folder / "data", {"val": 75}, corrupt=2)
    for name, seed in (("base", 0), ("tuned", 1)):
        run = Run(model=Model(name="vit_u2x2_8", image_size=32, num_classes=len(SHAPES)))
        save_model(str(folder / name), run, scrambled(ViT(run.model), seed), list(SHAPES))
    return folder


def figures_of(place, **changes):
    request = Request(str(place / "base"), [str(place / "data")], NAMES, str(place / "tuned"), images=75)
    return make_figures(request._replace(out=str(place / "out"), **changes))[0]


@pytest.mark.parametrize("images", [1, 31, 32, 33, 64, 65, 2048])
def test_chunks_hold_each_image_once_and_are_even(images):
    spans = spans_of(images)
    assert [number for start, stop in spans for number in range(start, stop)] == list(range(images))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) <= CHUNK
    assert max(sizes) - min(sizes) <= 1


def test_a_network_of_bf16_that_an_actor_opens_is_measured_in_float32(tmp_path):
    run = Run(model=Model(name="vit_u2x1_8", image_size=32, num_classes=len(SHAPES))).replace(
        {"compute.precision": "bf16"}
    )
    save_model(str(tmp_path / "model"), run, scrambled(ViT(run.model), 0), list(SHAPES))
    spec = describe_network(str(tmp_path / "model"))[0]
    views, has_pixels = [np.zeros((2, 32, 32, 3), np.uint8)], np.ones(2, bool)
    found = []
    for loaded in (None, {spec.name: open_network(spec)}):
        networks = Networks([spec], Wanted(), Numerics("cpu", 1, 2), loaded)
        found.append(MeasureBatch(["distance"], None)(networks, views, has_pixels)["distance"])
    torch.testing.assert_close(found[0], found[1])


def test_images_lie_at_even_distances():
    assert at_even_distances(5, 64) == [0, 1, 2, 3, 4]
    assert at_even_distances(101, 3) == [0, 50, 100]
    assert len(at_even_distances(50_000, 2048)) == 2048


def test_values_over_chunks_are_those_of_all_images(place, monkeypatch):
    seen = []

    def kept(views, names, on_passed):
        seen.append(len(views[0].images))
        return measuring_views(views, names, on_passed)

    measuring_views = measuring.measure_views
    monkeypatch.setattr(measuring, "measure_views", kept)
    inspection = figures_of(place, workers=1)
    assert sorted(seen) == [25 - 2, 25, 25]  # two threads decode: either may compute first
    assert inspection.images.used == 73
    assert inspection.images.left_out == ("val:0 (not an image)", "val:1 (not an image)")
    assert len(inspection.images.shown) in (MOST_SHOWN - 2, MOST_SHOWN - 1)
    stored = open_images(str(place / "data"), "val").read_labeled(range(2, 75))
    batches = []
    for subject in inspection.subjects:
        [views], _ = decode_views([image.content for image in stored], [subject.spec.view])
        assert views.shape[1:] == (32, 32, 3)
        batches.append(prepared(views, subject.spec, subject.vit))
    assert decode_image(stored[0].content).shape[2] == 3
    for subject, batch in zip(inspection.subjects, batches, strict=True):
        spread = inside.attention_distances(subject.vit, batch)
        parts = zip(*subject.measured["distance"], strict=True)
        for got, wanted in zip(parts, spread, strict=True):
            torch.testing.assert_close(torch.cat(got, dim=-1), wanted, atol=1e-5, rtol=1e-4)
        norms = inside.token_norms(subject.vit, batch)
        joined = inside.join_token_norms(subject.measured["norms"])
        torch.testing.assert_close(joined.patches, norms.patches, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(joined.median, norms.median, atol=1e-4, rtol=1e-4)
        grams = [inside.level_grams(subject.vit, part)[0] for part in batch.split([23, 25, 25])]
        torch.testing.assert_close(
            inside.cka(subject.measured["similarity"], subject.measured["similarity"]),
            inside.cka(grams, grams),
            atol=1e-5,
            rtol=1e-4,
        )
        assert sum(each[0][0].shares.shape[1] for each in subject.measured["branches"]) == 73
    change = inside.feature_changes(*(subject.vit for subject in inspection.subjects), *batches)
    parts = inspection.subjects[1].measured["features"]
    torch.testing.assert_close(torch.cat([part.relative for part in parts], 1), change.relative, atol=1e-5, rtol=1e-4)


@pytest.mark.ray
def test_actors_measure_what_one_process_does(place, ray_cluster):
    alone, shared = figures_of(place, workers=1), figures_of(place, workers=2)
    assert shared.images.left_out == alone.images.left_out
    for one, other in zip(alone.results, shared.results, strict=True):
        for own, theirs in zip(one.tables, other.tables, strict=True):
            assert [row[:1] for row in theirs.rows] == [row[:1] for row in own.rows]
            pairs = zip(own.rows[1:], theirs.rows[1:], strict=True)
            for row, their_row in pairs:
                for value, their_value in zip(row, their_row, strict=True):
                    assert value == their_value or value == pytest.approx(their_value, rel=1e-3, abs=1e-4)


def test_few_images_stay_in_this_process(place, monkeypatch):
    monkeypatch.setattr(engine, "_on_actors", lambda *_: pytest.fail("asked for actors"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    figures_of(place, figures=["distance"], images=MOST_SHOWN, compare=None)


def test_figures_that_measure_nothing_read_only_the_shown_images(place, monkeypatch):
    chosen = []
    monkeypatch.setattr(
        inspect_networks, "measure", lambda subjects, *_: chosen.append(subjects[0].chosen) or (subjects, ())
    )
    figures_of(place, figures=["filters"], compare=None)
    assert len(chosen[0].numbers) == MOST_SHOWN
