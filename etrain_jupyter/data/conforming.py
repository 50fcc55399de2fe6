"""One schema for all rows of a set: that of its first rows."""

from __future__ import annotations

import pyarrow as pa

from etrain_jupyter.errors import ShardError


def plain(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, and without metadata, such as that of pandas."""
    table = table.replace_schema_metadata(None)
    if any(pa.types.is_dictionary(kind) for kind in table.schema.types):
        table = table.cast(_without_dictionaries(table.schema))
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


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            pa.field(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type)
            for f in schema
        ]
    )


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
