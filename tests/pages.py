"""Runs a page of the documentation: `python tests/pages.py docs/NAME.md`, with `--write` to update its outputs.

The `python` blocks of a page run in order in one namespace, on eight CPU devices. A `text` block directly after one
is the expected output of that block.
"""

import argparse
import ast
import contextlib
import difflib
import io
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import xla_flags

ROOT = Path(__file__).resolve().parents[1]
SHOWN_WITH = {"jax": "0.11.2", "triton": "3.6.0", "jax-triton": "0.4.1"}
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\s*^```text\n(?P<shown>.*?)^```$)?", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A Python block, the lines before it, and its expected output, or None if the page shows none."""

    code: str
    lines_before: int
    shown: str | None


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [Block(m["code"], page.count("\n", 0, m.start("code")), m["shown"]) for m in _BLOCK.finditer(page)]


def printed(page: str, file: Path) -> list[str]:
    """The output of each block when the page is run in this process, as the module written to `file`.

    Line numbers are those of the page. The source of kernels defined in it can be inspected.
    """
    lines = [""] * (page.count("\n") + 1)
    for block in blocks(page):
        code = block.code.splitlines()
        lines[block.lines_before : block.lines_before + len(code)] = code
    file.write_text("\n".join(lines))
    module = sys.modules["page"] = ModuleType("page")
    module.__file__ = str(file)
    return [_printed(block, module) for block in blocks(page)]


def _printed(block: Block, module: ModuleType) -> str:
    tree = ast.increment_lineno(ast.parse(block.code), block.lines_before)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, module.__file__, "exec"), vars(module))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().rstrip().splitlines())


def renewed(page: str, outputs: list[str]) -> str:
    """The page with these outputs in place of those that it shows."""
    remaining = iter(outputs)

    def block(match: re.Match) -> str:
        output = next(remaining)
        if match["shown"] is None:
            return match[0]
        return page[match.start() : match.start("shown")] + output + page[match.end("shown") : match.end()]

    return _BLOCK.sub(block, page)


def lacking() -> str | None:
    """Why a run here may print other text than the pages: other versions compile other programs. None if it may not."""
    for package, wanted in SHOWN_WITH.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            return f"the pages show what {package} {wanted} gives; here it is {found}"
    return None


def environment(cache: str) -> dict[str, str]:
    """The environment of a page: eight CPU devices, and heuristic configs, cached in a new folder."""
    return {
        "EJKERNEL_AUTOTUNE_POLICY": "heuristics",
        "EJKERNEL_CACHE_DIR": cache,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": " ".join((xla_flags.DEVICES, *xla_flags.COMPILES_FAST)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="write what the blocks print into the page")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/toys")]
    page = arguments.page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in os.environ if name.startswith("EJKERNEL_")]:
            del os.environ[name]
        os.environ.update(environment(folder))
        now = renewed(page, printed(page, Path(folder, f"{arguments.page.stem}.py")))
    if arguments.write:
        arguments.page.write_text(now)
        return 0
    names = str(arguments.page), "what a run prints"
    print(*difflib.unified_diff(page.splitlines(), now.splitlines(), *names, lineterm=""), sep="\n")
    return int(page != now)


if __name__ == "__main__":
    raise SystemExit(main())
