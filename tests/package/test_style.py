"""A file is read from top to bottom as a story; a long one wants splitting."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 400


def test_no_file_is_long():
    paths = [path for folder in ("ejkernel", "lowering") for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}
