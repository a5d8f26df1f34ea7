"""Neither files nor functions are long."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ejkernel", "lowering", "benchmarks", "tests", "examples", "docs")
LONGEST_FILE, LONGEST_BODY = 300, 60


@cache
def sources() -> dict[str, str]:
    """The text of every Python file, by its path."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}


def bodies(source: str) -> list[tuple[str, int]]:
    """The functions in a source, and how many lines they have after their docstrings."""
    functions = (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(x.name, body[-1].end_lineno - body[0].lineno + 1) for x in functions if (body := after_docstring(x))]


def after_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return function.body if ast.get_docstring(function, clean=False) is None else function.body[1:]


def test_no_file_is_long():
    lengths = {path: len(source.splitlines()) for path, source in sources().items()}
    assert len(lengths) > 400 and {path: n for path, n in lengths.items() if n > LONGEST_FILE} == {}


def test_no_function_is_long():
    lengths = [(path, name, n) for path, source in sources().items() for name, n in bodies(source)]
    assert len(lengths) > 4000 and [of for of in lengths if of[2] > LONGEST_BODY] == []


@pytest.mark.parametrize("lines", [1, 3, 61])
def test_lines_of_a_body(lines):
    """Lines of the docstring and of decorators do not count; those of nested functions do."""
    inner = "    def g():\n        '''Of two\n\n        lines.'''\n        return 0\n"
    source = "@d\ndef f():\n    '''Of two\n\n    lines.'''\n" + "    x = 0\n" * (lines - 1) + "    return x\n"
    assert bodies(source) == [("f", lines)]
    assert bodies(source + inner) == [("f", lines + 5), ("g", 1)]
