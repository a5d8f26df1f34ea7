"""Everything uses the words of FlashAttention, CUTLASS, Triton and JAX; other words are in no name and no sentence.

CONTRIBUTING.md has the glossary.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Words not used in names, comments, docstrings or messages, each with the word used instead.
BANISHED = {
    "afresh": "again",
    "blind": "fully masked",
    "dead": "fully masked, unused",
    "dealt": "assigned, scheduled",
    "face, faces": "API: the lax API, the modules API",
    "fade, fades, faded, fading": "decay, rescale",
    "floor, floors": "layer",
    "frame, frames": "tile, block",
    "holder, holders": "consumer, owner",
    "lift, lifts, lifted, lifting": "add, scale",
    "octave, octaves": "power of two",
    "reach, reaches, reached, reaching": "block range, limit; get, enter",
    "roof, roofs": "the layer above all",
    "room, rooms": "folder, package; shared memory, limit",
    "slack": "tolerance, margin",
    "tier, tiers": "kernels of a platform",
    "turns": "alternately, interleaved, ping-pong",
    "unseen": "fully masked",
    "visit, visits, visited, visiting": "compute; work item, block range",
    "walk, walks, walked, walking": "loop, schedule",
}
FORMS = {form for forms in BANISHED for form in forms.split(", ")}
# Not used as whole names in library and benchmarks; sentences may have them.
NO_NAMES = {
    *("seen", "_seen", "is_seen"),  # visible
    *("turned", "turned_back", "TURNED"),  # transposed, swap_ab
    *("by_fours", "from_fours", "BY_FOURS"),  # interleave, deinterleave
    *("rise", "risen", "stay"),  # rescale
    *("hand", "hands"),  # assigned
    *("leave", "in_warp", "of_threads", "waited_for"),  # store_registers_to_smem, warp_any, partial sums, wait
    *("OfBlock", "of_next", "with_next"),  # what they are: inputs of a block, statistics, the next tile
    *("begun", "live", "_pulled_back"),  # initial state, cotangents, pullback
    *("dend", "dstart", "MOST_CODE", "WHOLE"),  # dfinal_state, dinitial_state, limits by what they count
}
# `math.floor`, `ast.walk`.
ATTRIBUTES = {"floor", "walk"}


def sources() -> list[Path]:
    return sorted(path for folder in ("ejkernel", "lowering", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def others() -> list[Path]:
    """Tests, examples and documents, except this file, which has to spell the words."""
    programs = [path for folder in ("tests", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]
    documents = [
        path for folder in (".", "docs", "benchmarks", "benchmarks/results") for path in ROOT.glob(f"{folder}/*.md")
    ]
    return sorted({*programs, *documents} - {Path(__file__).resolve()})


def words_of(name: str) -> set[str]:
    """`for_tileMask` → for, tile, mask."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@cache
def found(source: str) -> frozenset[tuple[int, str]]:
    """The banned words in a Python source, with their lines."""
    return frozenset(_found(source))


def _found(source: str) -> Iterator[tuple[int, str]]:
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            if not (before == "." and token.string in ATTRIBUTES):
                yield from ((token.start[0], word) for word in _banished(token.string) | NO_NAMES & {token.string})
        elif token.type == tokenize.COMMENT or tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            yield from _found_in(token.string, token.start[0])
        before = token.string


def _found_in(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), first_line):
        yield from ((number, word) for name in re.findall(r"\w+", line) for word in _banished(name))


def _banished(name: str) -> set[str]:
    return FORMS & words_of(name)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_banished_word(path):
    lines = sorted(found(path.read_text(encoding="utf-8")))
    assert lines == [], "\n".join(f"{path.relative_to(ROOT)}:{number}: {word}" for number, word in lines)


def test_no_banished_word_in_tests_and_documents():
    lines = []
    for path in others():
        text = path.read_text(encoding="utf-8")
        words = found(text) if path.suffix == ".py" else _found_in(text)
        lines += [f"{path.relative_to(ROOT)}:{number}: {word}" for number, word in words if word not in NO_NAMES]
    assert len(others()) > 400 and lines == [], "\n".join(sorted(lines))


def test_names_of_files():
    named = {str(path.relative_to(ROOT)): _banished(path.stem) for path in (*sources(), *others())}
    assert {path: words for path, words in named.items() if words} == {}


@pytest.mark.parametrize(
    "source",
    [
        "def walk(tiles): ...",
        "class TileVisits: ...",
        "_ROOM = 1",
        "seen = keys < stop",
        '"""The tiles that a block visits."""',
        "x = 1  # a blind query",
        'raise ValueError(f"{name}: no room for {size} bytes")',
        "def public():\n    '''Lines before.\n\n    Both faces of it.\n    '''\n",
    ],
)
def test_a_word_that_is_put_back_is_found(source):
    assert found(source)


def test_words_that_contain_others_are_written():
    assert not found("import frameworks  # rooflines and interfaces are reachable; a query is seen\n")
    assert not found("x = math.floor(placeholders)\n")
