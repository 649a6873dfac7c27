"""The report as a folder: index.html, which contains its pictures, the pictures as files, and results.csv."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitray.config.parsing import quoted, spelled
from vitray.metrics.groups import MOST_SEEDS
from vitray.metrics.intervals import LEVEL, POWER, Interval
from vitray.pages.files import FORMULA_STARTS, csv_text
from vitray.pages.plotting import DARK, LIGHT, to_png
from vitray.pages.rendering import Column, PageSection, Picture, Table, render_page
from vitray.sweeps.report.charts import (
    draw_blocks,
    draw_branches,
    draw_cost,
    draw_curves,
    draw_differences,
    draw_groups,
    draw_maps,
    draw_rates,
)
from vitray.sweeps.report.drawing import Drawing
from vitray.sweeps.report.papers import TITLE
from vitray.sweeps.report.results import (
    COSTS,
    MODEL,
    STATES,
    Cost,
    Group,
    Measure,
    Results,
    SweepResult,
    TrialResult,
    best_first,
    hours_text,
    leader,
    results_of,
    short_name,
    value_text,
    varied_settings,
)
from vitray.sweeps.space import REPEATS
from vitray.system import storage

FIELDS = ("name", "state", "reason", "goal", *(cost.field for cost in COSTS), "command", "run_url")
VERDICTS = {
    "better": "is better than",
    "worse": "is worse than",
    "no clear difference": "is not clearly different from",
}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_report(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write or replace the report of a sweep and return its files, the page last.

    Files are replaced whole, so that a reader sees the old or the new one. Equal sweeps write equal bytes.
    """
    results = results_of(sweep)
    files: dict[str, bytes] = {}
    pictures: dict[str, list[Picture]] = {}
    for section, drawings in drawings_of(results).items():
        for drawing in drawings:
            light, dark = to_png(drawing.draw(LIGHT)), to_png(drawing.draw(DARK))
            files |= {f"{drawing.name}.png": light, f"{drawing.name}-dark.png": dark}
            pictures.setdefault(section, []).append(Picture(drawing.alt, drawing.caption, light, dark))
    # A reason may quote bytes that are not valid text.
    files["results.csv"] = table_of(sweep).encode(errors="backslashreplace")
    files["index.html"] = render(results, pictures, files["results.csv"]).encode(errors="backslashreplace")
    for name, content in files.items():
        storage.write_bytes(str(folder / name), content)
    return [folder / name for name in files]


def drawings_of(results: Results) -> dict[str, list[Drawing]]:
    """Return {section of the page: its drawings}, without empty sections."""
    candidates = {
        "groups": [draw_groups(results)],
        "differences": [draw_differences(results)],
        "depth": [*draw_blocks(results), draw_branches(results), *draw_maps(results)],
        "lr": [draw_rates(results)],
        "curves": [draw_curves(results, key) for key in dict.fromkeys((results.sweep.goal, "train/loss"))],
        "cost": [draw_cost(results, cost) for cost in COSTS],
    }
    drawn = {section: [each for each in drawings if each is not None] for section, drawings in candidates.items()}
    return {section: drawings for section, drawings in drawn.items() if drawings}


def table_of(sweep: SweepResult) -> str:
    """Return every trial as CSV, the best first, with settings spelled as on the command line.

    An absent setting is an empty cell.
    """
    trials = best_first(sweep.trials, Measure(sweep.goal, sweep.mode))
    paths = list(dict.fromkeys(path for trial in trials for path in trial.settings))
    rows: list[list[Any]] = [[*FIELDS[:4], *paths, *FIELDS[4:]]]
    for trial in trials:
        settings = [_spelled(trial.settings[path]) if path in trial.settings else "" for path in paths]
        fields = ["" if (value := getattr(trial, field)) is None else value for field in FIELDS]
        rows.append([*fields[:4], *settings, *fields[4:]])
    return csv_text(rows)


