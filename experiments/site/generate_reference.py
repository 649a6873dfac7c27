"""python experiments/site/generate_reference.py: write docs/reference/ from parsers, recipes, spaces and source."""

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import yaml
from api_reference import python_parts
from reference_texts import ARTIFACTS, METRICS, SET_VARIABLES, VARIABLES, cell, code_cell, prose

import tune_spaces
from pipelines import recipes
from pipelines.__main__ import VERBS, main
from vitray.config import load_run
from vitray.models.network import training_gflops

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
VARIABLE = re.compile(r"(?<![\w{])(?:(?:VITRAY|RAY|MLFLOW|AWS|GLOO|NCCL|OMP|KINETO|ORT|TUNE)_\w*[^\W_]|TMPDIR)\b")
CLUSTER_FILES = ("cluster.yaml", "deploy/*.yaml", "deploy/*.sh")
METRIC = re.compile(r"(train|val|best|cost|model|start|data|probe|system|\{[\w.]*split\})/(\S|\{[^}]*\})*")
# The modules that name metrics, and the methods of a tracker that write artifacts and images.
LOGGING = (
    "runs/run_logger",
    "training/loop",
    "training/evaluator",
    "training/prober",
    "metrics/scores",
)
LOGGING += ("system/host_facts", "sweeps/sweep_logger", "evaluation/evaluate")
WRITERS = {"figure", "text", "image"}
EXIT_STATUSES = """\
| exit status | meaning |
|---|---|
| 0 | done |
| 1 | failed while it ran |
| 2 | bad input: one line on stderr |
| 130 | stopped by Ctrl-C |
| 143 | stopped by SIGTERM, as `vitray stop` sends it; `vitray serve` ends with 130 |

`vitray submit --follow` and `vitray jobs JOB --follow` exit with the status of the job."""


class ParserFound(Exception):  # noqa: N818 (it is no error)
    """Raised in place of parsing."""


# ---- verbs -----------------------------------------------------------------------------------------------------------


def parser_of(*words: str) -> argparse.ArgumentParser:
    """Return the parser that the verb of a command line builds."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ParserFound(parser)

    methods = dict.fromkeys(("parse_args", "parse_intermixed_args"), stop)
    with patch.multiple(argparse.ArgumentParser, **methods):
        try:
            main(list(words))
        except ParserFound as found:
            return found.args[0]
    raise AssertionError(f"vitray {' '.join(words)} has no parser")


def verbs_page() -> str:
    """Return the page of all verbs."""
    parts = [top("Verbs", "The arguments and options of each verb, from its parser."), EXIT_STATUSES]
    for verb, text in VERBS.items():
        parts += [f"## vitray {verb}", f"{text[0].upper()}{text[1:]}.", *parser_parts(parser_of(verb))]
        if verb == "doctor":
            parts += ["### doctor data", *parser_parts(parser_of("doctor", "data"))]
    return "\n\n".join(parts) + "\n"


def parser_parts(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the description, the table of arguments, the example, and the same of each command inside."""
    yield prose(parser.description or "")
    actions = [each for each in parser._actions if each.dest != "help" and each.help is not argparse.SUPPRESS]
    inside = next((each for each in actions if isinstance(each.choices, dict)), None)
    rows = ["| argument | meaning |", "|---|---|"]
    for action in actions:
        if action is not inside:
            rows.append(
                f"| {argument(action)} | {cell((action.help or '') % (vars(action) | {'prog': parser.prog}))} |"
            )
    if len(rows) > 2:
        yield "\n".join(rows)
    notes, _, examples = re.sub(r"\bexamples?: ", "\0", parser.epilog or "").partition("\0")
    if notes.strip():
        yield prose(notes)
    if examples:
        lines = "\n".join(examples.split("; "))
        yield f"```text\n{lines}\n```"
    if inside:
        for name, each in (inside.choices or {}).items():
            yield f"### {parser.prog.removeprefix('vitray ')} {name}"
            yield from parser_parts(each)


