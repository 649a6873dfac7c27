"""The page of a sweep: one HTML file that needs nothing beside it, no network and no script."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vitray.sweep.report.groups import MODEL, SEED, Group, Results, pairs_of, say_value, short_name, varied_settings
from vitray.sweep.report.markup import Column, Content, Html, joined, link, table, tag
from vitray.sweep.report.papers import PAPER, Printed
from vitray.sweep.report.styling import SHEET, STATE_COLOURS
from vitray.sweep.report.trials import STATES, Trial, best_first, leader

COSTS = {
    "device_seconds": "device hours",
    "latency_ms": "latency, ms",
    "peak_memory_bytes": "memory, GiB",
    "params": "params, M",
    "gflops": "GFLOPs",
}
# How much of a field is one of the unit that is shown.
UNITS = {"device_seconds": 3600, "peak_memory_bytes": 2**30, "params": 1e6}
VERDICTS = {"better": "is ahead of", "worse": "is behind", "not told apart": "cannot be told from"}
# No script runs and nothing is fetched, whatever the names of trials say.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Picture(NamedTuple):
    """A drawing in both themes."""

    alt: str
    caption: str
    light: bytes
    dark: bytes


class Section(NamedTuple):
    """A part of the page under a heading."""

    anchor: str
    title: str
    body: Html


def render(results: Results, pictures: Mapping[str, Sequence[Picture]], table_csv: bytes) -> str:
    """The page; `pictures` are by the anchor of their section."""
    made = [section for section in _sections(results, pictures) if section is not None]
    entries = [tag("li", tag("a", section.title, has={"href": f"#{section.anchor}"})) for section in made]
    nav = tag("nav", tag("ul", *entries), has={"aria-label": "Sections"})
    bodies = [tag("section", tag("h2", section.title), section.body, has={"id": section.anchor}) for section in made]
    csv_link = tag("a", "results.csv", has={"href": _data("text/csv", table_csv), "download": "results.csv"})
    footer = tag("footer", "Every trial as a table: ", csv_link, ".")
    head = tag(
        "head",
        tag("meta", has={"charset": "utf-8"}),
        tag("meta", has={"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", has={"http-equiv": "Content-Security-Policy", "content": POLICY}),
        tag("meta", has={"name": "color-scheme", "content": "light dark"}),
        tag("title", f"{results.sweep.name}: {results.sweep.goal}"),
        tag("style", Html(SHEET)),
    )
    body = tag("body", tag("main", _headline(results), nav, *bodies, footer))
    return f"<!doctype html>\n{tag('html', head, body, has={'lang': 'en'}).markup}\n"


def _sections(results: Results, pictures: Mapping[str, Sequence[Picture]]) -> Iterator[Section | None]:
    def drawn(anchor: str, title: str, *prose: str) -> Section | None:
        shown = pictures.get(anchor)
        return Section(anchor, title, _illustrated(prose, shown)) if shown else None

    yield _over_seeds(results, pictures.get("groups", ()))
    yield _differences(results, pictures.get("differences", ()))
    yield _beside_papers(results)
    yield drawn("depth", "Depth and branches", "Blocks side by side or one after the other, at the same cost.")
    yield drawn("lr", "Learning rate")
    yield drawn("curves", "Learning curves")
    corner = "upper" if results.measure.mode == "max" else "lower"
    front = f"Towards the {corner} left is better; the line joins the groups that no other beats at lower cost."
    yield drawn("cost", "What it costs", front)
    yield Section("trials", "Every trial", _every_trial(results))
    yield _unfinished(results)
    yield Section("origin", "Where this is from", _origin(results))


# ---- the headline ----------------------------------------------------------------------------------------------------


def _headline(results: Results) -> Html:
    sweep = results.sweep
    return tag(
        "header",
        tag("p.eyebrow", f"Sweep of {sweep.recipe}, began {sweep.began}"),
        tag("h1", sweep.name),
        tag("p.lede", sweep.plan),
        tag("div.hero", _best(results), _states(results)),
    )


def _best(results: Results) -> Html:
    measure, best = results.measure, leader(results.sweep.trials, results.measure)
    if best is None or best.score is None:
        return tag("div", tag("p", f"No trial has a value of {measure.goal} yet."))
    so_far = "" if best.state == "finished" else " so far"
    word = "highest" if measure.mode == "max" else "lowest"
    parts = [
        tag("p.big", measure.say(best.score), tag("small", f"{word} {measure.goal}{so_far}")),
        tag("p", tag("strong", link(best.run_url, best.name))),
    ]
    better = best_first(results.sweep.trials, measure)[0]
    if measure.rank(better.score) < measure.rank(best.score):
        parts.append(tag("p", f"{better.name}, {better.state}, had reached {measure.say(better.score or 0)}."))
    parts.append(tag("details", tag("summary", "The command that repeats it"), _command(best.command)))
    return tag("div", *parts, *(tag("p.pale", words) for words in _verdicts(results)))


def _verdicts(results: Results) -> Iterator[str]:
    """What the best group's seeds say, and whether they tell it from the next."""
    measure, groups = results.measure, results.scored
    if not groups or len(groups[0].scores) < 2:
        return
    first = groups[0]
    yield f"Best on average: {first.label}, {results.said(first)}."
    pair = next((pair for pair in pairs_of(results) if pair.one == first), None)
    if pair is not None:
        mean, low, high = (measure.signed(value) for value in pair.difference[:3])
        verdict = VERDICTS[measure.verdict(pair.difference)]
        words = f"Over {pair.difference.n} common seeds it {verdict} {pair.other.label}:"
        yield f"{words} {mean}, with a 95 % interval from {low} to {high}."


