"""The ``address`` pool: an existing Dask scheduler and its workers."""