def argument(action: argparse.Action) -> str:
    """Return an argument as one types it."""
    metavar = action.metavar if isinstance(action.metavar, str) else None
    value = metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    parts = [*action.option_strings[-1:], *([] if action.nargs == 0 else [value])]
    return code_cell(" ".join(parts))


# ---- the source ------------------------------------------------------------------------------------------------------


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield every text of a syntax tree; of an f-string, the template."""
    parts = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
    for node in ast.walk(tree):
        if id(node) not in parts and (text := text_of(node)) is not None:
            yield text


def text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(each.value)}}}" if isinstance(each, ast.FormattedValue) else text_of(each) or ""
            for each in node.values
        )
    return None


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def variables() -> dict[str, set[str]]:
    """Return {environment variable: packages and cluster files that name it}."""
    found = defaultdict(set)
    for path in sorted([*ROOT.glob("vitray/**/*.py"), *ROOT.glob("pipelines/*.py")]):
        for name in VARIABLE.findall("\n".join(strings(tree_of(path)))):
            found[name].add(".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py"))
    for path in sorted(path for pattern in CLUSTER_FILES for path in ROOT.glob(pattern)):
        for name in VARIABLE.findall(path.read_text()):
            found[name].add(str(path.relative_to(ROOT)))
    return found


def metrics() -> set[str]:
    """Return the names of metrics, or their templates, in the modules that log."""
    texts = [text for name in LOGGING for text in strings(tree_of(ROOT / "vitray" / f"{name}.py"))]
    return {text for text in texts if METRIC.fullmatch(text)}


def artifacts() -> set[str]:
    """Return the paths of artifacts and the keys of images that trackers get."""
    calls = [node for path in ROOT.glob("vitray/**/*.py") for node in ast.walk(tree_of(path))]
    return {
        text
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in WRITERS
        if "tracker" in ast.unparse(call.func.value) and (text := text_of(call.args[0])) is not None
    }


def keys_of(path: str, function: str) -> str:
    """Return the keys of the literal dictionaries of a function, as a list."""
    (node,) = [each for each in ast.walk(tree_of(ROOT / path)) if getattr(each, "name", "") == function]
    keys = [key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys if key is not None]
    return ", ".join(f"`{text}`" for key in keys if (text := text_of(key)))


def environment_page() -> str:
    """Return the page of the environment variables; an undescribed one is an error."""
    used = variables()
    check("variable", set(used), {*VARIABLES, *SET_VARIABLES})
    places = {name: ", ".join(f"`{place}`" for place in sorted(files)) for name, files in used.items()}
    yours = [f"| `{name}` | {meaning} | {places[name]} |" for name, meaning in VARIABLES.items()]
    others = [f"| `{name}` | {' | '.join(texts)} | {places[name]} |" for name, texts in SET_VARIABLES.items()]
    parts = [
        top("Environment variables", "The environment variables of vitray and its cluster files."),
        "vitray sets those of the second table, most of them only where you have not. Other variables of Ray, MLflow"
        " and the AWS clients have the meaning that these give them.",
        "## Variables that you set",
        "\n".join(["| variable | meaning | used in |", "|---|---|---|", *yours]),
        "## Variables that vitray or Ray sets",
        "\n".join(["| variable | value | meaning | used in |", "|---|---|---|---|", *others]),
    ]
    return "\n\n".join(parts) + "\n"


def tracking_page() -> str:
    """Return the page of metrics and artifacts; an undescribed one is an error."""
    check("metric", metrics(), set(METRICS))
    check("artifact", artifacts(), set(ARTIFACTS))
    lists = {
        "costs": keys_of("vitray/training/profiling.py", "measure_costs"),
        "load": keys_of("vitray/system/host_facts.py", "sample"),
    }
    parts = [
        top("Metrics and artifacts", "The metrics, images and artifacts that a run logs to MLflow."),
        "Networks are logged models, and images are datasets: [Tracking](../tracking.md) describes both. What holds for"
        " a run as a whole is no metric, so that MLflow's charts show the training: `cost/` and `model/` are"
        " parameters, `best/` of a run and `start/` tags.",
    ]
    for title, texts in (("Metrics, parameters and tags", METRICS), ("Artifacts and images", ARTIFACTS)):
        rows = [f"## {title}\n", "| name | meaning |", "|---|---|"]
        for template, (shown, meaning) in texts.items():
            if shown:
                rows.append(f"| {f'`{template}`' if shown == '=' else shown} | {meaning.format(**lists)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def check(kind: str, used: set[str], described: set[str]) -> None:
    """Refuse a name that is not described in reference_texts.py, or no longer in the source."""
    if used != described:
        raise ValueError(
            f"{kind}s without a description: {sorted(used - described)}; described, not in the source:"
            f" {sorted(described - used)}; edit experiments/site/reference_texts.py"
        )


# ---- recipes and spaces ----------------------------------------------------------------------------------------------


def header(path: Path) -> list[str]:
    """Return the lines of the comment above the settings, without their marks."""
    lines = path.read_text().splitlines()
    return [
        line.removeprefix("#").removeprefix(" ")
        for line in lines[: next(i for i, x in enumerate(lines) if x[:1] != "#")]
    ]


def recipes_page() -> str:
    """Return the page of recipes: the header of each, and its size."""
    parts = [
        top("Recipes", "What each recipe trains, what it costs, and the result that it states."),
        "A backward pass costs about twice its forward pass. Results are published ones where a source is named, else"
        " ours.",
    ]
    for name in recipes.names():
        path = recipes.path_of(name)
        run, raw = load_run(path), yaml.safe_load(path.read_text())
        cost = f"{run.optim.duration} of batch {run.optim.batch}"
        if "name" in raw.get("model", {}):
            gigaflops = training_gflops(run)
            cost += f", {gigaflops:.3g} billion multiply-adds a forward pass of an image of {run.model.image_size} px"
        network = f"`{run.model.name}`" if "name" in raw.get("model", {}) else "the network of `task.weights`"
        parts += [f"## {name}", f"Trains {network}: {cost}.", *header_parts(header(path))]
    return "\n\n".join(parts) + "\n"


def spaces_page() -> str:
    """Return the page of search spaces: the header of each, and the settings that it varies."""
    parts = [top("Search spaces", "What each search space varies, and what its sweep shows.")]
    for name in tune_spaces.names():
        path = tune_spaces.path_of(name)
        varied = ", ".join(f"`{key}`" for key in yaml.safe_load(path.read_text())["space"])
        parts += [f"## {name}", f"Space: {varied}.", *header_parts(header(path))]
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """Return the page of the Python API."""
    first, *parts = python_parts()
    return "\n\n".join([top("Python API", first), *parts]) + "\n"


def header_parts(lines: list[str]) -> Iterator[str]:
    """Yield the paragraphs of a header; its commands and expected results as a text block."""
    block: list[str] = []
    is_command = False
    for line in [*lines, ""]:
        was_command = is_command
        is_command = line.startswith("vitray ") or (is_command and line.startswith(" "))
        if block and (is_command != was_command or not line or line.startswith("source: ")):
            text = "\n".join(block)
            yield f"```text\n{text}\n```" if was_command else prose(" ".join(block))
            block = []
        if line:
            block.append(line)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def top(title: str, text: str) -> str:
    return f"<!-- Generated by `make reference`: edit the source. -->\n# {title}\n\n{text}"


def pages() -> dict[str, str]:
    """Return {file name: text} of docs/reference/."""
    return {
        "verbs.md": verbs_page(),
        "environment.md": environment_page(),
        "tracking.md": tracking_page(),
        "recipes.md": recipes_page(),
        "spaces.md": spaces_page(),
        "python.md": python_page(),
    }


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)
