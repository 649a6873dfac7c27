"""The sections of the page: groups, differences, the papers' numbers, charts, trials and their circumstances."""

from collections.abc import Mapping, Sequence

from vitray.pages.markup import (
    Column,
    Content,
    Html,
    Picture,
    command_box,
    illustrated,
    joined,
    link,
    state_dot,
    table,
    tag,
)
from vitray.pages.shell import PageSection
from vitray.sweep.report.groups import Results, pairs_of
from vitray.sweep.report.labels import MODEL, SEED, short_name, value_text, varied_settings
from vitray.sweep.report.papers import TITLE
from vitray.sweep.report.trials import COSTS, STATES, Cost, TrialResult, best_first


def page_sections(results: Results, pictures: Mapping[str, Sequence[Picture]]) -> list[PageSection]:
    """Return the sections that have content, in order; `pictures` has their anchors as keys."""

    def charts(anchor: str, title: str, *prose: str) -> PageSection | None:
        return PageSection(anchor, title, illustrated(prose, pictures[anchor])) if pictures.get(anchor) else None

    corner = "upper" if results.measure.mode == "max" else "lower"
    front = f"The {corner} left is best. The line joins the groups that no other group beats at a lower cost."
    parts = [
        _groups(results, pictures.get("groups", ())),
        _differences(results, pictures.get("differences", ())),
        _papers(results),
        charts("depth", "Depth and branches", "The same number of blocks, in parallel or in sequence, at equal cost."),
        charts("lr", "Learning rate"),
        charts("curves", "Learning curves"),
        charts("cost", "Cost", front),
        PageSection("trials", "All trials", _trials(results)),
        _unfinished(results),
        PageSection("origin", "How to reproduce", _origin(results)),
    ]
    return [part for part in parts if part is not None]


# ---- groups ----------------------------------------------------------------------------------------------------------


def _groups(results: Results, pictures: Sequence[Picture]) -> PageSection | None:
    if not results.scored or not results.is_repeated:
        return None
    incomplete = any(trial.state in ("stopped early", "failed") for group in results.scored for trial in group.trials)
    prose = f"Mean {results.measure.goal} ± standard deviation (by n − 1) over the n finished seeds."
    prose += " Means without the failed or stopped seeds may look too good." if incomplete else ""
    varied, costs = varied_settings(results.sweep.trials), _known_costs(results.sweep.trials)
    prose += _latency_note(costs)
    goal, count = Column(results.measure.title, True), Column("n", True)
    columns = [*_setting_columns(varied), goal, count, *(Column(cost.column, True) for cost in costs)]
    rows = []
    for group in results.groups:
        n, trials = len(group.scores), len(group.trials)
        number = str(n) if n == trials else f"{n} of {trials}"
        score = results.score_text(group).partition(" (")[0]
        spent = [cost.text(group.cost(cost.field)) for cost in costs]
        rows.append([*_setting_texts(group.settings, varied), score, number, *spent])
    body = joined(illustrated([prose], pictures), table("Groups", columns, rows, marked=True))
    return PageSection("groups", "Results over seeds", body)


def _differences(results: Results, pictures: Sequence[Picture]) -> PageSection | None:
    pairs, measure = pairs_of(results), results.measure
    if not pairs:
        return None
    correction = f", not corrected for {len(pairs)} comparisons" if len(pairs) > 1 else ""
    prose = (
        "One group minus the other, paired by seed, so that effects of the seed cancel."
        f" Each interval is Student's at 95 %{correction}."
    )
    if len(results.scored) - 1 == len(pairs) > 1:
        prose += " All are compared with the best group, which slightly favors it."
    rows = []
    for one, other, gap in pairs:
        interval, verdict = f"{measure.signed(gap.low)} to {measure.signed(gap.high)}", gap.verdict(measure.mode)
        rows.append([one.label, other.label, measure.signed(gap.mean), interval, str(gap.n), verdict])
    unit = "difference, points" if measure.is_share else "difference"
    heads = [Column("group"), Column("minus"), Column(unit, True), Column("95 % interval", True), Column("n", True)]
    body = joined(illustrated([prose], pictures), table("Differences", [*heads, Column("first group")], rows))
    return PageSection("differences", "Differences", body)


