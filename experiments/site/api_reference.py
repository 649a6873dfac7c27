"""docs/reference/python.md: the documented names of the Python API, from their source: signatures and docstrings."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from reference_texts import cell, code_cell, prose

import vitray
from vitray import inspection
from vitray.config.sections import Section

# Public names beside those of `vitray` and `vitray.inspection`, by the module to import them from.
MODULES = {
    "vitray.weights": ("LoadedModel", "SavedModel", "identity_of", "load_tokenizer", "save_tokenizer"),
    "vitray.weights.family": ("Family", "Member"),
    "vitray.data.shards.demo": ("CLASSES", "demo_item"),
    "vitray.inference.answers": ("answer", "class_names", "probabilities", "view_of"),
    "vitray.data.shards": ("Dataset", "ShardRequest", "ShardSettings", "open_dataset", "read_request", "write_dataset"),
    "vitray.config.augmentation": ("Augment", "CenterCrop", "Mix", "Normalize"),
    "vitray.runs.run_dir": ("Outcome",),
    "vitray.runs.saved_run": ("SavedRun",),
    "vitray.sweeps.saved_sweep": ("SavedSweep",),
    "vitray.verbs": ("Report",),
    "vitray.serving.flavor": ("log_family", "log_model"),
}
TOP = """What to import, with types and meanings. `import vitray` loads neither torch nor Ray.

Names of `vitray` and `vitray.inspection` are stable: a change of one is in the [changelog](../../CHANGELOG.md). Other
modules are internal, but for the names below."""
WIDTH = 100
Definition = ast.FunctionDef | ast.ClassDef


def python_parts() -> Iterator[str]:
    """Yield the paragraphs of the page."""
    yield TOP
    # Exports of the package, without private names.
    inside = [name for name in vars(inspection) if name in _exports(inspection)]
    tables = {"vitray": (vitray, tuple(vitray.PUBLIC)), "vitray.inspection": (inspection, tuple(inside))}
    tables |= {name: (importlib.import_module(name), names) for name, names in MODULES.items()}
    for title, (module, names) in tables.items():
        yield f"## {title}"
        if title == "vitray.inspection":
            yield prose(inspection.__doc__ or "")
        for name in names:
            yield f"### {name}"
            thing = getattr(module, name)
            yield from _parts(thing) if callable(thing) else _constant(module, name)


def _exports(module: Any) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    return {each.asname for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names if each.asname}


def _parts(thing: Any) -> Iterator[str]:
    """Yield signature, docstring, fields and methods of a class or a function."""
    node = _definition(thing)
    if isinstance(node, ast.FunctionDef):
        yield _stub([_signature(node)])
        yield from _paragraphs(node)
        return
    is_section = issubclass(thing, Section) and thing.__module__.startswith("vitray.config.")
    start = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
    if isinstance(start, ast.FunctionDef):
        yield _stub([_signature(start).replace("def __init__(self, ", f"{node.name}(").replace(") -> None", ")")])
    yield from _paragraphs(node)
    if isinstance(start, ast.FunctionDef):
        yield from _paragraphs(start)
    if is_section:
        yield "Its fields are the settings of [Settings](../settings.md)."
    elif rows := list(_fields(node.body)):
        yield "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            yield _stub(
                [f"@{ast.unparse(mark)}" for mark in each.decorator_list if _is_shown(mark)] + [_signature(each)]
            )
            yield from _paragraphs(each)


def _constant(module: Any, name: str) -> Iterator[str]:
    """Yield the type of a constant, and the text below it."""
    body = ast.parse(inspect.getsource(module)).body
    place = next(at for at, each in enumerate(body) if isinstance(each, ast.Assign) and _names(each) == [name])
    yield _stub([f"{name}: {type(getattr(module, name)).__name__}"])
    match body[place + 1]:
        case ast.Expr(value=ast.Constant(value=str(text))):
            yield text
        case _:
            raise ValueError(f"{name} has no text below it")


def _names(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


def _definition(thing: Any) -> Definition:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body
    assert isinstance(node, Definition), thing
    return node


def _is_shown(mark: ast.expr) -> bool:
    return ast.unparse(mark) in ("property", "classmethod", "staticmethod", "cached_property")


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){returns}"
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _stub(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    return f"```pyi\n{text}\n```"


def _fields(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield a row of the table for each annotated field; the text below a field is its meaning."""
    for each, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and not (name := ast.unparse(each.target)).startswith("_"):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = f"{following.value.value}" if is_text else ""  # pyright: ignore[reportAttributeAccessIssue]
            default = f" = {ast.unparse(each.value)}" if each.value else ""
            yield f"| `{name}` | {code_cell(ast.unparse(each.annotation) + default)} | {cell(text)} |"


def _paragraphs(node: Definition) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
        if paragraph:
            yield prose(paragraph)