def _spelled(value: Any) -> str:
    """A value as an override spells it; a text that a spreadsheet would compute is in quotes."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA_STARTS)
    return quoted(value) if is_formula else spelled(value)


# ---- the page --------------------------------------------------------------------------------------------------------


def render(results: Results, pictures: Mapping[str, Sequence[Picture]], table_csv: bytes) -> str:
    """Return the page; `pictures` has a key for each section, its anchor."""
    sweep, trials = results.sweep, results.sweep.trials
    counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
    spent = sum(trial.device_seconds or 0 for trial in trials)
    values = {
        "title": f"{sweep.name}: {sweep.goal}",
        "eyebrow": f"Sweep of {sweep.recipe}, started {sweep.began}",
        "heading": sweep.name,
        "lede": sweep.plan,
        "goal": sweep.goal,
        "mode": sweep.mode,
        "best": _best(results),
        "states": {state: count for state, count in counts.items() if count},
        "hours": hours_text(spent) if spent else None,
        "table_csv": table_csv,
    }
    facts = {"recipe": sweep.recipe, "started": sweep.began, **sweep.circumstances}
    origin = {"command": sweep.command, "facts": facts, "space": sweep.space_text}
    sections = [
        PageSection("groups", f"Results over {results.repeats}", _groups(results, pictures.get("groups", ()))),
        PageSection("differences", "Differences", _differences(results, pictures.get("differences", ()))),
        PageSection("papers", "Comparison with the papers", _papers(results)),
        PageSection("depth", "Depth and branches", pictures.get("depth")),
        PageSection("lr", "Learning rate", pictures.get("lr")),
        PageSection("curves", "Learning curves", pictures.get("curves")),
        PageSection("cost", "Cost", pictures.get("cost")),
        PageSection("trials", "All trials", _trials(results)),
        PageSection("unfinished", "Failed and stopped trials", _unfinished(results)),
        PageSection("origin", "How to reproduce", origin),
    ]
    return render_page("sweep.html", values, sections)


def _best(results: Results) -> Mapping[str, Any] | None:
    """Return the best trial; None while none has a value of the goal."""
    measure, best = results.measure, leader(results.sweep.trials, results.measure)
    if best is None or best.score is None:
        return None
    so_far = "" if best.state == "finished" else " so far"
    better, text = best_first(results.sweep.trials, measure)[0], None
    if measure.rank(better.score) < measure.rank(best.score):
        text = f"{better.name}, {better.state}, had reached {measure.text(better.score or 0)}."
    score, note = measure.text(best.score), f"{'highest' if measure.mode == 'max' else 'lowest'} {measure.goal}{so_far}"
    if found := _best_out_of_fold(results):
        share, images = found
        score, note = measure.text(share.estimate), f"of {images:,} images right, out of fold"
    return {
        "score": score,
        "note": note,
        "trial": best,
        "better": text,
        "verdicts": list(_seeds_verdict(results)),
    }


def _seeds_verdict(results: Results) -> Iterator[str]:
    """The best group's mean over its seeds and folds, its share out of fold, and its difference from the next group."""
    measure, groups = results.measure, results.scored
    if not groups or len(groups[0].scores) < 2:
        return
    first = groups[0]
    name = f"Best on average: {first.label}" if len(groups) > 1 else f"Over {len(first.scores)} {results.repeats}"
    yield f"{name}, {results.score_text(first)}."
    pair = next((pair for pair in results.pairs if pair.one == first), None)
    if pair is not None:
        mean, low, high = (measure.signed(value) for value in pair.difference[:3])
        yield (
            f"It {VERDICTS[pair.verdict(measure.mode)]} {pair.other.label}: {mean}, with a 95 % interval from {low} to"
            f" {high}."
        )


# ---- groups ----------------------------------------------------------------------------------------------------------