def _papers(results: Results) -> PageSection | None:
    rows = []
    for group in results.scored if results.measure.is_top1 else ():
        paper = next((trial.paper for trial in group.trials if trial.paper is not None), None)
        if paper is not None:
            spread = "" if paper.spread is None else f" ± {paper.spread:.2f}"
            printed = joined(f"{paper.top1:g}{spread} ", tag("small", paper.table))
            point = tag("div.wide", f"{value_text(paper.model)}; {paper.training}; ImageNet")
            rows.append([group.label, point, results.score_text(group), printed])
    if not rows:
        return None
    columns = [Column("group"), Column("network, training, images"), Column("ours, top1 %", True)]
    columns.append(Column(joined("printed in ", tag("cite", TITLE)), True))
    prose = (
        "The network, task and images are the same; the learning rate, schedule and augmentation may differ."
        " The papers' numbers are quoted, not measured here."
    )
    title = "Comparison with the papers"
    return PageSection("papers", title, joined(tag("p", prose), table(title, columns, rows)))


# ---- trials ----------------------------------------------------------------------------------------------------------


def _trials(results: Results) -> Html:
    measure, trials = results.measure, best_first(results.sweep.trials, results.measure)
    # A table of groups already has the sizes of their networks.
    costs = [cost for cost in _known_costs(trials) if cost.field == "device_seconds" or not results.is_repeated]
    varied = varied_settings(trials)
    seeds, linked = any(SEED in trial.settings for trial in trials), any(trial.run_url for trial in trials)
    columns = [
        Column("trial"),
        Column(measure.title, True),
        Column("state"),
        *_setting_columns(varied),
        *([Column("seed", True)] if seeds else []),
        *(Column(cost.column, True) for cost in costs),
        *([Column("run")] if linked else []),
    ]
    rows: list[list[Content]] = []
    for trial in trials:
        goal = "–" if trial.goal is None else measure.digits(trial.goal)
        seed = [value_text(trial.settings[SEED]) if SEED in trial.settings else "–"] if seeds else []
        name = tag("details", tag("summary", trial.name), command_box(trial.command))
        run = [link(trial.run_url, "open")] if linked else []
        spent = [cost.text(getattr(trial, cost.field)) for cost in costs]
        state = joined(state_dot(trial.state), trial.state)
        rows.append([name, goal, state, *_setting_texts(trial.settings, varied), *seed, *spent, *run])
    whole = table("Trials", columns, rows, marked=bool(trials) and trials[0].score is not None)
    prose = f"Best first. Open a trial for the command that repeats it.{_latency_note(costs)}"
    return joined(tag("p", prose), whole)


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
    return " Latency: the fastest forward pass of one image after a trial, of all seeds; on a CPU, of one thread."


# ---- the rest --------------------------------------------------------------------------------------------------------


def _unfinished(results: Results) -> PageSection | None:
    trials = [trial for trial in results.sweep.trials if trial.state in ("failed", "stopped early")]
    if not trials:
        return None
    entries = []
    for trial in sorted(trials, key=lambda trial: (-STATES.index(trial.state), trial.name)):
        # The last line of a traceback holds the error.
        lines = [line for line in (trial.reason or "no reason was recorded").splitlines() if line.strip()]
        whole = tag("details", tag("summary", "full text"), tag("pre", trial.reason)) if len(lines) > 1 else None
        name = tag("strong", link(trial.run_url, trial.name))
        error = tag("div", lines[-1] if lines else "")
        entries.append(tag("li", state_dot(trial.state), name, f" {trial.state}", error, whole))
    return PageSection("unfinished", "Failed and stopped trials", tag("ul.troubles", *entries))


def _origin(results: Results) -> Html:
    sweep = results.sweep
    facts = {"recipe": sweep.recipe, "started": sweep.began, **sweep.circumstances}
    entries = [tag(kind, text) for pair in facts.items() for kind, text in zip(("dt", "dd"), pair, strict=True)]
    space = tag("details", tag("summary", "Search space"), tag("pre", sweep.space_text)) if sweep.space_text else None
    return joined(command_box(sweep.command), tag("dl", *entries), space)
