"""Import rules: the layers ("floors") of modules, and the packages ("doors") that may import a platform."""

import ast
import functools
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports only from lower floors. A package stands for its modules, except those listed separately.
FLOORS = (
    {"vitray.errors", "vitray.system.scratch", "vitray.cluster.local_ray"},
    {"vitray.config", "vitray.system.storage", "vitray.cluster.session"},
    {"vitray.models", "vitray.pages", "vitray.data.augment", "vitray.system"},
    {"vitray.weights", "vitray.cluster"},
    {"vitray.data", "vitray.tasks", "vitray.metrics", "vitray.inspection"},
    {"vitray.inference"},
    {"vitray.serving"},
    {"vitray.tracking"},
    {"vitray.evaluation", "vitray.inspection.report"},
    {"vitray.training"},
    {"vitray.runs"},
    {"vitray.bench", "vitray.sweeps", "vitray.evaluation.vtab", "vitray.exports"},
    {"vitray.verbs"},
)
# Above all floors: the public names, and the verbs.
ROOF = {"vitray", "pipelines"}

# A platform enters only through its doors.
DOORS = {
    "mlflow": {
        "vitray.tracking",
        "vitray.system.mlflow_client",
        "vitray.weights.addresses",
        "vitray.serving.flavor",
        "vitray.serving.pyfunc",
    },
    "ray.data": {"vitray.data", "vitray.inference.pipeline"},
    "ray.train": {"vitray.runs"},
    "ray.tune": {"vitray.sweeps"},
    "ray.serve": {"vitray.serving"},
    "ray.job_submission": {"vitray.cluster.jobs"},
    "ray.autoscaler": {"vitray.cluster.launch"},
    "optuna": {"vitray.sweeps"},
    "jinja2": {"vitray.pages"},
    "boto3": {"vitray.system.storage", "vitray.cluster.storage_check", "vitray.cluster.launch"},
    "botocore": {
        "vitray.system.storage",
        "vitray.cluster.storage_check",
        "vitray.cluster.launch",
    },
    "pyarrow.fs": {"vitray.system.storage"},
    "matplotlib": {
        "vitray.pages",
        "vitray.bench",
        "vitray.evaluation",
        "vitray.inspection.report",
        "vitray.sweeps.report",
        "vitray.tracking",
    },
    "onnxruntime": {"vitray.exports"},
    "simplejpeg": {"vitray.data.augment"},
    # bench compares with it; its networks are side by side with ours
    "torchvision": {"vitray.data.augment", "vitray.bench", "vitray.models.other_networks"},
}

# Modules that load nothing heavy, so that a recipe is parsed at once.
LIGHT = (
    "vitray",
    "vitray.config",
    "vitray.models",
    "vitray.config.model_names",
    "vitray.models.sizes",
    "vitray.training.schedule",
    "vitray.sweeps.space",
    "vitray.sweeps.capacity",
)


