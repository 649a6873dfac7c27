"""docs/results.md: a function of its records; statistics against scipy, partial records, and the choice of rates."""

import json
import re
import shlex
import sys

import pytest
from scipy import stats
from test_layers import ROOT
from test_space import sweeps

sys.path.insert(0, str(ROOT / "experiments"))
import cifar10_pictures
import cifar10_rates
import cifar10_results
from cifar10_differences import contrast, pooled_cells
from cifar10_texts import THINGS, Thing

import tune_spaces
from pipelines import recipes
from vitray.config import load_run
from vitray.runs.run_dir import OUTCOME
from vitray.sweeps.plan import SWEEP_META
from vitray.sweeps.space import grid_points, name_of, read_space
from vitray.sweeps.trial_store import POINTS, TrialEntry, TrialRecord, write_record

DEPTH, MODES, STEMS = THINGS


def made_sweep(sweeps, thing: Thing, scores, rates=False):
    """Write the records of a sweep with {trial: test accuracy} of its finished trials."""
    name, overrides = thing.space, list(thing.overrides)
    if rates:
        name, overrides = f"{name}_rates", list(thing.rate_overrides)
    space, folder = read_space(tune_spaces.path_of(name)), sweeps / name
    folder.mkdir(parents=True)
    base = load_run(recipes.path_of(thing.recipe), overrides)
    (folder / SWEEP_META).write_text(json.dumps({"base": base.to_yaml()}))
    points = {name_of(point, space): point for point in grid_points(space)}
    entries = {key: TrialEntry(point)._asdict() | {"point": point._asdict()} for key, point in points.items()}
    (folder / POINTS).write_text(json.dumps(entries))
    for trial, score in scores.items():
        assert trial in points
        (folder / trial).mkdir()
        write_record(str(folder / trial), TrialRecord("finished", began=100.0, ended=160.0))
        outcome = {"state": "finished", "val_top1": score, "steps": 10, "curves": {"val/top1": [[10, score]]}}
        outcome |= {"device_seconds": 50.0, "model_bytes": 2_500_000, "peak_memory_bytes": None}
        (folder / trial / OUTCOME).write_text(json.dumps(outcome))
    return folder


def row_of(page, start):
    return next(line for line in page.splitlines() if line.startswith(start))


def test_the_page_is_that_of_its_records():
    """Run `python experiments/cifar10_results.py` after a change."""
    records = cifar10_results.NOTHING | json.loads(cifar10_results.RECORDS.read_text())
    assert cifar10_results.PAGE.read_text() == cifar10_results.page(records)


def test_the_numbers_of_the_summary_are_those_of_the_tables():
    sections = cifar10_results.PAGE.read_text().split("\n## ")
    (summary,) = (section for section in sections if section.startswith("In a minute"))
    tables = "\n".join(section for section in sections if section is not summary)
    numbers = re.findall(r"[+-]?\d+\.\d+", summary)
    assert len(numbers) > 6
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number).lstrip('+')}(?![\d.])", tables), number


def test_objectives_without_labels_stand_beside_each_other():
    probed = [{"model": f"cifar10_views/route=dino seed={seed}", "knn20": 0.5 + seed / 10} for seed in range(3)]
    trained = [("cifar10_views", "dino", None), ("cifar10_views_tuned", "dino", 0.8), ("cifar10_views", "mae", None)]
    trials = [
        {"sweep": sweep, "drawn": {"route": route}, "top1": top1, "wall_seconds": 600.0}
        for sweep, route, top1 in trained
    ]
    table = cifar10_results.views_table(cifar10_results.NOTHING | {"views": probed, "trials": trials})
    assert row_of(table, "| DINO").endswith("| 3 | 60.00 ± 10.00 | not measured | not measured | 80.00 | 10 |")
    assert row_of(table, "| MAE").endswith("| 0 | not measured | not measured | not measured | not measured | 10 |")
    assert "| none: random weights, linear stem | 0 |" in table


def test_without_records_every_cell_is_not_measured():
    page = cifar10_results.page(cifar10_results.NOTHING)
    assert page.count("| not measured | | | 0 of 5 |") == 4 + 6
    assert page.count("| not measured | | | 0 of 3 |") == 12
    assert "Nothing is measured yet" in page
    assert "not significant |" not in page.partition("## Thing 1")[2]