def _groups(results: Results, pictures: Sequence[Picture]) -> Mapping[str, Any] | None:
    if not results.scored or not results.is_repeated:
        return None
    incomplete = any(trial.state in ("stopped early", "failed") for group in results.scored for trial in group.trials)
    word = results.repeats
    prose = f"Mean {results.measure.goal} ± standard deviation (by n − 1) over the n finished {word}."
    prose += f" Means without the failed or stopped {word} may look too good." if incomplete else ""
    shares = [_out_of_fold(results, group) for group in results.groups]
    if any(shares):
        prose += (
            " Out of fold: of the images of all folds, each counted once by the network that did not learn it, the"
            " share that is right, with a 95 % interval over images."
        )
    elif results.folds and not results.measure.is_top1:
        prose += (
            f" The {results.measure.goal} of the images of all folds together, each scored by the network that did not"
            " learn it, is that of vitray evaluate MODELS DATA --split train --out-of-fold."
        )
    varied, costs = varied_settings(results.sweep.trials), _known_costs(results.sweep.trials)
    prose += _latency_note(costs)
    numbers = [Column(results.measure.title, True), Column("n", True)]
    numbers += [Column("out of fold", True)] if any(shares) else []
    columns = [*_setting_columns(varied), *numbers, *(Column(cost.column, True) for cost in costs)]
    rows = []
    for group, share in zip(results.groups, shares, strict=True):
        n, trials = len(group.scores), len(group.trials)
        number = str(n) if n == trials else f"{n} of {trials}"
        score = results.score_text(group).partition(" (")[0]
        spent = [cost.text(group.cost(cost.field)) for cost in costs]
        own = [share or "–"] if any(shares) else []
        rows.append([*_setting_texts(group.settings, varied), score, number, *own, *spent])
    return {"prose": prose, "pictures": pictures, "table": Table("Groups", columns, rows, marked=True)}


def _best_out_of_fold(results: Results) -> tuple[Interval, int] | None:
    is_known = bool(results.measure.is_top1 and results.folds and results.scored)
    return results.scored[0].out_of_fold(results.folds) if is_known else None


def _out_of_fold(results: Results, group: Group) -> str | None:
    """The share of a group out of fold, with its interval and images; None without folds, or of another goal."""
    measure = results.measure
    if not measure.is_top1 or not results.folds or (found := group.out_of_fold(results.folds)) is None:
        return None
    share, images = found
    return (
        f"{measure.digits(share.estimate)} ({measure.digits(share.low)} to {measure.digits(share.high)}) of {images:,}"
    )


def _differences(results: Results, pictures: Sequence[Picture]) -> Mapping[str, Any] | None:
    pairs, measure = results.pairs, results.measure
    if not pairs:
        return None
    prose = f"One group minus the other. {results.repeats.capitalize()} are taken to scatter alike in all groups"
    if results.folds:
        prose += ", but for the effect that each has on all of them, and more than they seem to, as folds share most of"
        prose += " what they are trained on (Nadeau and Bengio's correction)"
    elif results.sweep.shared_stage is not None:
        prose += f", but for the effect that each has on all of them through {results.sweep.shared_stage}"
    prose += "."
    if results.scatter_p is not None and results.scatter_p < 1 - LEVEL:
        prose += f" They do not (Bartlett's test, p {p_text(results.scatter_p)}): between groups that scatter most,"
        prose += " intervals are too narrow, and p too small."
    if results.sweep.control is None:
        prose += " Intervals (95 %) and p are Tukey's: they hold for all pairs of groups together."
    else:
        prose += " Intervals (95 %) and p are Dunnett's: they hold for all differences from the control together."
    if measure.is_share and not results.folds:
        seeds, known = results.seeds_to_tell, max(len(group.scores) for group in results.scored)
        more = "" if seeds is None or seeds <= known else f", {seeds - known} more than there are,"
        prose += f" To find a difference of one point, with a chance of {100 * POWER:g} %, takes"
        prose += f" {seeds or f'more than {MOST_SEEDS:,}'} seeds a group{more} if their scatter is as it seems."
    rows = []
    for pair in pairs:
        mean, low, high, p = pair.difference
        interval, counts = f"{measure.signed(low)} to {measure.signed(high)}", (pair.one.scores, pair.other.scores)
        n = ", ".join(dict.fromkeys(str(len(scores)) for scores in counts))
        texts = [measure.signed(mean), interval, p_text(p), n, pair.verdict(measure.mode)]
        rows.append([pair.one.label, pair.other.label, *texts])
    unit = "difference, points" if measure.is_share else "difference"
    heads = [Column("group"), Column("minus"), Column(unit, True), Column("95 % interval", True)]
    heads += [Column("p", True), Column("n", True)]
    table = Table("Differences", [*heads, Column("first group")], rows)
    return {"prose": prose, "pictures": pictures, "table": table}


