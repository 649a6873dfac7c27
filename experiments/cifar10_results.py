"""python experiments/cifar10_results.py [SWEEPS]: write docs/results.md from the records of the sweeps of CIFAR-10.

With SWEEPS, the folder of the sweeps, the records of their trials first enter cifar10_results.json, where those of
other trials stay. The page and its pictures are functions of that file: anybody can repeat the statistics without the
runs. Cells without a finished seed are "not measured".
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from cifar10_differences import NOT_MEASURED, Difference, Interval, contrast, differences, interval_of, pooled_cells
from cifar10_rates import NOT_CHOSEN
from cifar10_records import NOTHING, collect, records_text
from cifar10_texts import (
    ATTENTION,
    COMMANDS,
    HEAD,
    HOURS,
    IN_A_MINUTE,
    LABEL_CURVES,
    LABELS,
    METHOD,
    NOT_TESTED,
    ROUTES,
    THINGS,
    VIEWS,
    Thing,
    stem_references,
)

import tune_spaces
from pipelines import recipes
from vitray.config import load_run
from vitray.metrics.groups import GroupDifference
from vitray.sweeps.space import check_space, read_space, resolve_stages

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
RECORDS, PAGE = HERE / "cifar10_results.json", DOCS / "results.md"
LINEAR_PROBES = {0.05: "linear_share0.05", 0.1: "linear_share0.1", 0.5: "linear_share0.5", 1.0: "linear"}
"""{share of the labels: its score}"""
LABELS_PICTURE = "cifar10_labels.png"


class Cell(NamedTuple):
    """A cell of a table: trials that differ in their seed."""

    label: str
    drawn: dict[str, Any]
    """Its values, without the seed."""
    rate: float
    settings: dict[str, Any]
    """Of the first seed, without it."""
    seeds: tuple[int, ...]


class Measured(NamedTuple):
    """The finished trials of a cell, by seed."""

    cell: Cell
    trials: dict[int, dict[str, Any]]

    @property
    def scores(self) -> dict[int, float]:
        """{seed: test accuracy of the last step}."""
        return {seed: trial["top1"] for seed, trial in self.trials.items()}

    @property
    def is_drawn(self) -> bool:
        """Whether learning curves show it: of two seeds the interval would cover the picture."""
        return len(self.trials) > 2

    def cost(self, field: str) -> float | None:
        """The median of a cost over the seeds that have it: some trials waited for other work."""
        values = [trial[field] for trial in self.trials.values() if trial[field] is not None]
        return median(values) if values else None


# ---- cells and statistics --------------------------------------------------------------------------------------------


def cells_of(thing: Thing) -> list[Cell]:
    """Return the planned cells of a thing, in the order of its space."""
    space = read_space(tune_spaces.path_of(thing.space))
    base = load_run(recipes.path_of(thing.recipe), thing.overrides)
    cells: dict[str, Cell] = {}
    for point in check_space(space, base):
        drawn = {key: value for key, value in point.drawn.items() if key != "seed"}
        settings = resolve_stages(point.settings, point.before, f"sweeps/{thing.space}")
        settings = {path: value for path, value in settings.items() if path != "seed"}
        label = thing.label.format(**drawn)
        known = cells.setdefault(label, Cell(label, drawn, settings["optim.lr"], settings, ()))
        cells[label] = known._replace(seeds=(*known.seeds, point.drawn["seed"]))
    return list(cells.values())


def measured(thing: Thing, records: Mapping[str, Any]) -> dict[str, Measured]:
    """Return the cells of a thing with their finished trials, which have the rate of the space."""
    found = {cell.label: Measured(cell, {}) for cell in cells_of(thing)}
    for row in records["trials"]:
        if row["sweep"] == thing.space:
            cell = found[thing.label.format(**row["drawn"])]
            if row["rate"] != cell.cell.rate:
                sys.exit(f"{thing.space}: {row['trial']} has rate {row['rate']}, the space {cell.cell.rate}")
            cell.trials[row["drawn"]["seed"]] = row
    return found


def compared(thing: Thing, cells: Mapping[str, Measured]) -> list[Difference]:
    """Return the differences of a thing's pairs of cells."""
    return differences(thing, pairs_of(thing, list(cells)), scores_of(cells))


def scores_of(cells: Mapping[str, Measured]) -> dict[str, dict[int, float]]:
    """Return {cell: {seed: score}}."""
    return {label: each.scores for label, each in cells.items()}


