"""Compare the schemas of the files of one set."""

from __future__ import annotations

import pyarrow as pa

from etrain_jupyter.data.places import Place
from etrain_jupyter.errors import ShardError


def check_same_schema(one: pa.Schema, other: pa.Schema, place: Place, *names: str) -> None:
    """Raise unless two files have the same columns with the same types; metadata may differ.

    Args:
        one: Schema of the first file.
        other: Schema of the other file.
        place: Their place, for the message.
        names: Names of the two files.

    Raises:
        ShardError: With the first difference.
    """
    if one.equals(other):
        return
    types = [{field.name: str(field.type) for field in schema} for schema in (one, other)]
    differences = [
        f"column {name!r} is {types[1].get(name, 'missing')} instead of "
        f"{types[0].get(name, 'missing')}"
        for name in [*types[0], *types[1]]
        if types[0].get(name) != types[1].get(name)
    ] or ["the order or nullability of its columns differs"]
    if differences[0].startswith("the order") and set(one) == set(other):
        differences = [f"its columns are in the order {', '.join(other.names)}"]
    raise ShardError(
        f"the schema of {names[1]} in {place} differs from that of {names[0]}: {differences[0]}. "
        "Nothing was read. Write all files with the same schema, or convert them: write_shards."
    )
