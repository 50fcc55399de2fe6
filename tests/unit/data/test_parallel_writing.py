"""``write_shards`` with several workers: the same bytes, lost workers, interruptions, errors."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etrain_jupyter.data import Shards, parallel_writer, spill, write_shards, writing
from etrain_jupyter.data.parallel_writer import plan_files, plan_ranges
from etrain_jupyter.data.parts import SharedWrite, gather
from etrain_jupyter.data.spill import Group
from etrain_jupyter.data.workers import LocalWorkers, Workers, open_local_workers
from etrain_jupyter.errors import PoolError, ShardError
from tests.unit.data.indexed_rows import NUM_ROWS, Rows, content, wait_for


class Inline(Executor):
    """Runs each call when it is submitted, and records it; interrupted before one of them."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.interrupt_at = interrupt_at

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        self.calls.append((fn, *args))
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except ShardError as exc:
            future.set_exception(exc)
        return future


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use limits that make many groups of few rows, in this process."""
    monkeypatch.setattr(spill, "NUM_BUCKETS", 8)
    monkeypatch.setattr(spill, "GROUP_BYTES", 3000)
    monkeypatch.setattr(spill, "FLUSH_BYTES", 2000)
    monkeypatch.setattr("etrain_jupyter.data.rows._CHUNK_ROWS", 20)


def write(source: Any, to: Path, **options: Any) -> Shards:
    return write_shards(source, to, progress=False, **{"block_bytes": 100, **options})


def write_inline(
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    to: Path,
    executor: Inline,
    num_workers: int = 2,
    **options: Any,
) -> Shards:
    """Write with tasks that run in this process."""

    @contextlib.contextmanager
    def open_inline(num: int) -> Iterator[Workers]:
        yield Workers(executor=executor, num_workers=num)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "open_local_workers", open_inline)
        return write(source, to, workers=num_workers, **options)


def spawned_processes() -> set[int]:
    """Return the ids of the running processes that ``multiprocessing`` has spawned."""
    pids = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also the error for a zombie
            if "spawn_main" in " ".join(child.cmdline()):
                pids.add(child.pid)
    return pids


# ----------------------------------------------------------------------------------- the same bytes


VALUES = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=30),
        "flag": st.none() | st.booleans(),
        "tokens": st.lists(st.integers(0, 9), max_size=6),
    }
)


@pytest.mark.usefixtures("small_groups")
@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(VALUES, min_size=1, max_size=100),
    num_workers=st.integers(1, 3),
    part_bytes=st.integers(100, 4000),
    flush_bytes=st.sampled_from([1, 300, 1 << 20]),
    group_bytes=st.sampled_from([20, 500, 1 << 20]),
    seed=st.integers(0, 3),
)
def test_any_split_gives_the_bytes_of_a_single_process(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    num_workers: int,
    part_bytes: int,
    flush_bytes: int,
    group_bytes: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    schema = pa.schema({"text": pa.string(), "flag": pa.bool_(), "tokens": pa.list_(pa.int64())})
    source = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), source, row_group_size=7)
    table = pa.concat_tables(Shards(source).tables())
    monkeypatch.setattr(spill, "GROUP_BYTES", group_bytes)
    write(source, folder / "one", seed=seed)

    monkeypatch.setattr(parallel_writer, "PART_BYTES", part_bytes)
    monkeypatch.setattr(spill, "FLUSH_BYTES", flush_bytes)
    write_inline(monkeypatch, source, folder / "many", Inline(), num_workers, seed=seed)
    # Rows in memory are gathered in this process.
    write_inline(monkeypatch, table, folder / "table", Inline(), num_workers, seed=seed)

    assert content(folder / "many") == content(folder / "one") == content(folder / "table")
    assert not list(folder.glob("*/.*"))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_processes_give_the_bytes_of_a_single_process(tmp_path: Path, num_workers: int) -> None:
    write(Rows(), tmp_path / "one")

    written = write(Rows(), tmp_path / "many", workers=num_workers)

    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert len(written.index.files) > 3
    assert sorted(row["id"] for row in written) == list(range(NUM_ROWS))


@pytest.mark.usefixtures("small_groups")
def test_hugging_face_set_is_read_by_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets: not installed")
    table = pa.table({"id": range(NUM_ROWS), "text": [f"row {i}" for i in range(NUM_ROWS)]})
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    stored = datasets.load_from_disk(tmp_path / "saved").shuffle(seed=1)
    write(stored, tmp_path / "one")
    executor = Inline()

    write_inline(monkeypatch, stored, tmp_path / "many", executor)

    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert gather in {call[0] for call in executor.calls}


@pytest.mark.usefixtures("small_groups")
def test_row_that_is_larger_than_a_group_is_written(tmp_path: Path) -> None:
    rows = [{"id": number, "text": "x" * (9000 if number == 5 else 10)} for number in range(20)]

    shards = write(rows, tmp_path / "set")

    assert sorted(row["id"] for row in shards) == list(range(20))


# -------------------------------------------------------------------------------------------- plans


@given(st.integers(1, 10**9), st.floats(0, 1e9), st.integers(1, 64))
def test_ranges_have_each_row_once(num_rows: int, row_bytes: float, num_workers: int) -> None:
    rows_per_part = max(1, parallel_writer.PART_BYTES // max(1, int(row_bytes)))
    num_rows = min(num_rows, 1000 * rows_per_part)  # so that the list is short

    ranges = plan_ranges(num_rows, row_bytes, num_workers)

    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_rows
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert len(ranges) >= min(num_rows, 2 * num_workers)


@given(st.lists(st.integers(0, 40), max_size=30))
def test_files_have_16_blocks_of_consecutive_groups(counts: list[int]) -> None:
    groups = [Group(pieces=(), key=number) for number in range(len(counts))]

    files = plan_files(groups, counts)

    found = [
        (group.key, block)
        for file in files
        for group, first, end in file.runs
        for block in range(first, end)
    ]
    assert found == [(group, block) for group, count in enumerate(counts) for block in range(count)]
    sizes = [sum(end - first for _, first, end in file.runs) for file in files]
    assert all(size == 16 for size in sizes[:-1])
    assert [file.number for file in files] == list(range(len(files)))


# --------------------------------------------------------------------------------- lost and resumed


def test_lost_process_costs_only_its_part(tmp_path: Path) -> None:
    executor = LocalWorkers(2)
    deadline = time.monotonic() + 60
    try:
        slow = executor.submit(wait_for, tmp_path / "go")
        assert executor.submit(abs, -1).result(timeout=60) == 1
        while not (tmp_path / "go.waits").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first = int((tmp_path / "go.waits").read_text())
        other = executor.submit(os.getpid).result(timeout=60)

        os.kill(first, signal.SIGKILL)
        (tmp_path / "go").touch()

        assert slow.result(timeout=60) != first, "repeated in a new process"
        pids = {executor.submit(os.getpid).result(timeout=60) for _ in range(4)}
        assert other in pids, "the other process continues"
    finally:
        executor.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_call_that_ends_its_process_is_an_error() -> None:
    with (
        pytest.raises(ShardError, match=r"3 worker processes exited .* status 7.*__main__"),
        open_local_workers(1) as workers,
    ):
        workers.executor.submit(os._exit, 7).result(timeout=100)


def test_killed_process_changes_no_byte(tmp_path: Path) -> None:
    write(Rows(), tmp_path / "one")
    parts = tmp_path / "many" / ".writing"
    killed = []

    def kill_one() -> None:
        # The first process that has begun a part.
        while not list(parts.glob("rows-*.partial")):
            time.sleep(0.005)
        pid = min(spawned_processes() - earlier)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    earlier = spawned_processes()
    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    write(Rows(delay_s=0.01), tmp_path / "many", workers=2)
    thread.join(timeout=60)

    assert killed
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert not list((tmp_path / "many").glob(".*"))


@pytest.mark.usefixtures("small_groups")
def test_interrupted_write_repeats_no_finished_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Rows(), tmp_path / "one")
    whole = Inline()
    write_inline(monkeypatch, Rows(), tmp_path / "whole", whole)

    for stop in range(1, len(whole.calls), 5):
        to = tmp_path / f"stop-{stop}"
        with pytest.raises(KeyboardInterrupt):
            write_inline(monkeypatch, Rows(), to, Inline(interrupt_at=stop))
        with pytest.raises(ShardError, match="write has not finished"):
            len(Shards(to))
        rest = Inline()
        # Another number of workers continues, too.
        write_inline(monkeypatch, Rows(), to, rest, num_workers=3)

        assert content(to) == content(tmp_path / "one")
        num_gathered = sum(call[0] is gather for call in whole.calls)
        assert sum(call[0] is gather for call in rest.calls) == max(0, num_gathered - stop)


@pytest.mark.parametrize("is_first_parallel", [True, False])
def test_write_continues_with_and_without_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first_parallel: bool
) -> None:
    write(Rows(), tmp_path / "one")
    to = tmp_path / "set"
    if is_first_parallel:
        with pytest.raises(KeyboardInterrupt):
            write_inline(monkeypatch, Rows(), to, Inline(interrupt_at=4))
        write(Rows(), to)
    else:
        with pytest.raises(ShardError, match="row 250"):
            write(Rows(fail_at=250), to)
        write_inline(monkeypatch, Rows(), to, Inline())

    assert content(to) == content(tmp_path / "one")


@pytest.mark.usefixtures("small_groups")
def test_changed_source_does_not_continue_a_write_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_inline(monkeypatch, Rows(), tmp_path / "set", Inline(interrupt_at=2))

    read = Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, number: read(self, number + 1))
    with pytest.raises(ShardError, match="row 0 of the source has changed"):
        write_inline(monkeypatch, Rows(), tmp_path / "set", Inline())


# ------------------------------------------------------------------------------------------- errors


def test_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"row 217 of the source .* ValueError: a broken image"):
        write(Rows(fail_at=217), tmp_path / "set", workers=2)

    shards = write(Rows(), tmp_path / "set", workers=2)

    assert len(shards) == NUM_ROWS, "the parts that were finished are used"


def test_file_that_cannot_be_read_is_named_with_its_rows(tmp_path: Path) -> None:
    for number in range(2):
        table = pa.table({"id": range(100 * number, 100 * number + 100)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    footer = pq.ParquetFile(paths[1]).metadata
    column = footer.row_group(1).column(0)
    with paths[1].open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)

    with pytest.raises(ShardError, match=r"rows 150 to 199 .* 1\.parquet"):
        write(paths, tmp_path / "set", workers=1)


def test_source_that_cannot_be_sent_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows()
    rows.lock = threading.Lock()  # type: ignore[attr-defined]

    with pytest.raises(ShardError, match=r"cannot be sent to the workers: TypeError.*lock"):
        write_inline(monkeypatch, rows, tmp_path / "set", Inline())


def test_worker_without_the_folder_is_an_error(tmp_path: Path) -> None:
    shared = SharedWrite(
        to=str(tmp_path), folder=str(tmp_path), token="a", seed=0, block_bytes=1, schema=b""
    )

    with pytest.raises(ShardError, match=r"is not there on .* workers share"):
        gather(shared, "", 0, 0, 1)


def test_replaced_source_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replacing(Inline):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            (tmp_path / "set" / ".writing" / "source").write_bytes(b"another pickle")
            return super().submit(fn, *args, **kwargs)

    with pytest.raises(ShardError, match="is not the file that this write created"):
        # No other test has opened a source of this size.
        write_inline(monkeypatch, Rows(NUM_ROWS + 1), tmp_path / "set", Replacing())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0 is less than 1"),
        ({"workers": 2, "shuffle": False}, "need shuffle=True"),
        ({"pool": "lab", "workers": 2}, "Leave one of them out"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        write(Rows(), tmp_path / "set", **options)


def test_unknown_pool_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETRAIN_POOLS", str(tmp_path / "none.yaml"))

    with pytest.raises(PoolError, match="there is no pool 'lab'"):
        write(Rows(), tmp_path / "set", pool="lab")


@pytest.mark.plugins
def test_pool_that_runs_only_trainers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text("spot: {kind: aws-spot, region: us-east-1, bucket: corpus}\n")
    monkeypatch.setenv("ETRAIN_POOLS", str(pools))

    with pytest.raises(PoolError, match=r"workers of pool 'spot' run trainers.*workers=N"):
        write(Rows(), tmp_path / "set", pool="spot")


def test_local_pool_uses_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "num_usable_cores", lambda: 5)

    opener = writing._opener_of(None, "local")

    assert isinstance(opener, partial)
    assert opener.args == (5,)


def test_interrupt_ends_the_processes_at_once() -> None:
    executor = LocalWorkers(1)
    pid = executor.submit(os.getpid).result(timeout=60)
    waiting = executor.submit(time.sleep, 10_000)

    executor.shutdown(cancel_futures=True)

    assert waiting.done()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_script_without_a_guard_gets_an_error_that_says_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from etrain_jupyter.data import write_shards\n"
        "class Rows:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, number): return {'id': number}\n"
        "write_shards(Rows(), sys.argv[1], workers=1, progress=False)\n"
    )

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "set")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )

    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr
