"""Lists the operations, implementations and configs in the dump of a program of any process.

The dump is the text of optimised HLO (as XLA_FLAGS=--xla_dump_to writes it, or `compiled.as_text()`), or of StableHLO
with locations (`lowered.as_text(debug_info=True)`), and may be compressed with gzip. Configs are shown if the program
was lowered under EJKERNEL_OPS_STAMP=json, or =hash with the same cache directory.
"""

import argparse
import gzip
import re
import zlib
from collections import Counter
from pathlib import Path

from ..ops import extract_labels_from_hlo_text, label_fields, labels_to_configs
from ._table import print_table

_GZIP, _BYTECODE = b"\x1f\x8b", b"ML\xefR"
_DEFINED = re.compile(r"(#loc\d*) = (loc\(.*)")
_REFERRED = re.compile(r"#loc\d*\b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file of the dump."""
    parser.add_argument("file", type=Path, metavar="FILE", help="e.g. module_0001.jit_step.after_optimizations.txt")


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each label; 1 if there is none."""
    text = _text(arguments.file)
    found = instructions_by_label(text)
    if not found:
        bare = "stablehlo." in text and "loc(" not in text
        hint = "; it was printed without locations: as_text(debug_info=True) has them" if bare else ""
        print(f"{arguments.file}: no operation of ejkernel is in it{hint}")
        return 1
    configs = labels_to_configs(found)
    rows = []
    for label, count in found.items():
        fields = label_fields(label)
        config = repr(configs[label]) if label in configs else _unknown(fields.get("config"))
        rows.append((fields.get("op", ""), fields.get("impl", ""), str(count), config))
    print_table(("operation", "implementation", "instructions", "config"), rows)
    return 0


def instructions_by_label(text: str) -> Counter[str]:
    """How many instructions carry each label, in the order of their first appearance.

    In HLO a label is in the line of its instruction. In StableHLO the line refers to a location, which is defined in
    another line and may refer to further locations; a call of a function that is not inlined counts as one instruction.
    """
    located: dict[str, set[str]] = {}

    def labels_in(line: str) -> set[str]:
        referred = (located.get(name, set()) for name in _REFERRED.findall(line))
        return set(extract_labels_from_hlo_text(line)).union(*referred)

    instructions = []
    for line in text.splitlines():
        if defined := _DEFINED.match(line):
            located[defined[1]] = labels_in(defined[2])
        else:
            instructions.append(line)
    return Counter(label for line in instructions for label in sorted(labels_in(line)))


def _unknown(stamp: str | None) -> str:
    """The text for a config that this process cannot reconstruct."""
    if stamp is None:
        return "not stamped (EJKERNEL_OPS_STAMP=json)"
    return stamp if stamp.startswith("{") else f"{stamp}, a hash that is not known in this cache directory"


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        if content.startswith(_BYTECODE):
            raise ValueError("it is bytecode of MLIR; give the text, as_text(debug_info=True)")
        text = content.decode()
    except UnicodeDecodeError:
        raise argparse.ArgumentError(None, f"{path}: it is no text") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise argparse.ArgumentError(None, f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise argparse.ArgumentError(None, f"{path}: the file is empty")
    return text
