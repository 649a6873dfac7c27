"""Only documented names of the platforms are used, except those listed here with a reason."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORMS = ("ray", "mlflow", "torch", "optuna")
# Private names of platforms in our source: at most three, none of them a subclass or a patch.
PRIVATE_NAMES = {
    # Measures activations on shapes; meta tensors would decompose attention, and torch has no public fake tensors.
    "torch._subclasses.fake_tensor.FakeTensorMode",
    # Counts the writes to a weight: any write invalidates the cached fused weights.
    "_version",
    # A task must release its CPU while nobody reads its blocks; Ray Data has no public option.
    "_max_num_blocks_in_streaming_gen_buffer",
}
NAMED_TUPLE = {"_asdict", "_replace", "_fields", "_make", "_field_defaults"}


def private_names(source: str) -> set[str]:
    """The private names of platforms that a module imports, and the private attributes that it does not define."""
    tree = ast.parse(source)
    own = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
    private = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                private |= {name.name for name in names if is_private_path(name.name)}
            case ast.ImportFrom(module=str(module), names=names):
                private |= {path for name in names if is_private_path(path := f"{module}.{name.name}")}
            case ast.Attribute(value=value, attr=attr) if attr.startswith("_") and not attr.startswith("__"):
                if attr not in own | NAMED_TUPLE and not is_self(value):
                    private.add(attr)
    return private


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private_path(path: str) -> bool:
    platform, *parts = path.split(".")
    return platform in PLATFORMS and any(part.startswith("_") for part in parts)


def test_private_names_of_platforms_are_listed():
    files = [path for folder in ("vitray", "pipelines", "deploy") for path in (ROOT / folder).rglob("*.py")]
    assert set().union(*(private_names(path.read_text()) for path in files)) == PRIVATE_NAMES
    assert len(PRIVATE_NAMES) <= 3


def test_no_class_of_a_platforms_insides_is_extended_and_nothing_is_patched():
    for path in [*(ROOT / "vitray").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        imported = [
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for name in node.names
            if is_private_path(f"{node.module}.{name.name}")
        ]
        private = {name.asname or name.name for name in imported}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                assert private.isdisjoint(ast.unparse(base).split(".")[-1] for base in node.bases), path
            if isinstance(node, ast.ImportFrom | ast.Import):
                assert "mock" not in ast.unparse(node), path


def test_each_kind_of_private_name_is_seen():
    assert private_names(
        "from ray._private.worker import x\nimport torch._dynamo\nfrom torch import _foreach_add_"
    ) == {
        "ray._private.worker.x",
        "torch._dynamo",
        "torch._foreach_add_",
    }
    assert private_names("import torch\ntorch._foreach_add_(a, b)\nself._x = 1\nother._x\np._replace(a=1)") == {
        "_foreach_add_"
    }