def test_means_and_differences_are_those_of_scipy(tmp_path):
    one, other = [0.600, 0.612, 0.607, 0.605, 0.611], [0.590, 0.599, 0.600, 0.594, 0.597]
    scores = {f"12x1 seed={seed}": score for seed, score in enumerate(one)}
    scores |= {f"6x2 seed={seed}": score for seed, score in enumerate(other)}
    scores |= {"4x3 seed=1": 0.61}
    made_sweep(tmp_path, DEPTH, scores)
    page = cifar10_results.page(json.loads(cifar10_results.records_text(cifar10_results.collect(str(tmp_path)))))
    low, high = stats.ttest_1samp([100 * score for score in one], 0).confidence_interval(0.95)
    spread = stats.tstd([100 * score for score in one])
    mean, rate = f"{100 * sum(one) / 5:.2f}", f"{cifar10_results.cells_of(DEPTH)[0].rate:g}"
    assert row_of(page, "| 12x1 | ").startswith(
        f"| 12x1 | {rate} | {mean} | {low:.2f} to {high:.2f} | {spread:.2f} | 5 of 5 | 60 | 50 | 2.50 |"
    )
    tested = stats.tukey_hsd([100 * each for each in one], [100 * each for each in other])  # of the only measured pair
    bounds = tested.confidence_interval()
    texts = f"{tested.statistic[0, 1]:+.2f} | {bounds.low[0, 1]:+.2f} to {bounds.high[0, 1]:+.2f}"
    assert row_of(page, "| 12x1 − 6x2 ") == f"| 12x1 − 6x2 | {texts} | {tested.pvalue[0, 1]:.3f} | 12x1 is higher |"
    # A single seed is not compared, nor a cell without a trial.
    assert row_of(page, "| 12x1 − 4x3 ").endswith("|  |  |  | not measured |")
    assert re.match(r"\| 4x3 \| [\d.]+ \| 61\.00 \|  \|  \| 1 of 5 \|", row_of(page, "| 4x3 | "))
    assert re.match(r"\| 3x4 \| [\d.]+ \| not measured \|", row_of(page, "| 3x4 | "))
    assert "6x2 < 12x1" in row_of(page, f"| {DEPTH.title} ")


def test_a_change_of_leads_is_a_contrast_of_four_cells():
    values = {"a": [5, 7, 6], "b": [1, 2, 3], "c": [4, 6, 4], "d": [2, 2, 3]}
    pooled = pooled_cells(STEMS, {label: dict(enumerate(each)) for label, each in values.items()})
    interval = contrast(pooled, {"a": 1.0, "b": -1.0, "c": -1.0, "d": 1.0})
    variance = sum(stats.tvar(each) for each in values.values()) / 4
    half = stats.t.ppf(0.975, 8) * (4 * variance / 3) ** 0.5
    assert interval == pytest.approx((5 / 3, 5 / 3 - half, 5 / 3 + half))
    assert contrast(pooled, {"a": 1.0, "e": -1.0}) is None


def test_cells_that_start_from_the_same_networks_are_compared_with_their_control_by_seed(tmp_path):
    of_network = [0.60, 0.70, 0.65, 0.75, 0.55]
    scores = {f"mode=full seed={seed}": score for seed, score in enumerate(of_network)}
    scores |= {f"mode=attn seed={seed}": score + 0.01 + 0.001 * (-1) ** seed for seed, score in enumerate(of_network)}
    made_sweep(tmp_path, MODES, scores)
    page = cifar10_results.page(cifar10_results.collect(str(tmp_path)))
    attn = [score for name, score in scores.items() if "attn" in name]
    bounds = stats.ttest_rel(attn, of_network).confidence_interval(0.95)  # of two cells, the same
    assert row_of(page, "| attn − full ").startswith(f"| attn − full | +1.02 | {100 * bounds.low:+.2f} to ")
    assert row_of(page, "| attn − full ").endswith("| <0.001 | attn is higher |")
    assert "full < attn" in row_of(page, f"| {MODES.title} ")


def test_differences_that_chance_explains_cannot_be_told_apart(tmp_path):
    scores = {f"mode=full seed={seed}": 0.7 + 0.01 * (-1) ** seed for seed in range(5)}
    scores |= {f"mode=attn seed={seed}": 0.7 for seed in range(5)}
    made_sweep(tmp_path, MODES, scores)
    page = cifar10_results.page(cifar10_results.collect(str(tmp_path)))
    p = stats.ttest_rel([0.7] * 5, [0.71, 0.69, 0.71, 0.69, 0.71]).pvalue
    assert row_of(page, "| attn − full ").endswith(f"| {p:.3f} | not significant |")
    assert "attn and full" in row_of(page, f"| {MODES.title} ")
    assert "ffn − attn" not in page


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.space)
def test_the_commands_of_the_page_are_those_of_the_spaces(thing):
    commands = {thing.space: thing.overrides, f"{thing.space}_rates": thing.rate_overrides}
    for space, overrides in commands.items():
        assert sweeps(tune_spaces.path_of(space)) == [[thing.recipe, space, *overrides]]
        command = shlex.join(["vitray", "sweep", thing.recipe, space, *overrides, "--name", space])
        assert command in cifar10_results.PAGE.read_text()


