"""A sphinx extension that shows formulas of docstrings, indented lines of Unicode, as blocks of mathematics.

An indented paragraph with a mathematical sign is a formula; any other is code.
"""

import re
from typing import Any

_SIGNS = {
    "·": r" \cdot ",
    "Σ": r"\sum",
    "∂": r"\partial ",
    "−": "-",
    "∞": r"\infty",
    "≤": r" \le ",
    "≥": r" \ge ",
    "∈": r" \in ",
    "→": r" \to ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "…": r"\ldots ",
    "ᵀ": "^T",
    "≈": r" \approx ",
}
_FORMULA = re.compile("[·Σ∂−∞≤≥∈⌈ᵀ≈]")
_FUNCTIONS = {"exp", "log", "tanh", "sin", "cos"}
_TOKEN = re.compile(r"\{[^}]*\}|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*|\s+|.")


def setup(app: Any) -> dict[str, Any]:
    """Registers the conversion of formulas before napoleon, which reads the sections of a docstring."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    return {"parallel_read_safe": True}


def _docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    paragraphs, in_section = [], False
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines)):
        indented = paragraph.startswith("    ")
        in_section = bool(re.match(r"[A-Z]\w+:\n", paragraph)) or (in_section and indented)
        paragraphs.append(_displayed(paragraph) if indented and not in_section else _escaped(paragraph) + "\n")
    lines[:] = [] if what == "module" else "\n".join(paragraphs).split("\n")


def _displayed(text: str) -> str:
    """An indented paragraph as a block of mathematics or code."""
    if not _FORMULA.search(text):
        return f".. code-block:: none\n\n{text}\n"
    formulas = re.split(r"\s*\n\s*|\s{3,}", text.strip())
    rows = "".join(f"    {latex(formula)} \\\\\n" for formula in formulas)
    return f".. math::\n    :nowrap:\n\n    \\begin{{gather*}}\n{rows}    \\end{{gather*}}\n"


def _escaped(text: str) -> str:
    """Escapes `*`, `|` and `_` but in backticks and list markers; letters may follow backticks; Returns has no type."""
    text = re.sub(r"(?<=^Returns:\n    )(?=\S)", ": ", text)
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"(?<=\S)\*|\*(?=\S)|\||_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return re.sub(r"(`[^`]*`)(?=\w)", r"\1\\ ", "".join(parts))


def latex(formula: str) -> str:
    r"""A line of a formula in LaTeX: for `s_ij = cap · tanh(s_ij)`, `s_{ij} = \mathrm{cap} \cdot \tanh (s_{ij})`."""
    tex = "".join(map(_token, _TOKEN.findall(formula)))
    return re.sub(r"(?<=\}) (?=\\mathrm|\w)|(?<=[\w ]) (?=\\mathrm)", r"\\ ", tex)


def _token(token: str) -> str:
    if token.isspace():
        return " "
    if token.startswith("{"):
        return "{" + "".join(map(_token, re.findall(r"[A-Za-z]{2,}|.", token[1:-1]))).replace(" ", r"\ ") + "}"
    if not re.match("[A-Za-z]", token):
        return _SIGNS.get(token, token)
    name, _, index = token.rpartition("_")
    if name and len(index) <= 2:
        return f"{_name(name)}_{{{index}}}"
    return _name(token)


def _name(word: str) -> str:
    """A name as a function, a letter, or a word."""
    if word in _FUNCTIONS:
        return rf"\{word} "
    plain = word.replace("_", r"\_")
    return word if len(word) == 1 else rf"\mathrm{{{plain}}}"
