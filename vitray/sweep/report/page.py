"""The page of a sweep: one HTML file without a script, which loads nothing."""

from collections.abc import Iterator, Mapping, Sequence

from vitray.pages.markup import Html, Picture, command_box, data_url, link, state_dot, tag
from vitray.pages.shell import html_page
from vitray.pages.styling import STATE_COLORS
from vitray.sweep.report.groups import Results, pairs_of
from vitray.sweep.report.sections import page_sections
from vitray.sweep.report.trials import STATES, best_first, hours_text, leader

VERDICTS = {
    "better": "is better than",
    "worse": "is worse than",
    "no clear difference": "is not clearly different from",
}


def render(results: Results, pictures: Mapping[str, Sequence[Picture]], table_csv: bytes) -> str:
    """Return the page; `pictures` has a key for each section, its anchor."""
    parts = page_sections(results, pictures)
    csv_link = tag("a", "results.csv", has={"href": data_url("text/csv", table_csv), "download": "results.csv"})
    footer = tag("footer", "All trials as a table: ", csv_link, ".")
    return html_page(f"{results.sweep.name}: {results.sweep.goal}", _headline(results), parts, footer)


def _headline(results: Results) -> Html:
    sweep = results.sweep
    return tag(
        "header",
        tag("p.eyebrow", f"Sweep of {sweep.recipe}, started {sweep.began}"),
        tag("h1", sweep.name),
        tag("p.lede", sweep.plan),
        tag("div.hero", _best(results), _states(results)),
    )


def _best(results: Results) -> Html:
    measure, best = results.measure, leader(results.sweep.trials, results.measure)
    if best is None or best.score is None:
        return tag("div", tag("p", f"No trial has a value of {measure.goal} yet."))
    so_far = "" if best.state == "finished" else " so far"
    extreme = "highest" if measure.mode == "max" else "lowest"
    parts = [
        tag("p.big", measure.text(best.score), tag("small", f"{extreme} {measure.goal}{so_far}")),
        tag("p", tag("strong", link(best.run_url, best.name))),
    ]
    better = best_first(results.sweep.trials, measure)[0]
    if measure.rank(better.score) < measure.rank(best.score):
        parts.append(tag("p", f"{better.name}, {better.state}, had reached {measure.text(better.score or 0)}."))
    parts.append(tag("details", tag("summary", "Command to repeat this trial"), command_box(best.command)))
    return tag("div", *parts, *(tag("p.pale", sentence) for sentence in _seeds_verdict(results)))


def _seeds_verdict(results: Results) -> Iterator[str]:
    """The best group's mean over its seeds, and its difference from the next group."""
    measure, groups = results.measure, results.scored
    if not groups or len(groups[0].scores) < 2:
        return
    first = groups[0]
    yield f"Best on average: {first.label}, {results.score_text(first)}."
    pair = next((pair for pair in pairs_of(results) if pair.one == first), None)
    if pair is not None:
        mean, low, high = (measure.signed(value) for value in pair.difference[:3])
        verdict = VERDICTS[pair.difference.verdict(measure.mode)]
        yield (
            f"Over {pair.difference.n} common seeds it {verdict} {pair.other.label}: "
            f"{mean}, with a 95 % interval from {low} to {high}."
        )


def _states(results: Results) -> Html:
    trials = results.sweep.trials
    counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
    counts = {state: count for state, count in counts.items() if count}
    parts = [
        tag("span", has={"style": f"flex: {count}; background: var(--{STATE_COLORS[state]})"})
        for state, count in counts.items()
    ]
    entries = [tag("li", state_dot(state), f"{count} {state}") for state, count in counts.items()]
    title = tag("p", tag("strong", f"{len(trials)} trials"))
    bar = tag("div.bar", *parts, has={"aria-hidden": "true"})
    spent = sum(trial.device_seconds or 0 for trial in trials)
    total = f"{hours_text(spent)} device hours in total"
    hours = tag("p.pale", total, has={"style": "margin-top: 10px"}) if spent else None
    return tag("div", title, bar, tag("ul.states", *entries), hours)