def test_stems_are_compared_within_a_route_and_routes_within_a_stem():
    labels = [cell.label for cell in cifar10_results.cells_of(STEMS)]
    pairs = cifar10_results.pairs_of(STEMS, labels)
    assert len(labels) == 12
    assert len(pairs) == 9 + 6 + 8
    assert ("conv, beit", "linear, beit") in pairs
    assert ("conv, beit", "hmlp_ln, beit") in pairs
    assert ("conv, beit", "conv, supervised") in pairs


def test_records_of_other_settings_are_refused(tmp_path):
    folder = made_sweep(tmp_path, DEPTH, {})
    short = load_run(recipes.path_of(DEPTH.recipe), ["optim.duration=1 epoch"])
    (folder / SWEEP_META).write_text(json.dumps({"base": short.to_yaml()}))
    with pytest.raises(SystemExit, match=r"optim\.duration: got 1 epoch, expected 4 epochs as on the page"):
        cifar10_results.collect(str(tmp_path))


def test_a_folder_without_sweeps_leaves_the_records(tmp_path, monkeypatch, capsys):
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setattr(cifar10_results, name, tmp_path / name)
    (tmp_path / "RECORDS").write_text(kept := json.dumps(cifar10_results.NOTHING))
    cifar10_results.main(str(tmp_path / "sweep"))
    assert "no new trial" in capsys.readouterr().out
    assert (tmp_path / "RECORDS").read_text() == kept


def test_records_of_sweeps_that_are_gone_stay(tmp_path):
    made_sweep(tmp_path / "one", DEPTH, {"12x1 seed=0": 0.5, "12x1 seed=1": 0.6})
    made_sweep(tmp_path / "other", MODES, {"mode=full seed=0": 0.7})
    both = cifar10_results.collect(str(tmp_path / "other"), cifar10_results.collect(str(tmp_path / "one")))
    assert [row["top1"] for row in both["trials"]] == [0.5, 0.6, 0.7]
    assert both["machines"].keys() == {DEPTH.space, MODES.space}
    # A sweep that begins anew on another machine replaces trial by trial.
    made_sweep(tmp_path / "later", DEPTH, {"12x1 seed=0": 0.4, "12x1 seed=2": 0.8})
    later = cifar10_results.collect(str(tmp_path / "later"), both)
    assert [row["top1"] for row in later["trials"]] == [0.4, 0.6, 0.7, 0.8]
    assert cifar10_results.collect(str(tmp_path / "later"), later) == later
    assert ", and on " not in cifar10_results.page(later)
    later["machines"][MODES.space] = later["machines"][MODES.space] | {"hardware.cpu": "another CPU"}
    assert f", and on {later['machines'][MODES.space]['hardware.cores']} cores of another CPU, " in (
        cifar10_results.page(later)
    )


def test_scores_of_probes_are_averaged_over_seeds(tmp_path):
    made_sweep(tmp_path, STEMS, {})
    urls = [f"{tmp_path}/cifar10_stems/before/beit/beit=linear,{seed}/model" for seed in (0, 1)]
    urls += [f"{tmp_path}/cifar10_stems/vit_u6x1_16 route=supervised seed=0/model"]
    models = [{"url": url, "linear": 0.5 + 0.02 * at, "linear_share0.05": 0.3} for at, url in enumerate(urls)]
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "results.json").write_text(json.dumps({"models": models}))
    page = cifar10_results.page(cifar10_results.collect(str(tmp_path)))
    assert row_of(page, "| beit | ").startswith(
        "| beit | 2 | 30.00 ± 0.00 | not measured | not measured | 51.00 ± 1.41 |"
    )
    assert row_of(page, "| supervised | ").startswith("| supervised | 1 | 30.00 |")
    assert row_of(page, "| mae | ").startswith("| mae | 0 | not measured |")


