"""python experiments/cifar10_rates.py SWEEPS: write the rates chosen on the development part into the spaces.

For each space of docs/results.md it reads the finished trials of SWEEPS/SPACE_rates, takes the rate with the highest
last score for each cell, and replaces the lookup below `# rates` in tune_spaces/SPACE.yaml. A sweep with a trial that
has not finished changes nothing; one of other settings, as without the development part, is refused. Several seeds of a
cell count by their mean, and of equal rates the lower one is chosen.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from cifar10_texts import COMING, THINGS

import tune_spaces
from pipelines import recipes
from vitray.config import load_run
from vitray.config.sweep import slug
from vitray.runs.run_dir import OUTCOME
from vitray.sweeps.plan import SWEEP_META
from vitray.sweeps.space import grid_points, name_of, read_space
from vitray.sweeps.trial_store import read_entries
from vitray.system import storage
from vitray.system.storage import scratch_folder

MARK, INDENT = "  # rates\n", "      "
# In the head of a space; a line does not break inside.
NOT_CHOSEN, CHOSEN = "cifar10_rates.py has not chosen", "cifar10_rates.py has chosen"
# Settings that change neither images nor steps.
EXECUTION = ("compute.", "tracking.", "data.url", "data.cache", "evaluate.", "checkpoint.", "task.weights")


class Tried(NamedTuple):
    """A trial of a rate on the development part."""

    cell: dict[str, Any]
    """The drawn values without rate and seed."""
    rate: float
    score: float


def main(sweeps: str) -> None:
    """Choose the rates of every space whose sweep is complete, and print each cell."""
    for thing in (*THINGS, *COMING):
        name = thing.space
        sweep_dir = storage.join(sweeps, f"{name}_rates")
        tried, missing = read_tried(sweep_dir, f"{name}_rates")
        if missing:
            print(f"{name}: unchanged, {len(missing)} trials have not finished, such as {missing[0]}")
            continue
        check_settings(sweep_dir, thing.recipe, thing.rate_overrides)
        path = tune_spaces.path_of(name)
        best = best_rates(tried)
        path.write_text(with_rates(path.read_text(), rate_lines(best, read_space(path).space["optim.lr"].of)))
        for cell, rate in best:
            rates = sorted(each.rate for each in tried if each.cell == cell)
            at_end = "  (at an end of the rates)" if rate in (rates[0], rates[-1]) else ""
            print(f"{name}: {', '.join(map(str, cell.values()))}: {slug(rate)}{at_end}")


def check_settings(sweep_dir: str, recipe: str, overrides: Sequence[str]) -> None:
    """Refuse a sweep whose settings are not those of the page, such as one of fewer epochs."""
    with scratch_folder() as folder:
        (path := folder / "run.yaml").write_text(storage.read_json(storage.join(sweep_dir, SWEEP_META))["base"])
        found = load_run(path).dotted()
    wanted = load_run(recipes.path_of(recipe), overrides).dotted()
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name) and not name.startswith(EXECUTION):
            sys.exit(f"{sweep_dir}: {name}: got {found.get(name)}, expected {wanted.get(name)} as on the page")


def read_tried(sweep_dir: str, space: str) -> tuple[list[Tried], list[str]]:
    """Return the finished trials of a sweep of rates, and the names of the others."""
    planned = read_space(tune_spaces.path_of(space))
    names = {name_of(point, planned): point.drawn for point in grid_points(planned)}
    drawn = names | {name: entry.point.drawn for name, entry in read_entries(sweep_dir).items()}  # with rates of --add
    tried, missing = [], []
    for name, values in drawn.items():
        path = storage.join(sweep_dir, name, OUTCOME)
        outcome = storage.read_json(path) if storage.exists(path) else {}
        if outcome.get("state") != "finished":
            missing.append(name)
        else:
            cell = {key: value for key, value in values.items() if key not in ("rate", "seed")}
            tried.append(Tried(cell, values["rate"], outcome["val_top1"]))
    return tried, missing


def best_rates(tried: Sequence[Tried]) -> list[tuple[dict[str, Any], float]]:
    """Return each cell, in order, with its rate of the highest mean score; of equal ones, the lowest."""
    cells = {json.dumps(each.cell): each.cell for each in tried}
    best = []
    for cell in cells.values():
        scores: dict[float, list[float]] = {}
        for each in tried:
            if each.cell == cell:
                scores.setdefault(each.rate, []).append(each.score)
        best.append((cell, max(sorted(scores), key=lambda rate: fmean(scores[rate]))))
    return best


def rate_lines(best: Sequence[tuple[Mapping[str, Any], float]], of: Sequence[str]) -> list[str]:
    """Return the rows of a lookup by one or two variables."""
    rows: dict[str, list[str]] = {}
    for cell, rate in best:
        first, *rest = (slug(cell[name]) for name in of)
        rows.setdefault(first, []).append(f"{''.join(f'{key}: ' for key in rest)}{slug(rate)}")
    start, end = "{}" if len(of) > 1 else ("", "")
    return [f"{INDENT}{first}: {start}{', '.join(rates)}{end}\n" for first, rates in rows.items()]


def with_rates(text: str, lines: Sequence[str]) -> str:
    """Return a space with these rows in place of those below its mark."""
    head, mark, rest = text.partition(MARK)
    assert mark, f"no line {MARK.strip()!r}"
    kept = rest.splitlines(keepends=True)
    while kept and kept[0].startswith(INDENT):
        kept = kept[1:]
    return head.replace(NOT_CHOSEN, CHOSEN) + mark + "".join([*lines, *kept])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {__doc__.partition(':')[0]}")
    main(sys.argv[1])