def _states(results: Results) -> Html:
    trials = results.sweep.trials
    counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
    counts = {state: count for state, count in counts.items() if count}
    parts = [
        tag("span", has={"style": f"flex: {count}; background: var(--{STATE_COLOURS[state]})"})
        for state, count in counts.items()
    ]
    entries = [tag("li", _dot(state), f"{count} {state}") for state, count in counts.items()]
    title = tag("p", tag("strong", f"{len(trials)} trials"))
    bar = tag("div.bar", *parts, has={"aria-hidden": "true"})
    spent = sum(trial.device_seconds or 0 for trial in trials)
    hours = tag("p.pale", f"{_hours(spent)} device hours in all", has={"style": "margin-top: 10px"}) if spent else None
    return tag("div", title, bar, tag("ul.states", *entries), hours)


def _dot(state: str) -> Html:
    return tag("span.dot", has={"style": f"background: var(--{STATE_COLOURS[state]})", "aria-hidden": "true"})


# ---- groups ----------------------------------------------------------------------------------------------------------


def _over_seeds(results: Results, pictures: Sequence[Picture]) -> Section | None:
    if not results.scored or not results.is_repeated:
        return None
    incomplete = any(trial.state in ("stopped early", "failed") for group in results.scored for trial in group.trials)
    prose = f"Mean {results.measure.goal} ± standard deviation (by n − 1) over the n seeds that finished."
    prose += " Where others failed or were stopped early, the mean may flatter the group." if incomplete else ""
    varied, costs = varied_settings(results.sweep.trials), _known(results.sweep.trials)
    columns = [
        *_setting_columns(varied),
        Column(results.measure.title, True),
        Column("n", True),
        *_cost_columns(costs),
    ]
    rows = [
        [
            *_settings(group.settings, varied),
            results.said(group).partition(" (")[0],
            _count(group),
            *_costs(costs, group.cost),
        ]
        for group in results.groups
    ]
    body = joined(_illustrated([prose], pictures), table("Groups", columns, rows, marked=True))
    return Section("groups", "Over seeds", body)


def _count(group: Group) -> str:
    n, trials = len(group.scores), len(group.trials)
    return str(n) if n == trials else f"{n} of {trials}"


def _differences(results: Results, pictures: Sequence[Picture]) -> Section | None:
    pairs, measure = pairs_of(results), results.measure
    if not pairs:
        return None
    prose = (
        "One group minus the other, seed by seed, so that what a seed does to both cancels. Intervals are Student's at"
        f" 95 % each{f', not corrected for {len(pairs)} comparisons' if len(pairs) > 1 else ''}."
    )
    if len(results.scored) - 1 == len(pairs) > 1:
        prose += " All are compared with the group that came out best, which favours it a little."
    rows = []
    for one, other, found in pairs:
        interval, verdict = f"{measure.signed(found.low)} to {measure.signed(found.high)}", measure.verdict(found)
        rows.append([one.label, other.label, measure.signed(found.mean), interval, str(found.n), verdict])
    unit = "difference, points" if measure.is_share else "difference"
    heads = [Column("group"), Column("minus"), Column(unit, True), Column("95 % interval", True), Column("n", True)]
    body = joined(_illustrated([prose], pictures), table("Differences", [*heads, Column("the first is")], rows))
    return Section("differences", "Differences", body)


def _beside_papers(results: Results) -> Section | None:
    found: list[tuple[Group, Trial, Printed]] = []
    for group in results.scored if results.measure.is_top1 else ():
        point = next((trial for trial in group.trials if trial.paper in PAPER), None)
        if point is not None and point.paper is not None:
            found.append((group, point, PAPER[point.paper]))
    if not found:
        return None
    sources = list(dict.fromkeys(printed.source for _, _, printed in found))
    columns = [Column("group"), Column("network, training, images"), Column("ours, top1 %", True)]
    columns += [Column(joined("printed in ", tag("cite", source)), True) for source in sources]
    rows = []
    for group, trial, printed in found:
        spread = "" if printed.spread is None else f" ± {printed.spread:.2f}"
        cell = joined(f"{printed.top1:g}{spread} ", tag("small", printed.place))
        words = "; ".join([say_value(trial.paper.model), *trial.paper[1:]]) if trial.paper else ""
        others = [cell if source == printed.source else None for source in sources]
        rows.append([group.label, tag("div.wide", words), results.said(group), *others])
    prose = (
        "The same network, task and images; a paper's learning rate, schedule and augmentation may differ from ours."
        " These numbers are printed there, not measured here."
    )
    return Section("papers", "Beside the papers", joined(tag("p", prose), table("Beside the papers", columns, rows)))