def p_text(p: float) -> str:
    """Return a p value, of which no digit below 0.0001 is known."""
    return f"{p:.2g}" if p >= 1e-4 else "<0.0001"


def _papers(results: Results) -> Table | None:
    rows = []
    for group in results.scored if results.measure.is_top1 else ():
        paper = next((trial.paper for trial in group.trials if trial.paper is not None), None)
        if paper is not None:
            spread = "" if paper.spread is None else f" ± {paper.spread:.2f}"
            row = {"label": group.label, "ours": results.score_text(group)}
            row["point"] = f"{value_text(paper.model)}; {paper.training}; ImageNet"
            rows.append({**row, "printed": f"{paper.top1:g}{spread}", "table": paper.table})
    columns = [Column("group"), Column("network, training, images"), Column("ours, top1 %", True)]
    columns.append(Column("printed in", True, TITLE))
    return Table("Comparison with the papers", columns, rows) if rows else None


# ---- trials ----------------------------------------------------------------------------------------------------------


def _trials(results: Results) -> Mapping[str, Any]:
    measure, trials = results.measure, best_first(results.sweep.trials, results.measure)
    # A table of groups already has the sizes of their networks.
    costs = [cost for cost in _known_costs(trials) if cost.field == "device_seconds" or not results.is_repeated]
    varied = varied_settings(trials)
    repeats = [path for path in REPEATS if any(path in trial.settings for trial in trials)]
    linked = any(trial.run_url for trial in trials)
    columns = [
        Column("trial"),
        Column(measure.title, True),
        Column("state"),
        *_setting_columns(varied),
        *(Column(REPEATS[path].removesuffix("s"), True) for path in repeats),
        *(Column(cost.column, True) for cost in costs),
        *([Column("run")] if linked else []),
    ]
    rows = []
    for trial in trials:
        values = [value_text(trial.settings[path]) if path in trial.settings else "–" for path in repeats]
        row = {"trial": trial, "settings": _setting_texts(trial.settings, varied)}
        row["goal"] = "–" if trial.goal is None else measure.digits(trial.goal)
        rows.append({**row, "numbers": [*values, *(cost.text(getattr(trial, cost.field)) for cost in costs)]})
    prose = f"Best first. Open a trial for the command that repeats it.{_latency_note(costs)}"
    table = Table("Trials", columns, rows, marked=bool(trials) and trials[0].score is not None)
    return {"prose": prose, "table": table, "is_linked": linked}


def _setting_columns(varied: Mapping[str, Sequence[object]]) -> list[Column]:
    return [Column("network" if path == MODEL else short_name(path)) for path in varied]


def _setting_texts(settings: Mapping[str, object], varied: Mapping[str, Sequence[object]]) -> list[str]:
    return [value_text(settings[path], among) if path in settings else "–" for path, among in varied.items()]


def _known_costs(trials: Sequence[TrialResult]) -> list[Cost]:
    """The costs that some trial has."""
    return [cost for cost in COSTS if any(getattr(trial, cost.field) is not None for trial in trials)]


def _latency_note(costs: Sequence[Cost]) -> str:
    """Return the meaning of the latency, if it is shown."""
    if all(cost.field != "latency_ms" for cost in costs):
        return ""
    return " Latency: the fastest forward pass of one image after a trial, of all of them; on a CPU, of one thread."


# ---- the rest --------------------------------------------------------------------------------------------------------


def _unfinished(results: Results) -> list[tuple[TrialResult, str, bool]]:
    """Return the failed and stopped trials, the last line of each one's reason, and whether it has others."""
    entries = []
    trials = [trial for trial in results.sweep.trials if trial.state in ("failed", "stopped early")]
    for trial in sorted(trials, key=lambda trial: (-STATES.index(trial.state), trial.name)):
        # The last line of a traceback holds the error.
        lines = [line for line in (trial.reason or "no reason was recorded").splitlines() if line.strip()]
        entries.append((trial, lines[-1] if lines else "", len(lines) > 1))
    return entries