@functools.cache
def modules(root: Path) -> dict[str, ast.Module]:
    """{dotted name: syntax tree} of our source under `root`; do not change it."""
    trees = {}
    for folder in ("vitray", "pipelines"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return trees


@functools.cache
def import_statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, inside functions too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(tree: ast.Module, ours: Collection[str] = ()) -> set[str]:
    """Return every dotted name that a module imports, inside functions too.

    `from a import b` counts as a.b, and as a as well unless a.b is one of our modules.
    """
    names: set[str] = set()
    for node in import_statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"line {node.lineno}: a relative import hides its layer"
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= imported if all(name in ours for name in imported) else imported | {node.module or ""}
    return names


def room_of(module: str) -> tuple[int, str]:
    """The floor and the name of the longest listed entry that `module` is or lies in."""
    listed = {room: floor for floor, rooms in enumerate((*FLOORS, ROOF)) for room in rooms}
    room = module
    while room not in listed:
        assert room, f"{module} has no floor"
        room = room.rpartition(".")[0]
    return listed[room], room


def imported_modules(module: str, trees: dict[str, ast.Module]) -> set[str]:
    """Our modules that `module` imports, less itself."""
    return (imports(trees[module], trees) & set(trees)) - {module}


def layer_faults(trees: dict[str, ast.Module]) -> list[str]:
    """Return the imports from the same or a higher floor; modules of one package on one floor are exempt."""
    faults = []
    for module in trees:
        floor, room = room_of(module)
        for target in imported_modules(module, trees):
            target_floor, target_room = room_of(target)
            same_package = room.split(".")[:2] == target_room.split(".")[:2]
            if target_floor > floor or (target_floor == floor and not same_package):
                faults.append(f"{module} imports {target}, which is not on a lower floor")
    return faults


def circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """Return the import circles: the modules that remain after repeatedly removing those without open imports."""
    graph = {module: imported_modules(module, trees) for module in trees}
    while leaves := {module for module, targets in graph.items() if not targets & set(graph)}:
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    return [[module, *sorted(targets & set(graph))] for module, targets in graph.items()]


def door_faults(trees: dict[str, ast.Module]) -> list[str]:
    """Imports of a platform outside its doors."""
    return [
        f"{module} imports {target}: {platform} enters only through {', '.join(sorted(doors)) or 'no module yet'}"
        for module, tree in trees.items()
        for target in imports(tree)
        for platform, doors in DOORS.items()
        if (target == platform or target.startswith(f"{platform}."))
        and not any(module == door or module.startswith(f"{door}.") for door in doors)
    ]


def test_modules_import_only_lower_floors():
    assert layer_faults(modules(ROOT)) == []


def test_there_are_no_import_circles():
    assert circles(modules(ROOT)) == []


def test_only_their_doors_import_platforms():
    assert door_faults(modules(ROOT)) == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print({{'torch', 'ray', 'mlflow', 'pyarrow', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_processes_without_a_torchvision_network_or_policy_leave_torchvision_out():
    """It imports torch.compile, which takes a second of CPU in each of a run's dozen processes."""
    named = "vitray.runs.train, vitray.training.loop, vitray.inference.networks, vitray.serving.replica"
    code = f"import sys, {named}; print({{'torchvision', 'torch._dynamo'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_run_is_checked_before_torch_is_loaded():
    """Its first line, and a message about a wrong name, would wait for seconds."""
    code = "import sys, vitray.runs.train; print({'torch', 'ray', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_training_loop_loads_no_platform():
    """A host brings the platform."""
    code = "import sys, vitray.training.loop; print({'ray', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_process_that_writes_predictions_leaves_torch_out():
    """It starts beside the networks, whose first batch would wait for the CPU."""
    code = "import sys, vitray.inference.pipeline; print({'torch', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("from vitray.bench import measure", "vitray.models.blocks imports vitray.bench"),
        ("def late():\n    import pipelines.model", "vitray.models.blocks imports pipelines.model"),
        ("import mlflow", "vitray.models.blocks imports mlflow: mlflow enters only through"),
        (
            "def late():\n    from ray import data",
            "vitray.models.blocks imports ray.data: ray.data enters only through",
        ),
        ("from pyarrow import fs", "vitray.models.blocks imports pyarrow.fs"),
    ],
)
def test_a_planted_violation_is_found(planted, fault):
    trees = modules(ROOT) | {"vitray.models.blocks": ast.parse(planted)}
    assert any(line.startswith(fault) for line in layer_faults(trees) + door_faults(trees))


def test_names_may_not_import_config():
    trees = modules(ROOT) | {"vitray.config.model_names": ast.parse("import vitray.config")}
    assert circles(trees)


@pytest.mark.parametrize(
    ("planted", "is_fault"),
    [
        ("from vitray.cluster import session", False),
        ("from vitray.cluster.session import job_dir", False),
        ("from vitray.cluster import doctor", True),
        ("from vitray.cluster import session, doctor", True),
        ("import vitray.cluster", True),
        ("from vitray.cluster import anything", True),
        ("from vitray import Run", True),
    ],
)
def test_a_module_imported_from_its_package_counts_as_that_module_only(planted, is_fault):
    trees = modules(ROOT) | {"vitray.system.mlflow_client": ast.parse(planted)}
    assert bool(layer_faults(trees)) is is_fault


def test_modules_of_one_package_on_one_floor_may_import_each_other_and_packages_may_not():
    planted = {"vitray.system.processes": ast.parse("from vitray.models import vit")}
    assert layer_faults(modules(ROOT) | planted)
    planted = {"vitray.system.processes": ast.parse("import vitray.system.mlflow_client")}
    assert not layer_faults(modules(ROOT) | planted)