def test_probes_of_three_seeds_are_drawn_by_the_share_of_labels(tmp_path):
    shares = {name: 0.3 + share / 4 for share, name in cifar10_results.LINEAR_PROBES.items()}
    names = [f"cifar10_stems/before/{route}/{route}=linear,{seed}" for route in ("beit", "mae") for seed in range(3)]
    records = cifar10_results.NOTHING | {"labels": [{"model": name, **shares} for name in names[:5]]}
    assert cifar10_results.label_curves(records) == {
        "beit": {
            share: [score] * 3 for share, score in zip(cifar10_results.LINEAR_PROBES, shares.values(), strict=True)
        }
    }
    cifar10_pictures.draw_all(records, tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == [cifar10_results.LABELS_PICTURE]
    assert f"](images/{cifar10_results.LABELS_PICTURE})" in cifar10_results.page(records)
    assert cifar10_results.LABELS_PICTURE not in cifar10_results.page(cifar10_results.NOTHING)


def test_learning_curves_are_drawn_of_cells_with_three_seeds(tmp_path):
    made_sweep(tmp_path, DEPTH, {f"12x1 seed={seed}": 0.5 for seed in range(3)} | {"6x2 seed=0": 0.7})
    records = cifar10_results.collect(str(tmp_path))
    assert list(cifar10_pictures.panels_of(DEPTH, records)[""]) == ["12x1"]
    cifar10_pictures.draw_all(records, tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == [DEPTH.picture]
    assert f"](images/{DEPTH.picture})" in cifar10_results.page(records)
    assert f"](images/{MODES.picture})" not in cifar10_results.page(records)


def test_stems_have_a_panel_for_each_route(tmp_path):
    scores = {"supervised": 0.5, "mae": 0.9}
    trials = {f"vit_u6x1_16 route={route} seed={seed}": scores[route] for route in scores for seed in range(3)}
    made_sweep(tmp_path, STEMS, trials)
    panels = cifar10_pictures.panels_of(STEMS, cifar10_results.collect(str(tmp_path)))
    assert {title: list(cells) for title, cells in panels.items()} == {"supervised": ["linear"], "mae": ["linear"]}
    for axis in cifar10_pictures.draw(panels).axes:  # one scale that shows the curves of all panels
        low, high = axis.get_ylim()
        assert low < 50 < 90 < high


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_the_best_rate_of_each_cell_is_written_into_the_space(tmp_path):
    path = tmp_path / "space.yaml"
    space = read_space(tune_spaces.path_of(f"{DEPTH.space}_rates"))
    scores = dict.fromkeys([name_of(point, space) for point in grid_points(space)], 0.5) | {
        "12x1 rate=4e-3": 0.6,
        "6x2 rate=2e-3": 0.7,
    }
    made_sweep(tmp_path, DEPTH, scores, rates=True)
    tried, missing = cifar10_rates.read_tried(str(tmp_path / f"{DEPTH.space}_rates"), f"{DEPTH.space}_rates")
    best = cifar10_rates.best_rates(tried)
    assert not missing
    assert best == [
        ({"depth": 12, "branches": 1}, 4e-3),
        ({"depth": 6, "branches": 2}, 2e-3),
        ({"depth": 4, "branches": 3}, 5e-4),  # of equal rates the lowest
        ({"depth": 3, "branches": 4}, 5e-4),
    ]
    lines = cifar10_rates.rate_lines(best, ["branches"])
    path.write_text(cifar10_rates.with_rates(tune_spaces.path_of(DEPTH.space).read_text(), lines))
    rates = {point.drawn["depth"]: point.settings["optim.lr"] for point in grid_points(read_space(path))}
    assert rates == {12: 4e-3, 6: 2e-3, 4: 5e-4, 3: 5e-4}
    assert len(grid_points(read_space(path))) == 20


def test_rates_wait_for_all_trials(tmp_path, capsys):
    made_sweep(tmp_path, DEPTH, {"12x1 rate=4e-3": 0.6}, rates=True)
    before = tune_spaces.path_of(DEPTH.space).read_text()
    cifar10_rates.main(str(tmp_path))
    assert "cifar10_depth_x_branches: unchanged, 15 trials have not finished" in capsys.readouterr().out
    assert tune_spaces.path_of(DEPTH.space).read_text() == before


def test_rates_are_not_chosen_on_the_test_images(tmp_path):
    space = read_space(tune_spaces.path_of(f"{DEPTH.space}_rates"))
    folder = made_sweep(
        tmp_path, DEPTH, dict.fromkeys([name_of(point, space) for point in grid_points(space)], 0.5), True
    )
    base = load_run(recipes.path_of(DEPTH.recipe), ["optim.duration=2.5 epochs"])
    (folder / SWEEP_META).write_text(json.dumps({"base": base.to_yaml()}))
    with pytest.raises(SystemExit, match=r"data\.holdout: got 0\.0, expected 0\.1 as on the page"):
        cifar10_rates.main(str(tmp_path))


@pytest.mark.parametrize("name", [thing.space for thing in THINGS])
def test_the_lookup_of_a_space_is_the_one_that_the_script_writes(name):
    text, space = tune_spaces.path_of(name).read_text(), read_space(tune_spaces.path_of(name))
    assert (cifar10_rates.CHOSEN in text) != (cifar10_rates.NOT_CHOSEN in text)
    points = [(dict(point.drawn), point.settings["optim.lr"]) for point in grid_points(space)]
    first = [(drawn, rate) for drawn, rate in points if drawn.pop("seed") == 0]
    rewritten = cifar10_rates.with_rates(text, cifar10_rates.rate_lines(first, space.space["optim.lr"].of))
    assert rewritten.replace(cifar10_rates.CHOSEN, cifar10_rates.NOT_CHOSEN) == text.replace(
        cifar10_rates.CHOSEN, cifar10_rates.NOT_CHOSEN
    )