# ---- trials ----------------------------------------------------------------------------------------------------------


def _every_trial(results: Results) -> Html:
    measure, trials = results.measure, best_first(results.sweep.trials, results.measure)
    # Where there is a table of groups, it has the sizes of their networks.
    costs = [field for field in _known(trials) if field == "device_seconds" or not results.is_repeated]
    varied = varied_settings(trials)
    seeds, linked = any(SEED in trial.settings for trial in trials), any(trial.run_url for trial in trials)
    columns = [
        Column("trial"),
        Column(measure.title, True),
        Column("state"),
        *_setting_columns(varied),
        *([Column("seed", True)] if seeds else []),
        *_cost_columns(costs),
        *([Column("run")] if linked else []),
    ]
    rows: list[list[Content]] = []
    for trial in trials:
        goal = "–" if trial.goal is None else measure.digits(trial.goal)
        seed = [say_value(trial.settings[SEED]) if SEED in trial.settings else "–"] if seeds else []
        name = tag("details", tag("summary", trial.name), _command(trial.command))
        run = [link(trial.run_url, "open")] if linked else []
        spent = _costs(costs, partial(getattr, trial))
        state = joined(_dot(trial.state), trial.state)
        settings = _settings(trial.settings, varied)
        rows.append([name, goal, state, *settings, *seed, *spent, *run])
    listed = table("Trials", columns, rows, marked=bool(trials) and trials[0].score is not None)
    return joined(tag("p", "The best first. A trial opens to the command that repeats it."), listed)


def _setting_columns(varied: Mapping[str, Sequence[object]]) -> list[Column]:
    return [Column("network" if path == MODEL else short_name(path)) for path in varied]


def _settings(settings: Mapping[str, object], varied: Mapping[str, Sequence[object]]) -> list[str]:
    return [say_value(settings[path], among) if path in settings else "–" for path, among in varied.items()]


def _cost_columns(fields: Sequence[str]) -> list[Column]:
    return [Column(COSTS[field], True) for field in fields]


def _costs(fields: Sequence[str], of: Callable[[str], float | None]) -> list[str]:
    return ["–" if (value := of(field)) is None else _cost(field, value) for field in fields]


def _cost(field: str, value: float) -> str:
    return _hours(value) if field == "device_seconds" else f"{value / UNITS.get(field, 1):.3g}"


def _known(trials: Sequence[Trial]) -> list[str]:
    """The costs that some trial knows."""
    return [field for field in COSTS if any(getattr(trial, field) is not None for trial in trials)]


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


def _command(words: str) -> Html:
    return tag("code.command", words, has={"title": "one click selects all of it"})


def _unfinished(results: Results) -> Section | None:
    trials = [trial for trial in results.sweep.trials if trial.state in ("failed", "stopped early")]
    if not trials:
        return None
    entries = []
    for trial in sorted(trials, key=lambda trial: (STATES.index(trial.state) * -1, trial.name)):
        # The last line of a traceback is what went wrong.
        lines = [line for line in (trial.reason or "no reason was recorded").splitlines() if line.strip()]
        whole = tag("details", tag("summary", "all of it"), tag("pre", trial.reason)) if len(lines) > 1 else None
        name = tag("strong", link(trial.run_url, trial.name))
        said = tag("div", lines[-1] if lines else "")
        entries.append(tag("li", _dot(trial.state), name, f" {trial.state}", said, whole))
    return Section("unfinished", "What did not finish", tag("ul.troubles", *entries))


# ---- the rest --------------------------------------------------------------------------------------------------------


def _origin(results: Results) -> Html:
    sweep = results.sweep
    facts = {"recipe": sweep.recipe, "began": sweep.began, **sweep.circumstances}
    entries = [tag(kind, words) for pair in facts.items() for kind, words in zip(("dt", "dd"), pair, strict=True)]
    space = tag("details", tag("summary", "The space"), tag("pre", sweep.space_text)) if sweep.space_text else None
    return joined(_command(sweep.command), tag("dl", *entries), space)


def _illustrated(prose: Sequence[str], pictures: Sequence[Picture]) -> Html:
    """Words above several pictures, or beside a single one."""
    paragraphs = [tag("p", each) for each in prose if each]
    if len(pictures) == 1:
        words = tag("div.prose", *paragraphs, tag("p.pale", pictures[0].caption))
        return tag("div.single", words, _figure(pictures[0]._replace(caption="")))
    words = tag("div.prose", *paragraphs)
    return joined(words, tag("div.pictures", *(_figure(picture) for picture in pictures)) if pictures else None)


def _figure(picture: Picture) -> Html:
    dark = {"srcset": _data("image/png", picture.dark), "media": "(prefers-color-scheme: dark)"}
    light = {"src": _data("image/png", picture.light), "alt": picture.alt}
    shown = tag("picture", tag("source", has=dark), tag("img", has=light))
    return tag("figure", shown, tag("figcaption", picture.caption) if picture.caption else None)


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
