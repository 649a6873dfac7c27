"""Layers and doors: who may import whom, held as two literals and checked on the syntax tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports only from lower layers. `model` stands for every module of the package but the one named apart.
LAYERS = (
    {"vitray.model.names", "vitray.waking"},  # the standard library alone: names are read before torch is
    {"vitray.config"},
    {"vitray.model", "vitray.storage", "vitray.augment", "vitray.optim", "vitray.schedule", "vitray.cluster"},
    {"vitray.tuning", "vitray.tokenizer", "vitray.admission", "vitray.expressions", "vitray.report"},
    {"vitray.masked", "vitray.space"},
    {"vitray.registry"},
    {"vitray.probing", "vitray.jobs", "vitray.launching"},
    {"vitray.weights", "vitray.shards", "vitray.task", "vitray.checkpoints", "vitray.doctor"},
    {"vitray.stream", "vitray.tracking", "vitray.start"},
    {"vitray.evaluation", "vitray.plan"},
    {"vitray.loop"},
    {"vitray.search"},
    {"vitray.bench"},
    {"vitray"},
    {"pipelines"},
)

# A platform enters only through its doors.
DOORS = {
    "mlflow": {"vitray.registry", "vitray.tracking"},
    "ray.data": {"vitray.stream", "vitray.cluster"},  # the cluster: actors of Ray Data that are begun early
    "ray.train": {"vitray.loop"},
    "ray.tune": {"vitray.search"},
    "ray.job_submission": {"vitray.jobs"},
    "ray.autoscaler": {"vitray.launching"},
    "optuna": {"vitray.search"},
    "boto3": {"vitray.storage", "vitray.probing", "vitray.launching"},
    "botocore": {"vitray.storage", "vitray.probing", "vitray.launching"},
    "pyarrow.fs": {"vitray.storage"},
    "matplotlib": {"vitray.bench", "vitray.report", "vitray.tracking"},
    "simplejpeg": {"vitray.augment"},
    "torchvision": {"vitray.augment", "vitray.bench"},  # the bench: what we compare with
}

# A recipe loads at once.
LIGHT = (
    "vitray",
    "vitray.waking",
    "vitray.config",
    "vitray.model",
    "vitray.model.names",
    "vitray.model.sizes",
    "vitray.schedule",
    "vitray.space",
    "vitray.admission",
)


def modules(root: Path) -> dict[str, ast.Module]:
    """{dotted name: syntax tree} of our source under `root`."""
    found = {}
    for folder in ("vitray", "pipelines"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree: ast.Module) -> set[str]:
    """Every dotted name a module imports, inside functions too; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its layer"
            # `from vitray import storage` is a way to write vitray.storage, not an import of the public names.
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | ({node.module or ""} - {"vitray"})
    return names


def room_of(module: str) -> tuple[int, str]:
    """The layer and the name of the longest listed entry that `module` is or lies in."""
    listed = {room: index for index, layer in enumerate(LAYERS) for room in layer}
    room = module
    while room not in listed:
        assert room, f"{module} has no layer"
        room = room.rpartition(".")[0]
    return listed[room], room


def layer_faults(found: dict[str, ast.Module]) -> list[str]:
    """Imports that do not go down; within one room, modules may use each other."""
    return [
        f"{module} imports {target}, which is not in a lower layer"
        for module, tree in found.items()
        for target in imports(tree) & set(found)
        if room_of(module) != room_of(target) and room_of(module)[0] <= room_of(target)[0]
    ]


def door_faults(found: dict[str, ast.Module]) -> list[str]:
    """Imports of a platform outside its doors."""
    return [
        f"{module} imports {target}: {platform} enters only through {', '.join(sorted(doors)) or 'no module yet'}"
        for module, tree in found.items()
        for target in imports(tree)
        for platform, doors in DOORS.items()
        if (target == platform or target.startswith(f"{platform}."))
        and not any(module == door or module.startswith(f"{door}.") for door in doors)
    ]


def test_imports_go_down():
    assert layer_faults(modules(ROOT)) == []


def test_platforms_enter_by_their_doors():
    assert door_faults(modules(ROOT)) == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print({{'torch', 'ray', 'mlflow', 'pyarrow', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("from vitray.bench import measure", "vitray.model.blocks imports vitray.bench"),
        ("def late():\n    import pipelines.model", "vitray.model.blocks imports pipelines.model"),
        ("import mlflow", "vitray.model.blocks imports mlflow: mlflow enters only through"),
        (
            "def late():\n    from ray import data",
            "vitray.model.blocks imports ray.data: ray.data enters only through",
        ),
        ("from pyarrow import fs", "vitray.model.blocks imports pyarrow.fs"),
    ],
)
def test_a_planted_violation_is_found(planted, fault):
    found = modules(ROOT) | {"vitray.model.blocks": ast.parse(planted)}
    assert any(line.startswith(fault) for line in layer_faults(found) + door_faults(found))


def test_names_may_not_import_config():
    found = modules(ROOT) | {"vitray.model.names": ast.parse("import vitray.config")}
    assert layer_faults(found)
