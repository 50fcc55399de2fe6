"""Run a notebook without a browser, show what each cell said, and keep the executed copy.

``python notebooks/run.py notebooks/01_quickstart.ipynb --output .demo``

The exit status is 0 if every cell ran, its assertions included, and 1 otherwise. The notebook
itself is not changed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.pools import clusters

DOWN = "from etrain_jupyter.pools import clusters\nclusters.down(all_clusters=True)"


def main() -> int:
    """Run the notebook that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the executed copy")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take")
    options = parser.parse_args()
    # Ended by `timeout` or a CI system, it must still end the notebook's cluster.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.output.mkdir(parents=True, exist_ok=True)
    return run(options.notebook, options.output, options.timeout)


def run(source: Path, output: Path, timeout_s: int) -> int:
    """Run ``source`` in the folder ``output`` and save it there as ``*.executed.ipynb``."""
    # A cluster of its own: the notebook must neither use nor end those of other notebooks.
    os.environ["ETRAIN_STATE"] = str(output.resolve() / "state")
    executed = output / f"{source.stem}.executed.ipynb"
    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(output)}},
    )
    begin = time.monotonic()
    try:
        with client.setup_kernel():
            try:
                failure = run_cells(client)
            finally:
                # Also after a cell that failed: only the kernel knows a cloud of its own.
                end_from_kernel(client)
    finally:
        # Nothing stays behind, also after a kernel that died or an interrupt.
        left = end_clusters()
        nbformat.write(notebook, executed)  # type: ignore[no-untyped-call]
    failure = failure or left
    verdict = f"FAILED: {failure}" if failure else "Every cell ran and every check held"
    print(f"\n{verdict} ({time.monotonic() - begin:.0f} s).\nExecuted notebook: {executed}")
    return 1 if failure else 0


def end_from_kernel(client: NotebookClient) -> None:
    """End what the notebook has started, in a cell that is not kept."""
    cells = client.nb.cells
    cells.append(new_code_cell(DOWN))  # type: ignore[no-untyped-call]
    try:
        client.execute_cell(cells[-1], len(cells) - 1)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"\nThe clusters could not be ended from the notebook: {error}")
    finally:
        cells.pop()


def end_clusters() -> str:
    """End what the notebook has started; return what could not be ended, or an empty string."""
    try:
        clusters.down(all_clusters=True)
    except EtrainError as exc:
        return str(exc)
    return ""


def run_cells(client: NotebookClient) -> str:
    """Run the code cells in order until one fails; return what failed, or an empty string."""
    cells = client.nb.cells
    numbered = [(index, cell) for index, cell in enumerate(cells) if cell.cell_type == "code"]
    for count, (index, cell) in enumerate(numbered, 1):
        title = next(iter(cell.source.strip().splitlines()), "")
        print(f"\n[{count}/{len(numbered)}] {title}", flush=True)
        begin = time.monotonic()
        try:
            client.execute_cell(cell, index)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            show(cell)
            return f"cell {count}, {type(error).__name__}"
        show(cell)
        print(f"    ({time.monotonic() - begin:.1f} s)", flush=True)
    return ""


def show(cell: Any) -> None:
    """Print what a cell said, indented."""
    for text in texts_of(cell):
        for line in text.rstrip().splitlines():
            print(f"    {line}")


def texts_of(cell: Any) -> Iterator[str]:
    """Yield the textual form of each output of a cell."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield "\n".join(output.traceback)
        else:
            yield output.data.get("text/plain", "")


if __name__ == "__main__":
    sys.exit(main())
