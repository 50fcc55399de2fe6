"""Convert exhibits to TensorBoard summaries: pictures as images, texts and tables as Markdown.

The tag depends on the format, because TensorBoard displays all steps of a tag with the plugin of
the first one, and ``eval.score`` may return a figure at one step and a text at another.
"""

from __future__ import annotations

from typing import Any

from etrain_jupyter.log.exhibits import Cell, Content, Table, size_of_png
from etrain_jupyter.untrusted import plain_line, plain_text

_MARKDOWN = frozenset("\\`*_[]|<>&")
"""Characters with a meaning in Markdown, in its tables or in HTML."""


def summary_of(name: str, content: Content) -> Any:
    """Return the ``Summary`` of an exhibit.

    Args:
        name: Name of the exhibit.
        content: Content that ``parse_exhibit`` has checked.
    """
    # Imported here because the package is optional.
    from tensorboard.compat.proto.summary_pb2 import Summary

    match content:
        case bytes():
            width, height = size_of_png(content)
            image = Summary.Image(width=width, height=height, encoded_image_string=content)
            return Summary(value=[Summary.Value(tag=f"figures/{name}", image=image)])
        case str():
            return _markdown_summary(f"texts/{name}", code_block(content))
        case Table():
            return _markdown_summary(f"tables/{name}", markdown_table(content))


def note_of(text: str) -> Any:
    """Return a ``Summary`` with a sentence about the exhibits."""
    return _markdown_summary("texts/etrain-note", _escaped(text))


def code_block(text: str) -> str:
    r"""Return Markdown that displays a text as it is, with its columns aligned.

    >>> code_block("a  1\nb *2*")
    '    a  1\n    b *2*'
    """
    # Indent instead of fencing: the text cannot contain a mark that ends the block.
    return "\n".join("    " + line for line in plain_text(text).split("\n"))


def markdown_table(table: Table) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(Table(("name", "a|b"), ((None, 0.123456789),))))
    | name | a&#124;b |
    | --- | --- |
    |  | 0.123457 |
    """
    lines = [
        [_escaped(plain_line(column)) for column in table.columns],
        ["---"] * len(table.columns),
        *([_cell(value) for value in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return _escaped(plain_line(str(value), max_length=1000))


def _escaped(text: str) -> str:
    # Character references, because a backslash does not escape "|" and "<" everywhere.
    return "".join(f"&#{ord(c)};" if c in _MARKDOWN else c for c in text)


def _markdown_summary(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text import metadata

    tensor = TensorProto(
        dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto()
    )
    kind = metadata.create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=kind)])
