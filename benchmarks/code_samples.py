"""Extract sentences and error texts from a checkout, and draw random samples for a reviewer."""

from __future__ import annotations

import ast
import inspect
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

Text = dict[str, str]
"""``where`` (file:line), ``kind`` and ``text``."""

MIN_WORDS = 4
"""Minimum length of a sentence; shorter texts are headings, labels or fragments."""
REMEDIES = re.compile(
    r"\b(set|use|pass|run|type|install|write|try|add|lower|raise|change|remove|delete|choose|make|"
    r"name|free|unset|restart|resume|submit|see|should|must|instead|hint|did you mean|%etrain)\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]`]*\s+(?=[\"'(\[`{]*[A-Z0-9`{])")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
ITEM = re.compile(r"(\*{0,2}[\w.]+(?: \([^)]*\))?): ")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff|mypy|!|-{3})")


def draw(texts: Sequence[Text], count: int, seed: int) -> list[Text]:
    """Draw ``count`` texts at random without replacement, sorted by location."""
    drawn = random.Random(seed).sample(list(texts), min(count, len(texts)))
    return sorted(drawn, key=lambda text: text["where"])


def sentences(package: Path) -> list[Text]:
    """Return every sentence of a package and of the documentation in its checkout."""
    root = package.parent
    found: list[Text] = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for kind, blocks in (
            ("docstring", docstring_blocks(source)),
            ("comment", comment_blocks(source)),
            ("error", error_blocks(source)),
        ):
            found += _sentences_in(blocks, kind, str(path.relative_to(root)))
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.exists():
            blocks = markdown_blocks(path.read_text(encoding="utf-8"))
            found += _sentences_in(blocks, "docs", str(path.relative_to(root)))
    return found


def error_texts(path: Path, root: Path) -> list[Text]:
    """Return the texts of the ``raise`` statements in a file."""
    place = path.relative_to(root)
    return [
        {"where": f"{place}:{line}", "kind": name, "text": text}
        for line, name, text in _raises_in(path.read_text(encoding="utf-8"))
    ]


def has_value(text: Text) -> bool:
    """Return whether an error text formats a value."""
    return "{" in text["text"]


def has_remedy(text: Text) -> bool:
    """Return whether an error text contains a word that introduces a remedy."""
    return REMEDIES.search(text["text"]) is not None


# --- blocks of prose: (line, text) ----------------------------------------------------------------

Blocks = Iterator[tuple[int, str]]


def docstring_blocks(source: str) -> Blocks:
    """Yield the paragraphs and items of docstrings, including those below fields."""
    for node in ast.walk(ast.parse(source)):
        if is_docstring(node):
            yield from _paragraphs(inspect.cleandoc(ast.literal_eval(node.value)), node.lineno)


def is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Return whether a node is a string statement: a docstring, or one below a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _paragraphs(text: str, first_line: int) -> Blocks:
    """Split a docstring at blank lines and items; skip code, headings and doctests."""
    lines: list[str] = []
    begin, is_code, is_section = first_line, False, False
    for number, line in enumerate([*text.splitlines(), ""], first_line):
        bare = line.strip()
        is_indented = line.startswith(" ")
        if is_code and (is_indented or not bare):
            continue
        is_code = False
        item = ITEM.match(bare) if is_section and re.match(r" {4}\S", line) else None
        if lines and (not bare or item or SECTION.match(bare)):
            yield begin, " ".join(lines)
            lines = []
        if SECTION.match(bare):
            is_section = True
        elif bare.startswith((">>>", "...", "===", "---")) or not bare:
            is_code = bare.startswith(">>>")
        else:
            begin = begin if lines else number
            lines.append(bare[item.end() :] if item else bare)
            is_code = bare.endswith("::")
    if lines:
        yield begin, " ".join(lines)


def comment_blocks(source: str) -> Blocks:
    """Yield comments; join full-line comments on adjacent lines."""
    lines: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        line, is_own = token.start[0], not token.line[: token.start[1]].strip()
        if lines and not (is_own and line == last + 1):
            yield begin, " ".join(lines)
            lines = []
        begin = begin if lines else line
        lines.append(token.string.lstrip("#").strip())
        last = line if is_own else 0
    if lines:
        yield begin, " ".join(lines)


def error_blocks(source: str) -> Blocks:
    """Yield the texts of errors."""
    for line, _, text in _raises_in(source):
        yield line, text


def markdown_blocks(source: str) -> Blocks:
    """Yield paragraphs, list items and table cells; skip code and headings."""
    lines: list[str] = []
    begin, is_code = 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        bare = line.strip()
        is_fence = bare.startswith("```")
        is_new = not bare or is_fence or bare.startswith(("#", "|", "- ", "* ", "<", "!["))
        if lines and (is_new or re.match(r"\d+\. ", bare)):
            yield begin, " ".join(lines)
            lines = []
        if is_fence:
            is_code = not is_code
        elif is_code or not bare or bare.startswith(("#", "<", "![", "|-", "| -")):
            continue
        elif bare.startswith("|"):
            for cell in bare.strip("|").split("|"):
                yield number, cell.strip()
        else:
            begin = begin if lines else number
            lines.append(re.sub(r"^([-*]|\d+\.) ", "", bare))


def _sentences_in(blocks: Blocks, kind: str, path: str) -> list[Text]:
    return [
        {"where": f"{path}:{line}", "kind": kind, "text": sentence.strip()}
        for line, block in blocks
        for sentence in SENTENCE_END.split(block)
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= MIN_WORDS
    ]


# --- raise statements -----------------------------------------------------------------------------


def _raises_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, class and text of each ``raise`` that creates an error with a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            values = [*call.args, *(key.value for key in call.keywords)]
            text = " | ".join(filter(None, map(_text_of, values)))
            if re.search(r"[A-Za-z]{2,} ", text):
                yield node.lineno, ast.unparse(call.func), text


def _text_of(node: ast.expr) -> str:
    """Return the text of an expression with values as ``{expression}``, or an empty string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else _text_of(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text_of(side) or f"{{{ast.unparse(side)}}}" for side in (node.left, node.right)]
        return "".join(sides) if any(map(_text_of, (node.left, node.right))) else ""
    return ""
