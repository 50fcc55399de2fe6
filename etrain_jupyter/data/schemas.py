"""Schemas of sets: all rows have the schema of the first rows, and all files have one schema."""

from __future__ import annotations

import pyarrow as pa

from etrain_jupyter.data.places import Place
from etrain_jupyter.errors import ShardError


def plain(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, and without metadata, such as that of pandas."""
    table = table.replace_schema_metadata(None)
    if any(pa.types.is_dictionary(kind) for kind in table.schema.types):
        kinds = [k.value_type if pa.types.is_dictionary(k) else k for k in table.schema.types]
        table = table.cast(pa.schema(zip(table.column_names, kinds, strict=True)))
    return table


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the schema of the set.

    Raises:
        ShardError: If it has other columns, or types that cannot be converted.
    """
    table = plain(table)
    if table.schema.equals(schema):
        return table
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError, KeyError) as exc:
        raise ShardError(
            f"a part of the source has other columns or types than its first rows: "
            f"{str(exc).partition(chr(10))[0]}. First: {_described(schema)}. Then: "
            f"{_described(table.schema)}. Give all rows the same columns and types."
        ) from exc


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def check_same_schema(one: pa.Schema, other: pa.Schema, place: Place, *names: str) -> None:
    """Raise unless the files ``names`` have the same columns and types; metadata may differ.

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
