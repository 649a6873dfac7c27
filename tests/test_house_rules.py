"""House rules that a syntax tree can check, the formatter and the dependencies."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from test_layers import ROOT, modules

BANNED_FILE_NAMES = {"utils", "helpers", "helper", "common", "misc", "base", "manager", "handler"}


def class_names(trees: dict[str, ast.Module]) -> set[str]:
    return {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def faults(module: str, tree: ast.Module, ours: set[str]) -> list[str]:
    """Return the broken rules of a module as `module:line: fault`."""
    broken: list[tuple[int, str]] = []
    if module.rpartition(".")[2] in BANNED_FILE_NAMES or module.rpartition(".")[2] in sys.stdlib_module_names:
        broken.append((1, f"file name {module} is banned or shadows the standard library"))
    if ast.get_docstring(tree) is None:
        broken.append((1, "no module docstring"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases} & ours - {"Section"}
            if bases:
                broken.append((node.lineno, f"{node.name} inherits from our class {bases.pop()}"))
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                broken.append((node.lineno, f"{node.name} has no docstring"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.returns is None:
                broken.append((node.lineno, f"{node.name} states no return type"))
            if node.args.kwarg is not None and node.name != "__call__":  # of a metaclass: a constructor's settings
                broken.append((node.lineno, f"{node.name} passes **{node.args.kwarg.arg} through"))
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            broken.append((node.lineno, "bare except"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "torch.load",
            "pickle.load",
            "pickle.loads",
        ):
            safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
            if not safe:
                broken.append((node.lineno, f"{ast.unparse(node.func)} can run code from the file"))
        if ast.unparse(node) == "torch.compile" and module != "vitray.training.compiling":
            broken.append(
                (node.lineno, "torch keeps what it compiles in /tmp; compiling.compiled in the user's folder")
            )
        reads = isinstance(node, ast.Call) and re.match(r"pq\.\w+\(io\.BytesIO", ast.unparse(node))
        if reads and module != "vitray.data.shards.tables":
            fault = "a thread of Arrow may free these bytes, and abort an ending process; tables.read_table reads them"
            broken.append((node.lineno, fault))
    return [f"{module}:{line}: {fault}" for line, fault in broken]


def test_rules_hold():
    trees = modules(ROOT)
    ours = class_names(trees)
    assert [fault for module, tree in trees.items() for fault in faults(module, tree, ours)] == []


@pytest.mark.parametrize(
    ("module", "planted", "fault"),
    [
        ("vitray.inspect", '"""Doc."""', "shadows the standard library"),
        ("vitray.utils", '"""Doc."""', "is banned"),
        ("vitray.x", "import os", "no module docstring"),
        ("vitray.x", '"""Doc."""\nclass B(ViT):\n    """Doc."""', "inherits from our class ViT"),
        ("vitray.x", '"""Doc."""\nclass B: pass', "B has no docstring"),
        ("vitray.x", '"""Doc."""\ndef f(): pass', "states no return type"),
        ("vitray.x", '"""Doc."""\ndef f(**rest) -> None: pass', "passes **rest through"),
        ("vitray.x", '"""Doc."""\ntry: pass\nexcept: pass', "bare except"),
        ("vitray.x", '"""Doc."""\nimport torch\ntorch.load("f")', "can run code"),
        ("vitray.x", '"""Doc."""\nimport torch\ntorch.compile(f)', "in the user's folder"),
        ("vitray.x", '"""Doc."""\npq.read_table(io.BytesIO(b""))', "abort an ending process"),
        ("vitray.x", '"""Doc."""\npq.ParquetFile(io.BytesIO(b"")).read()', "abort an ending process"),
    ],
)
def test_a_planted_violation_is_found(module, planted, fault):
    assert any(fault in line for line in faults(module, ast.parse(planted), {"ViT"}))


NEWEST, OLDEST = ROOT / "constraints.txt", ROOT / "constraints-oldest.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(path):
    """Return {package: version} of a file of pins; of several versions, the first."""
    lines = [line.partition(" ;")[0] for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in reversed(lines))


def bounds(requirement):
    """Return the name, the lowest version and the version below which a requirement stays (or None)."""
    name, _, versions = requirement.partition(">=")
    lowest, _, below = versions.partition(",<")
    return name.partition("[")[0], lowest, below or None


@pytest.mark.parametrize("path", [NEWEST, OLDEST], ids=["newest", "oldest"])
def test_a_gate_names_no_package_index(path):
    text = path.read_text()
    assert "://" not in text
    assert "nvidia" not in text


@pytest.mark.parametrize("path", [NEWEST, OLDEST], ids=["newest", "oldest"])
def test_every_dependency_is_pinned(path):
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert {bounds(requirement)[0] for requirement in wanted} <= pins(path).keys()


def test_a_node_installs_the_pinned_versions_each_with_its_hashes():
    text = (ROOT / "deploy" / "requirements.txt").read_text()
    assert "://" not in text
    packages = re.findall(
        r"^(\S+)==(\S+)(?: ; .*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    assert len(packages) == len(re.findall(r"^\S", text, re.MULTILINE))
    pinned = {line.partition(" ;")[0] for line in NEWEST.read_text().splitlines()}
    others = {name for name, version, _ in packages if f"{name}=={version}" not in pinned}
    assert all(name == "triton" or name.startswith(("nvidia-", "cuda-")) for name in others)  # which torch itself pins
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"], "uv", "setuptools"]
    assert required(wanted) - {name for name, *_ in packages} == set()


def required(requirements):
    """Return the names of packages that some requirements need here, directly or through others."""
    seen, ahead = set(), [Requirement(each) for each in requirements]
    while ahead:
        wanted = ahead.pop()
        name, extras = canonicalize_name(wanted.name), frozenset({"", *wanted.extras})
        if (name, extras) not in seen:
            seen.add((name, extras))
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            ahead += [
                each
                for each in needs
                if not each.marker or any(each.marker.evaluate({"extra": extra}) for extra in extras)
            ]
    return {name for name, _ in seen}


def test_the_packages_of_the_site_are_pinned():
    wanted = {bounds(requirement)[0] for requirement in PROJECT["optional-dependencies"]["docs"]}
    assert wanted <= pins(NEWEST).keys()
    assert wanted == set(re.findall(r"-c constraints.txt (mkdocs-\w+)", (ROOT / "Makefile").read_text()))


def test_the_lowest_allowed_versions_are_the_oldest_pins():
    oldest = {name: Version(version) for name, version in pins(OLDEST).items()}
    lowest = {name: Version(version) for name, version, _ in map(bounds, PROJECT["dependencies"])}
    assert {name: oldest[name] for name in lowest} == lowest


def test_a_platform_is_allowed_up_to_the_minor_release_of_the_newest_pin():
    newest = {name: Version(version) for name, version in pins(NEWEST).items()}
    limits = {name: below for name, _, below in map(bounds, PROJECT["dependencies"]) if below and name != "optuna"}
    assert limits.keys() == {"mlflow", "pyarrow", "ray", "torch", "torchvision"}
    for name, below in limits.items():
        next_one = newest[name].major + 1 if name == "pyarrow" else f"{newest[name].major}.{newest[name].minor + 1}"
        assert Version(below) == Version(str(next_one))


@pytest.mark.parametrize("check", [["check"], ["format", "--check"]])
def test_ruff_finds_nothing(check):
    done = subprocess.run([sys.executable, "-m", "ruff", *check, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "pyright"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
