"""BUILD.bazel lists the files of the tree. It is a subset of Python and executed here, with rules that record."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "ejkernel", "examples", "lowering", "tests")


def tree(*folders: str) -> set[str]:
    """The files below some folders except those that Python generates."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if path.parent.name != "__pycache__"}


def matching(pattern: str) -> set[str]:
    wild = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*"}
    regex = re.sub(r"\*\*/|\*\*|\*|[^*]+", lambda part: wild.get(part[0]) or re.escape(part[0]), pattern)
    return {path for path in tree(*FOLDERS) if re.fullmatch(regex, path)}


def glob(include, exclude=(), allow_empty=False):
    paths = set().union(*map(matching, include)).difference(*map(matching, exclude))
    assert paths or allow_empty, f"nothing matches {include}"
    return sorted(paths)


@pytest.fixture(scope="module")
def targets():
    """The targets by rule and name, each with its attributes."""
    rules = defaultdict(dict)
    record = lambda rule: lambda name, **attributes: rules[rule].update({name: attributes})
    names = {rule: record(rule) for rule in ("genrule", "py_library", "py_test")}
    ignored = dict.fromkeys(("load", "package"), lambda *args, **kwargs: None)
    exec((ROOT / "BUILD.bazel").read_text(), {"glob": glob, **names, **ignored})
    return rules


def test_every_file_of_the_library_is_in_its_target(targets):
    library = targets["py_library"]["ejkernel"]
    installed = {f"ejkernel/{path}" for path in tree("lowering")}
    assert set(targets["genrule"]["installed_lowering"]["outs"]) == installed
    assert {*library["srcs"], *library["data"]} == tree("ejkernel") | installed


def test_every_file_of_the_benchmarks_is_in_its_target(targets):
    benchmarks = targets["py_library"]["benchmarks"]
    assert {*benchmarks["srcs"], *benchmarks["data"]} == tree("benchmarks")


def test_every_test_file_has_a_target_and_all_others_are_its_data(targets):
    tests, support = targets["py_test"], targets["py_library"]["testing"]
    assert all(test["args"] == [f"{name}.py"] and f"{name}.py" in test["srcs"] for name, test in tests.items())
    expected = {path for path in tree("tests") if Path(path).match("test_*.py")}
    assert {f"{name}.py" for name in tests} == expected
    assert {*support["srcs"], *support["data"]} - {"pyproject.toml"} == tree("tests") - expected


def test_documents_are_data_of_the_tests_that_run_them(targets):
    built = {path for path in tree("docs") if path.startswith("docs/_build/")}
    for name in ("tests/test_docs", "tests/test_examples"):
        assert {*targets["py_test"][name]["data"]} == (tree("docs", "examples") - built) | tree("lowering")
