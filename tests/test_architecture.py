"""The import rules of the packages, and of the layers inside server/."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "policies": set[str](),
    "server": {"policies", "batchwright"},
    "profiler": {"policies", "server"},
    "loadgen": {"policies"},
    "batchwright": {"policies"},
}
COMMAND_LINES = {"cli.py", "commands.py"}  # may import every package
LAYERS = {
    "app": {"api", "transport", "scheduling", "backends", "models", "workers", "energy", "telemetry", "config"},
    "api": {"transport", "scheduling", "models", "workers", "telemetry"},
    "scheduling": {"backends", "models", "energy", "telemetry"},
    "backends": {"models", "workers", "energy"},
    "transport": {"telemetry"},
    "models": {"workers"},
    "workers": {"telemetry"},
    "energy": set[str](),
    "telemetry": set[str](),
}
ROOT_MODULES = {
    "errors": set[str](),
    "json_body": {"errors"},
    "config": {"models", "energy", "telemetry"},  # the accepted values of upstreams, meters and log formats
    "cli": {"app", "transport", "telemetry", "config"},
}
POLICIES = (  # each imports only those before it
    *("types", "files", "traits", "spec", "profile", "sample_file", "cpus", "unrolled"),
    *("queue", "sizing", "solver", "percentile", "objectives", "rules", "catalog", "adaptation", "planning", "charts"),
    "command_line",
)
EVERYWHERE = {"errors", "json_body"}  # root modules that every layer may import
IMPURE = {"asyncio", "time", "datetime", "random", "torch", "fastapi", "pynvml", "prometheus_client", "typer", "rich"}
IMPURE_FOLDER = "command_line"  # of policies


def _modules(package: str) -> Iterator[Path]:
    yield from (ROOT / package).rglob("*.py")


@cache
def _imported(path: Path) -> frozenset[str]:
    """The modules that a file imports anywhere, in functions and for type checking too: a type is a dependency."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def _imported_layers(path: Path) -> set[str]:
    """The layers and root modules of server/ that a file imports."""
    parts = [name.split(".") for name in _imported(path)]
    return {name[1] for name in parts if name[0] == "server" and len(name) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    for path in _modules(package):
        if path.name not in COMMAND_LINES:
            siblings = {name.split(".")[0] for name in _imported(path)} & PACKAGES.keys()
            assert siblings <= PACKAGES[package] | {package}, path


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_the_server_import_only_what_the_table_allows(layer: str) -> None:
    for path in _modules(f"server/{layer}"):
        assert _imported_layers(path) <= LAYERS[layer] | {layer} | EVERYWHERE, path


@pytest.mark.parametrize("module", ROOT_MODULES)
def test_root_modules_of_the_server_import_only_what_the_table_allows(module: str) -> None:
    assert _imported_layers(ROOT / "server" / f"{module}.py") <= ROOT_MODULES[module]


def test_every_module_of_the_server_is_in_the_tables() -> None:
    names = {path.relative_to(ROOT / "server").parts[0].removesuffix(".py") for path in _modules("server")}
    assert names - {"__init__"} == LAYERS.keys() | ROOT_MODULES.keys()


def test_transport_imports_only_tracing_and_errors_of_the_server() -> None:
    for path in _modules("server/transport"):
        names = {".".join(name.split(".")[:3]) for name in _imported(path) if name.startswith("server.")}
        outside = {name for name in names if not name.startswith("server.transport")}
        allowed = ("server.errors", "server.telemetry.tracing")
        assert all(name.startswith(allowed) for name in outside), path


@pytest.mark.parametrize("package", ["policies", "loadgen", "benchmarks", "research"])
def test_only_the_profiler_and_deploy_import_the_configuration(package: str) -> None:
    for path in _modules(package):
        assert "config" not in _imported_layers(path), path


def test_nothing_imports_research() -> None:
    for package in (*PACKAGES, "benchmarks"):
        for path in _modules(package):
            assert not any(name.split(".")[0] == "research" for name in _imported(path)), path


def test_no_module_imports_a_command_line() -> None:
    for package in PACKAGES:
        for path in _modules(package):
            if path != ROOT / "batchwright" / "commands.py":
                assert not any(name.endswith(".cli") for name in _imported(path)), path


def test_the_server_imports_only_models_and_pipelines_of_the_python_interface() -> None:
    for path in _modules("server"):
        names = {".".join(name.split(".")[:2]) for name in _imported(path) if name.split(".")[0] == "batchwright"}
        assert names <= {"batchwright.model", "batchwright.pipeline"}, path


def test_a_model_of_a_user_imports_neither_the_solver_nor_torch() -> None:
    program = "import sys, batchwright.pipeline; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "scipy", "numpy", "policies", "loadgen", "server"} & set(done.stdout.split())


def test_policies_have_no_clock_no_randomness_no_device() -> None:
    for path in _modules("policies"):
        if path.parent.name != IMPURE_FOLDER:
            assert not {name.split(".")[0] for name in _imported(path)} & IMPURE, path


@pytest.mark.parametrize("part", POLICIES)
def test_parts_of_the_policies_import_only_those_before(part: str) -> None:
    place = ROOT / "policies" / part
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        names = [name.split(".") for name in _imported(path) if name.startswith("policies.")]
        assert {name[1] for name in names} <= {*POLICIES[: POLICIES.index(part) + 1]}, path


def test_every_part_of_the_policies_is_in_the_order() -> None:
    places = [path for path in (ROOT / "policies").iterdir() if path.suffix == ".py" or [*path.glob("*.py")]]
    assert {path.stem for path in places} - {"__init__"} == {*POLICIES}


def test_no_modules_import_each_other() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for name in (*PACKAGES, "benchmarks", "research")
        for path in _modules(name)
    }
    order = TopologicalSorter({name: _imported(path) & modules.keys() for name, path in modules.items()})
    order.prepare()  # raises CycleError


def test_no_file_is_over_seven_hundred_lines() -> None:
    for package in PACKAGES:
        for path in _modules(package):
            assert len(path.read_text().splitlines()) <= 700, path
