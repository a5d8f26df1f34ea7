"""The pages of docs/ are up to date: their Python prints the outputs shown, and generated pages are current."""

import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

PAGES = sorted((pages.ROOT / "docs").glob("*.md"))


def with_code(path: Path) -> bool:
    return bool(pages.blocks(path.read_text()))


@pytest.mark.parametrize("page", [*filter(with_code, PAGES)], ids=lambda page: page.stem)
def test_a_page_runs_and_shows_what_it_prints(page):
    if reason := pages.lacking():
        pytest.skip(reason)
    done = subprocess.run([sys.executable, pages.__file__, page], cwd=pages.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_links_to_pages_that_are_there(page):
    targets = re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("name", ("tables", "timeline", "long_context"))
def test_a_generated_page_is_current(name):
    """`python docs/NAME.py` generates it."""
    if name == "tables" and (reason := pages.lacking()):
        pytest.skip(reason)
    code = f"import sys; sys.path.insert(0, 'docs'); import {name}; sys.exit({name}.PAGE.read_text() != {name}.page())"
    done = subprocess.run([sys.executable, "-c", code], cwd=pages.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run docs/{name}.py: {done.stderr}"


def test_predictions_of_a_page_are_current():
    """`python docs/long_context.py` prints them."""
    code = "import sys; sys.path.insert(0, 'docs'); import long_context; print(long_context.table())"
    done = subprocess.run([sys.executable, "-c", code], cwd=pages.ROOT, capture_output=True, text=True)
    assert done.stdout.strip() and done.stdout.strip() in (pages.ROOT / "docs/long-context.md").read_text(), done.stderr


def test_formulas_of_docstrings_become_mathematics():
    sys.path.insert(0, str(pages.ROOT / "docs"))
    try:
        from formulas import latex
    finally:
        sys.path.pop(0)
    assert latex("o_i = Σ_j exp(s_ij − lse_i) · v_j") == (
        r"o_{i} = \sum_j \exp (s_{ij} - \mathrm{lse}_{i})  \cdot  v_{j}"
    )
    assert latex("h_t = exp(g_gamma) · h_{t−1} + k_t v_tᵀ") == (
        r"h_{t} = \exp (\mathrm{g\_gamma})  \cdot  h_{t-1} + k_{t}\ v_{t}^T"
    )