def pairs_of(thing: Thing, labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of cells that a thing compares: each with each, with its control, or with its references."""
    if thing.control is not None:
        return [(label, thing.control) for label in labels if label != thing.control]
    if thing.references is None:
        return list(combinations(labels, 2))
    return [(label, other) for label in labels for other in thing.references(label)]


# ---- the page --------------------------------------------------------------------------------------------------------


def page(records: Mapping[str, Any]) -> str:
    """Return docs/results.md."""
    parts = [HEAD, "## In a minute", *([IN_A_MINUTE] if records["trials"] else []), summary(records)]
    parts += folded("How it was measured", [METHOD, machine(records)])
    for thing in THINGS:
        parts += folded(thing.title, thing_parts(thing, records))
    if records["views"]:
        parts += folded("Without labels: views and masks", [VIEWS, views_table(records)])
    labels = [LABELS, labels_table(records)]
    if label_curves(records):
        labels += [f"![Linear probes by the share of labels](images/{LABELS_PICTURE})", LABEL_CURVES]
    parts += folded("Scaling of labels", labels)
    parts += folded("Attention of the best network", [ATTENTION])
    parts += folded("Costs", [costs_table(records)])
    parts += folded("What is not tested", [NOT_TESTED])
    commands = [train_command(thing, cell) for thing in THINGS for cell in cells_of(thing)]
    parts += folded("Commands", [COMMANDS, f"{HOURS}\n" + "\n".join(commands) + "\n```"])
    return "\n\n".join(parts) + "\n"


def folded(title: str, parts: Iterable[str]) -> list[str]:
    """Return a section whose parts are hidden until a reader asks for them."""
    return [f"## {title}", '<details markdown="1">\n<summary>Show</summary>', *parts, "</details>"]


def machine(records: Mapping[str, Any]) -> str:
    """Return the circumstances of the records."""
    if not records["trials"]:
        return "Nothing is measured yet: the tables show the plan."
    texts = []
    for facts in records["machines"].values():
        versions = ", ".join(f"{name[8:]} {value}" for name, value in facts.items() if name.startswith("version."))
        place = f"{facts['hardware.cores']} cores of {facts['hardware.cpu']}, {facts['hardware.memory_gigabytes']} GB"
        texts.append(f"{place} ({versions})")
    return f"Measured on {', and on '.join(dict.fromkeys(texts))}."


def summary(records: Mapping[str, Any]) -> str:
    """Return a row for each thing: its pairs by verdict, and the number of those not measured."""
    rows = ["| thing | significant | not significant | not measured |", "|---|---|---|---|"]
    for thing in THINGS:
        unclear, missing, pairs = [], 0, compared(thing, measured(thing, records))
        clear: dict[str, list[str]] = {}
        for each in pairs:
            if each.found is None:
                missing += 1
            elif each.found.is_clear:
                low, high = (each.one, each.other) if each.found.mean < 0 else (each.other, each.one)
                clear.setdefault(low, []).append(high)
            else:
                unclear.append(f"{each.one} and {each.other}")
        lines = [f"{low} < {' / '.join(labels)}" for low, labels in clear.items()]
        columns = ["<br>".join(texts) or "-" for texts in (lines, unclear)]
        rows.append(f"| {thing.title} | {' | '.join(columns)} | {missing} of {len(pairs)} pairs |")
    return "\n".join(rows)


def thing_parts(thing: Thing, records: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of a thing."""
    cells = measured(thing, records)
    yield thing.text
    commands = [shlex.join(["vitray", "sweep", thing.recipe, thing.space, *thing.overrides, "--name", thing.space])]
    rates = f"{thing.space}_rates"
    commands.insert(0, shlex.join(["vitray", "sweep", thing.recipe, rates, *thing.rate_overrides, "--name", rates]))
    commands.insert(1, "python experiments/cifar10_rates.py sweeps")
    yield f"{HOURS}\n" + "\n".join(commands) + "\n```"
    yield "[Commands](#commands) has that of each cell."
    if NOT_CHOSEN in tune_spaces.path_of(thing.space).read_text():
        yield "The rates are not chosen yet: those below are provisional."
    elif tried := rates_table(thing, records):
        yield f"On the development part, top-1 in percent by rate:\n\n{tried}"
        if ends := at_ends(thing, cells, records):
            yield f"Best at the lowest or the highest rate that was tried: {'; '.join(ends)}."
    yield cells_table(cells)
    yield differences_table(thing, cells)
    if thing.references is stem_references:
        yield (
            "How much of a stem's lead over the linear one is left after pre-training, with Student's intervals, which"
            " hold one by one:"
        )
        yield changes_table(thing, cells)
    if any(each.is_drawn for each in cells.values()):
        yield f"![Learning curves of {thing.title}](images/{thing.picture})"
        yield "Means over the seeds of the table, with Student's 95 % interval at each step."
    yield thing.paper


def rates_table(thing: Thing, records: Mapping[str, Any]) -> str:
    """Return the scores on the development part by cell and rate; nothing without records."""
    rates: dict[str, dict[float, list[float]]] = {}
    for row in records["trials"]:
        if row["sweep"] == f"{thing.space}_rates":
            rates.setdefault(thing.label.format(**row["drawn"]), {}).setdefault(row["rate"], []).append(row["top1"])
    columns = sorted({rate for tried in rates.values() for rate in tried})
    rows = [f"| cell | {' | '.join(f'{rate:g}' for rate in columns)} |", "|---|" + "---|" * len(columns)]
    for label, tried in rates.items():
        rows.append(
            f"| {label} | {' | '.join(points(fmean(tried[rate])) if rate in tried else '' for rate in columns)} |"
        )
    return "\n".join(rows) if rates else ""


def at_ends(thing: Thing, cells: Mapping[str, Measured], records: Mapping[str, Any]) -> list[str]:
    """Return the cells whose rate is at an end of those tried."""
    tried: dict[str, set[float]] = {}
    for row in records["trials"]:
        if row["sweep"] == f"{thing.space}_rates":
            tried.setdefault(thing.label.format(**row["drawn"]), set()).add(row["rate"])
    return [label for label, rates in tried.items() if cells[label].cell.rate in (min(rates), max(rates))]


def cells_table(cells: Mapping[str, Measured]) -> str:
    """Return the accuracy and the costs of each cell."""
    rows = [
        "| cell | rate | top-1 of test, % | interval, 95 % | spread | seeds | wall, s | device, s | MB | memory, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, each in cells.items():
        scores = list(each.scores.values())
        if not scores:
            rows.append(f"| {label} | {each.cell.rate:g} | {NOT_MEASURED} | | | 0 of {len(each.cell.seeds)} | | | | |")
            continue
        interval = interval_of(scores) if len(scores) > 1 else None
        bounds = f"{points(interval.low)} to {points(interval.high)}" if interval else ""
        spread = points(stdev(scores)) if len(scores) > 1 else ""
        costs = [number(each.cost(field)) for field in ("wall_seconds", "device_seconds")]
        costs += [number(each.cost(field), 1e6, 2) for field in ("model_bytes", "peak_memory_bytes")]
        texts = [
            f"{each.cell.rate:g}",
            points(fmean(scores)),
            bounds,
            spread,
            f"{len(scores)} of {len(each.cell.seeds)}",
        ]
        rows.append(f"| {' | '.join([label, *texts, *costs])} |")
    return "\n".join(rows)


def differences_table(thing: Thing, cells: Mapping[str, Measured]) -> str:
    """Return the differences of a thing."""
    rows = ["| difference | points | interval, 95 % | p | verdict |", "|---|---|---|---|---|"]
    for each in compared(thing, cells):
        texts = [*interval_texts(each.found), "" if each.found is None else p_text(each.found.p)]
        rows.append(f"| {each.one} − {each.other} | {' | '.join(texts)} | {each.verdict} |")
    return "\n".join(rows)


def p_text(p: float) -> str:
    """Return a p value to three places."""
    return f"{p:.3f}" if p >= 0.0005 else "<0.001"


def interval_texts(interval: Interval | GroupDifference | None) -> list[str]:
    """Return mean and bounds of a difference in points."""
    if interval is None:
        return ["", ""]
    return [f"{100 * interval.mean:+.2f}", f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f}"]


def changes_table(thing: Thing, cells: Mapping[str, Measured]) -> str:
    """Return by how much each stem's lead over the linear one changes by pre-training."""
    pooled = pooled_cells(thing, scores_of(cells))
    rows = ["| lead over linear | with labels | after | change | interval, 95 % |", "|---|---|---|---|---|"]
    for stem, route in product(("hmlp_bn", "hmlp_ln", "conv"), ("beit", "mae")):
        before, after = ({f"{stem}, {each}": 1.0, f"linear, {each}": -1.0} for each in ("supervised", route))
        leads = [contrast(pooled, lead) for lead in (before, after)]
        texts = [f"{100 * lead.mean:+.2f}" if lead else "" for lead in leads]
        change = contrast(pooled, after | {label: -weight for label, weight in before.items()})
        rows.append(f"| {stem}, {route} | {' | '.join([*texts, *interval_texts(change)])} |")
    return "\n".join(rows)


def train_command(thing: Thing, cell: Cell) -> str:
    """Return the command of one trial of a cell."""
    settings = [
        f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in cell.settings.items()
    ]
    return shlex.join(["vitray", "train", thing.recipe, *thing.overrides, *settings, f"seed={cell.seeds[0]}"])


def label_scores(records: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return {route: the scores of the probes, by seed} of the networks without labels and with all of them."""
    routes: dict[str, list[Mapping[str, Any]]] = {"supervised": [], "beit": [], "mae": []}
    for row in records["labels"]:  # .../before/beit/beit=linear,0 or ... route=supervised seed=0
        (route,) = re.findall(r"/before/(\w+)/| route=(\w+) ", row["model"])
        routes["".join(route)].append(row)
    return routes


def labels_table(records: Mapping[str, Any]) -> str:
    """Return the mean scores of probes by the share of labels, over the seeds of each network."""
    names = {name: f"{share:.0%} of labels" for share, name in LINEAR_PROBES.items()}
    names |= {f"few_shot{shots}": f"{shots} a class" for shots in (1, 5, 10, 25)}
    rows = [f"| network | seeds | {' | '.join(names.values())} |", "|---|" + "---|" * (1 + len(names))]
    for route, found in label_scores(records).items():
        texts = []
        for name in names:
            texts.append(mean_text([row[name] for row in found if row.get(name) is not None]))
        rows.append(f"| {route} | {len(found)} | {' | '.join(texts)} |")
    return "\n".join(rows)


def label_curves(records: Mapping[str, Any]) -> dict[str, dict[float, list[float]]]:
    """Return {route: {share of labels: scores}} of the linear probes of routes with three seeds."""
    return {
        route: {share: [row[name] for row in found] for share, name in LINEAR_PROBES.items()}
        for route, found in label_scores(records).items()
        if len(found) > 2 and all(name in row for row in found for name in LINEAR_PROBES.values())
    }


def costs_table(records: Mapping[str, Any]) -> str:
    """Return the cost of each sweep, with its stages."""
    rows = ["| sweep | runs | device hours | hours of its trials, one after another |", "|---|---|---|---|"]
    totals = [0.0, 0.0, 0.0]
    for thing in THINGS:
        for name in (f"{thing.space}_rates", thing.space):
            own = [row for row in records["trials"] if row["sweep"] == name]
            stages = [row for row in records["stages"] if row["sweep"] == name]
            runs = len(own) + sum(row["runs"] for row in stages)
            hours = [
                sum(row[field] or 0 for row in [*own, *stages]) / 3600 for field in ("device_seconds", "wall_seconds")
            ]
            totals = [total + part for total, part in zip(totals, (runs, *hours), strict=True)]
            rows.append(f"| {name} | {runs or NOT_MEASURED} | {hours[0]:.2f} | {hours[1]:.2f} |")
    rows.append(f"| all | {totals[0]:.0f} | {totals[1]:.2f} | {totals[2]:.2f} |")
    return "\n".join(rows)


def views_table(records: Mapping[str, Any]) -> str:
    """Return the probes of each objective without labels, and the accuracy after training with all labels."""
    names = {"knn20": "kNN", "linear": "linear", "few_shot10": "10 labels a class"}
    rows = [f"| objective | seeds | {' | '.join(names.values())} | trained on with labels | minutes |"]
    rows.append("|---|---|" + "---|" * (len(names) + 2))
    for route, (label, tuned) in ROUTES.items():
        probed = [row for row in records["views"] if f"/route={route} " in row["model"]]
        trained, after = (
            [row for row in records["trials"] if row["sweep"] == sweep and row["drawn"]["route"] == name]
            for sweep, name in (("cifar10_views", route), ("cifar10_views_tuned", tuned))
        )
        texts = [mean_text([row[name] for row in probed if name in row]) for name in names]
        texts.append(mean_text([row["top1"] for row in after]))
        minutes = median([row["wall_seconds"] for row in trained]) / 60 if trained else None
        rows.append(f"| {label} | {len(probed)} | {' | '.join(texts)} | {number(minutes)} |")
    return "\n".join(rows)


def mean_text(scores: Sequence[float]) -> str:
    """Return the mean and, of several, the standard deviation of scores in percent."""
    spread = f" ± {points(stdev(scores))}" if len(scores) > 1 else ""
    return f"{points(fmean(scores))}{spread}" if scores else NOT_MEASURED


def points(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.2f}"


def number(value: float | None, unit: float = 1, digits: int = 0) -> str:
    """Return a cost, or nothing where it is unknown."""
    return "" if value is None else f"{value / unit:,.{digits}f}"


def main(sweeps: str | None) -> None:
    """Write the records, if there are sweeps to read, the page and its pictures."""
    from cifar10_pictures import draw_all  # which imports this module

    records = known = NOTHING | (json.loads(RECORDS.read_text()) if RECORDS.exists() else {})
    if sweeps and (records := collect(sweeps, known)) == known:
        print(f"{sweeps}: no new trial")
    if records != known:
        RECORDS.write_text(records_text(records))
    PAGE.write_text(page(records))
    draw_all(records)
    print(f"{PAGE}: written")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(f"usage: {__doc__.partition(':')[0]}")
    main(sys.argv[1] if len(sys.argv) > 1 else None)
