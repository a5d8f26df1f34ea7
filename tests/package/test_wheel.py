"""The wheel holds the whole tree under one top-level name, and works with only its requirements installed."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CACHES = shutil.ignore_patterns("__pycache__")


def build(tree: Path, kind: str, into: Path) -> Path:
    """A wheel or sdist by the build backend of pyproject.toml."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(into)], cwd=tree, check=True, capture_output=True)
    (built,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the packaged files, so that a build leaves no files in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("ejkernel", "lowering"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=CACHES)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_one_top_level_name(wheel):
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert [top for top in tops if not top.endswith(".dist-info")] == ["ejkernel"]


def test_the_wheel_holds_every_file_of_the_tree(wheel, tree):
    files = lambda folder: {p.relative_to(tree).as_posix() for p in (tree / folder).rglob("*") if p.is_file()}
    expected = files("ejkernel") | {f"ejkernel/{path}" for path in files("lowering")}
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == expected


def test_the_wheel_from_the_sdist_is_the_same(wheel, tree, tmp_path):
    with tarfile.open(build(tree, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert contents(build(unpacked, "wheel", tmp_path)) == contents(wheel)


def test_the_license_and_the_requirements_are_in_the_metadata(wheel):
    (text,) = (data.decode() for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0" in text and "License-File: LICENSE" in text
    always = {re.match(r"[\w-]+", line)[0] for line in re.findall(r"^Requires-Dist: (?!.*extra ==)(.*)$", text, re.M)}
    assert always == {"jax", "jaxlib", "jaxtyping", "numpy"}


def with_dependencies(name: str, found: dict[str, metadata.Distribution]) -> None:
    """`name` and its requirements, of the packages installed here."""
    if name in found:
        return
    found[name] = metadata.distribution(name)
    for requirement in map(Requirement, found[name].requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            with_dependencies(requirement.name, found)


@pytest.fixture(scope="module")
def bare_python(wheel, tmp_path_factory):
    """The Python of a new environment with jax, jaxtyping, numpy, what these need, and the wheel."""
    folder = tmp_path_factory.mktemp("bare")
    distributions: dict[str, metadata.Distribution] = {}
    for name in ("jax", "jaxtyping", "numpy"):
        with_dependencies(name, distributions)
    (shared := folder / "shared").mkdir()
    for distribution in distributions.values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (shared / top).symlink_to(distribution.locate_file(top))

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv/bin/python"
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(f"{shared}\n")
    install = [sys.executable, "-m", "pip", "--isolated", "--python", str(python), "install", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return python


IMPORT = """
import importlib.util, os, sys
import jax
from jax._src import xla_bridge

assert not any(map(importlib.util.find_spec, ("triton", "jax_triton", "libtpu"))), "the environment is not bare"
before, config = dict(os.environ), dict(jax.config.values)
import ejkernel, ejkernel.lax, ejkernel.lowering, ejkernel.modules, ejkernel.ops
assert dict(os.environ) == before, "os.environ changed"
assert dict(jax.config.values) == config, "jax.config changed"
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert ejkernel.lowering.__file__.startswith(sys.prefix), ejkernel.lowering.__file__
"""


def test_the_wheel_imports_in_a_bare_environment_and_changes_nothing(bare_python, tmp_path):
    subprocess.run([bare_python, "-c", IMPORT], cwd=tmp_path, env={"HOME": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir()) == []
