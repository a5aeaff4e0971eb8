"""What ships: dependency sets, package data, what an import needs, and what no tracked file may say."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from afdep_sim.kernels.lint import text_files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "afdep_sim"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 600

Needs = dict[str, tuple[frozenset[str], SpecifierSet]]
"""Package name -> (extras, versions)."""


def needs(*texts: str) -> Needs:
    """Requirements by name; versions of one package that is named twice are joined, this project's extras expanded."""
    found: Needs = {}
    for text in texts:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:
            inner = needs(*(item for extra in requirement.extras for item in EXTRAS[extra]))
        else:
            inner = {name: (frozenset(requirement.extras), requirement.specifier)}
        for other, (extras, versions) in inner.items():
            before = found.get(other, (frozenset(), SpecifierSet()))
            found[other] = (before[0] | extras, before[1] & versions)
    return found


def tracked_files() -> list[Path]:
    """Files that git tracks or would add; in a copy without a repository, everything outside hidden folders."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0 and listing.stdout:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    generated = ("out", "build", "dist", "__pycache__")
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part.startswith(".") or part in generated or part.endswith(".egg-info")
            for part in path.relative_to(ROOT).parts[:-1]
        )
    ]


# ---- dependencies ---------------------------------------------------------------------------------------------------


def test_the_environment_s_pip_part_is_pyproject_s():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (pip,) = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    assert pip[-1] == "-e ."
    sets = ("plots", "cu12", "mpi", "notebooks", "dev")
    assert needs(*pip[:-1]) == needs(*PROJECT["dependencies"], *(item for name in sets for item in EXTRAS[name]))


def test_the_environment_s_python_is_one_the_project_supports():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    (python,) = [part for part in environment["dependencies"] if str(part).startswith("python=")]
    assert python.removeprefix("python=") + ".0" in SpecifierSet(PROJECT["requires-python"])


def test_the_core_needs_no_gpu_and_no_mpi():
    assert set(needs(*PROJECT["dependencies"])) == {"numpy", "greenlet", "ml-dtypes"}


def test_every_set_keeps_numpy_below_the_version_that_breaks_numba_cuda():
    for name in ("cu12", "cu13"):
        assert "2.5" not in needs(*EXTRAS[name])["numpy"][1]


def test_the_version_is_the_package_s():
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "afdep_sim.__version__"}
    assert PROJECT["dynamic"] == ["version"]


# ---- what ships -----------------------------------------------------------------------------------------------------


def test_package_data_exists_and_nothing_beside_it():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["afdep_sim"]
    for pattern in patterns:
        assert list(PACKAGE.glob(pattern)), f"package data {pattern} names no file"
    for path in PACKAGE.rglob("*"):
        name = path.relative_to(PACKAGE).as_posix()
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), f"{name} would not be installed"


NEEDS_MORE = ("afdep_sim.plots", "afdep_sim.runtime", "afdep_sim.kernels.cuda", "afdep_sim.model.calibrate")
"""Modules that an extra is for; everything else is the core."""

IMPORT_ALL = """
import importlib, sys

ALLOWED = {"afdep_sim", "numpy", "greenlet", "ml_dtypes", *sys.stdlib_module_names}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"the core imports {name}", name=name)

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
unwanted = {"matplotlib", "scipy", "numba", "cupy", "mpi4py"} & set(sys.modules)
assert not unwanted, unwanted
"""


def test_the_core_imports_with_its_three_dependencies_alone():
    names = []
    for path in MODULES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not parts[-1].startswith("__main__") and not name.startswith(NEEDS_MORE):
            names.append(name)
    assert {"afdep_sim", "afdep_sim.records", "afdep_sim.plan"} <= set(names)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# ---- the shape of the tree ------------------------------------------------------------------------------------------


def test_imports_point_one_way():
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_contracts_name_every_file_of_the_protocol_text():
    """The text is told apart by name in three places; a new file must be entered in all of them."""
    text = {f"afdep_sim.kernels.{path.stem}" for path in text_files()}
    contracts = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert set(contracts["text"]["source_modules"]) == text
    relaxed = [o for o in PYPROJECT["tool"]["mypy"]["overrides"] if o.get("disallow_untyped_defs") is False]
    assert set(relaxed[0]["module"]) == text | {"afdep_sim.kernels.ops"}
    pattern = "afdep_sim/kernels/{" + ",".join(sorted(path.stem for path in text_files())) + "}.py"
    assert pattern in PYPROJECT["tool"]["ruff"]["lint"]["per-file-ignores"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_says_what_it_is(path: Path):
    source = path.read_text(encoding="utf-8")
    if path.name == "__init__.py" and not source.strip():
        return
    assert ast.get_docstring(ast.parse(source)), f"{path.relative_to(ROOT)} has no docstring"


def test_no_file_is_longer_than_one_thought():
    """Tests are not bounded: they may outweigh what they test."""
    for path in [*MODULES, *(ROOT / "experiments").rglob("*.py")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines < MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines, not under {MOST_LINES}"


MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|home|root|tmp/bash)[/_.]")
"""An absolute path of somebody's machine."""


def test_the_pattern_finds_what_it_is_for():
    for folder in ("work", "home", "root"):
        assert MACHINE_PATH.search(f"see /{folder}/a/b")
        assert MACHINE_PATH.search(f'"/{folder}/a"')
    for fine in ("network/work/x", "./root/x", "hidden/home/y", "https://example.org/home/x"):
        assert not MACHINE_PATH.search(fine)


def test_no_tracked_file_names_a_path_of_a_machine():
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found
