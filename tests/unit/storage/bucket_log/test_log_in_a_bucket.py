"""The log's way into a bucket and out of it, and who may write it."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest

from etrain_jupyter.errors import FencedError, RunStoreError
from etrain_jupyter.log.event_log import read_events
from etrain_jupyter.log.events import ExhibitsRemoved, ExhibitStored, LogLine
from etrain_jupyter.log.exhibits import write_exhibit
from etrain_jupyter.log.segments import compact, read_log, segments_of
from etrain_jupyter.storage.bucket_log import chain, local_copy, uploads
from etrain_jupyter.storage.bucket_log.chain import pack_key
from etrain_jupyter.storage.bucket_log.objects import RunObjects
from etrain_jupyter.storage.bucket_log.uploads import Uploads, claim
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.s3_folder import S3Folder
from tests.unit.storage.bucket_log.conftest import JOB, Machine, status, step, upload_all

Make = Callable[[str], Machine]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packs be small, so that a short log has them."""
    for module in (chain, uploads):
        monkeypatch.setattr(module, "PACKS", (40, 10))
        monkeypatch.setattr(module, "PIECE_EVENTS", 4)
    for module in (chain, uploads, local_copy):
        monkeypatch.setattr(module, "EVENTS_PER_SEGMENT", 40)
    monkeypatch.setattr("etrain_jupyter.log.segments.EVENTS_PER_SEGMENT", 40)


def test_log_written_on_one_machine_is_read_on_another(machine: Make) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1), step(2))
    there.copy.refresh()
    assert there.lines == here.lines
    here.publish(step(3))
    there.copy.refresh()
    assert there.lines == here.lines
    assert [e.step for e in read_events(there.path)] == [1, 2, 3]


def test_refresh_without_new_events_costs_one_request(machine: Make, s3_server: S3Server) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    there.copy.refresh()
    s3_server.set_faults()
    there.copy.refresh()
    assert s3_server.counts() == {"GET": 1}


@pytest.mark.usefixtures("small")
def test_long_log_is_packed_and_reads_the_same(machine: Make, stored: S3Folder) -> None:
    here, early = machine("here"), machine("early")
    for start in range(1, 96, 3):
        here.write(*(step(n) for n in range(start, start + 3)))
        compact(here.path)
        upload_all(here.uploads)
        if start == 7:
            early.copy.refresh()
    keys = stored.list_keys()
    packs = {key for key in keys if key.startswith("packs/")}
    assert packs == {
        chain.pack_key(1, 40),
        chain.pack_key(41, 40),
        chain.pack_key(81, 10),
    }
    assert len([key for key in keys if key.startswith("log/")]) <= 4
    assert chain.piece_key(1) in keys, "the key at which others are fenced stays taken"
    late = machine("late")
    late.copy.refresh()
    early.copy.refresh()
    # Behind what it has listed, this one finds the pieces gone.
    early.copy._listed_at -= local_copy.RELIST_S
    early.copy.refresh()
    assert late.lines == early.lines == here.lines
    assert len(list(segments_of(late.path).iterdir())) == 2
    assert [e.step for e in read_log(late.path)] == list(range(1, 97))


def test_killed_writer_continues_where_it_stopped(machine: Make) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    up = here.uploads
    # Its last upload was not noted down, and more has come since.
    here.write(step(2))
    mark = (here.path.parent / uploads.MARK_FILE).read_bytes()
    up.upload()
    (here.path.parent / uploads.MARK_FILE).write_bytes(mark)
    here.write(step(3))
    again = Uploads(here.chain, here.path)
    assert (again.writer, again.seq) == (up.writer, 1)
    upload_all(again)
    there.copy.refresh()
    assert there.lines == here.lines


def test_only_one_of_two_claims_succeeds_and_the_old_writer_is_fenced(machine: Make) -> None:
    here, one, two = machine("here"), machine("one"), machine("two")
    here.publish(step(1))
    up = here.uploads
    one.copy.refresh()
    two.copy.refresh()
    mine = claim(one.copy, one.chain, job_id=JOB)
    # This one has seen the end of the log before the first one took it.
    late = Uploads(two.chain, two.path, writer="two", seq=1)
    with pytest.raises(FencedError, match=r"event 2 of s3://.* was written by "):
        late.write_next(b"{}")
    assert len(two.lines) == 1, "what was not written there is not here"
    here.write(step(2))
    with pytest.raises(FencedError, match=f"was written by {mine.writer}: the job continues there"):
        up.upload()
    one.write(step(2, time=2.0))
    upload_all(mine)
    reader = machine("reader")
    reader.copy.refresh()
    events = read_events(reader.path)
    assert [e.seq for e in events] == [1, 2, 3]
    assert isinstance(events[1], LogLine)
    assert mine.writer in events[1].text
    # The fenced machine's copy follows the log that holds, and keeps its own lines aside.
    here.copy.refresh()
    assert here.lines == reader.lines
    assert len(list(here.path.parent.glob("events.*.lost.jsonl"))) == 1


def test_claim_first_uploads_events_that_exist_only_locally(machine: Make) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    here.write(step(2), step(3))
    claim(here.copy, here.chain, job_id=JOB)
    there.copy.refresh()
    assert [e.seq for e in read_events(there.path)] == [1, 2, 3, 4]


def test_claim_is_refused_while_another_process_writes_and_force_continues_after_it(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    up = here.uploads
    write_next = Uploads.write_next

    def meanwhile(self: Uploads, line: bytes) -> None:
        if len(here.lines) < 4 and self.writer != up.writer:
            here.publish(step(len(here.lines) + 1))
        write_next(self, line)

    monkeypatch.setattr(Uploads, "write_next", meanwhile)
    with pytest.raises(FencedError, match=r"is being written by another process.*add --force to"):
        claim(there.copy, there.chain, job_id=JOB, end=1)
    mine = claim(there.copy, there.chain, job_id=JOB)
    assert mine.seq == 5
    here.write(step(5))
    with pytest.raises(FencedError):
        up.upload()


def test_unrelated_objects_are_ignored(machine: Make, stored: S3Folder) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    for key in ("log/README", "log/000000000002.jsonl.bak", "packs/x", "packs/1-2.jsonl.gz"):
        stored.write(key, b"something")
    there.copy.refresh()
    assert there.lines == here.lines


@pytest.mark.parametrize("data", [b"", b"{}\nx\n", b"half"])
def test_incomplete_piece_is_refused_by_name_and_events_before_it_are_read(
    machine: Make, stored: S3Folder, data: bytes
) -> None:
    here, there = machine("here"), machine("there")
    for number in (1, 2, 3):
        here.publish(step(number))
    key = chain.piece_key(2)
    whole = stored.read(key)
    stored.write(key, data if data != b"half" else whole[: len(whole) // 2])
    with pytest.raises(RunStoreError, match=f"{key} is not a complete part of a log. The 1 events"):
        there.copy.refresh()
    assert there.lines == here.lines[:1]


def test_missing_piece_is_named(machine: Make, stored: S3Folder) -> None:
    here, there = machine("here"), machine("there")
    for number in (1, 2, 3):
        here.publish(step(number))
    stored.remove(chain.piece_key(2))
    with pytest.raises(RunStoreError, match=r"event 2 of the log is missing.*from 3 on"):
        there.copy.refresh()
    assert there.lines == here.lines[:1]


def test_pack_that_decompresses_beyond_the_limit_is_refused(
    machine: Make, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small object may expand a thousandfold and fill the reader's memory."""
    monkeypatch.setattr("etrain_jupyter.storage.bucket_log.chain._MAX_PACK_BYTES", 1_000_000)
    objects = RunObjects(url)
    objects.put(pack_key(1, 1000), gzip.compress(b"x" * 2_000_000 + b"\n" * 1000))

    with pytest.raises(RunStoreError, match="is not a complete part of a log"):
        machine("here").chain.read_pack(1, 1000)


@pytest.mark.usefixtures("small")
def test_incomplete_pack_is_named(machine: Make, stored: S3Folder) -> None:
    here, there = machine("here"), machine("there")
    here.publish(*(step(n) for n in range(1, 15)))
    key = chain.pack_key(1, 10)
    whole = stored.read(key)
    for data in (whole[:20], gzip.compress(b"one\n"), b"no gzip"):
        stored.write(key, data)
        with pytest.raises(RunStoreError, match="is not a complete part of a log"):
            there.copy.refresh()


def test_partial_line_of_a_copy_is_repaired(machine: Make) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1), step(2))
    there.copy.refresh()
    with there.path.open("r+b") as file:
        file.truncate(there.path.stat().st_size - 9)
    there = machine("there")  # whoever looks next
    there.copy.refresh()
    assert there.lines == here.lines


def test_locked_copy_is_not_changed(machine: Make) -> None:
    here, there = machine("here"), machine("there")
    here.publish(step(1))
    with local_copy.copy_lock(there.path.parent) as is_ours:
        assert is_ours
        there.copy.refresh()
        assert there.lines == []
    there.copy.refresh()
    assert there.lines == here.lines


@pytest.mark.usefixtures("no_pauses")
def test_intermittent_failures_do_not_change_the_log(machine: Make, s3_server: S3Server) -> None:
    here, there = machine("here"), machine("there")
    up = here.uploads
    s3_server.set_faults(
        S3Fault(kind="slow_down", every=5),
        S3Fault(kind="lose_answer", every=3, match="PUT "),
        S3Fault(kind="truncate", every=7),
    )
    failures = 0
    for number in range(1, 9):
        here.write(step(number))
        while up.seq < number:
            try:
                up.upload()
            except RunStoreError:  # the mirror tries again, too
                failures += 1
    while there.lines != here.lines:
        try:
            there.copy.refresh()
        except RunStoreError:
            failures += 1
    assert failures < 10
    assert [e.seq for e in read_events(there.path)] == list(range(1, 9))


def test_status_of_the_job_is_published(machine: Make) -> None:
    here = machine("here")
    here.publish(status("running"), step(7), step(8))
    up = here.uploads
    up.beat()
    told, age_s = here.chain.objects.get_aged(uploads.ALIVE) or ({}, 99.0)
    assert (told["status"], told["step"], told["seq"], told["world_size"]) == ("running", 8, 3, 2)
    assert age_s < 60


# --- exhibits ---


def exhibit(number: int) -> ExhibitStored:
    return ExhibitStored(
        job_id=JOB,
        time=1.0,
        step=number,
        name="report",
        format="text",
        size_bytes=4,
        digest="0" * 64,
    )


def exhibits_of(stored: S3Folder) -> list[str]:
    return sorted(key for key in stored.list_keys() if key.startswith("exhibits/"))


def test_files_that_events_name_are_uploaded_after_them_and_deleted(
    machine: Make, s3_server: S3Server, stored: S3Folder
) -> None:
    here = machine("here")
    objects, up = here.chain.objects, here.uploads
    first, second = (f"exhibits/step_0000000{n}/report.txt" for n in (1, 2))
    for number, key in ((1, first), (2, second)):
        write_exhibit(here.path.parent, key, b"fine")
        here.publish(exhibit(number))
    assert exhibits_of(stored) == []
    s3_server.set_faults(S3Fault(kind="deny", match="/exhibits/"))
    with pytest.raises(RunStoreError):
        up.upload_exhibits()

    s3_server.set_faults()
    up.upload_exhibits()
    assert exhibits_of(stored) == [first, second]
    assert objects.get(first) == b"fine"

    files = [first, "job.json", "exhibits/../job.json"]
    objects.put("job.json", b"{}")
    here.publish(ExhibitsRemoved(job_id=JOB, time=1.0, step=1, files=files, reason="test"))
    up.upload_exhibits()
    assert exhibits_of(stored) == [second]
    assert objects.get("job.json") == b"{}"


def test_file_that_is_gone_before_its_upload_is_skipped(machine: Make, stored: S3Folder) -> None:
    here = machine("here")
    here.publish(exhibit(1))
    here.uploads.upload_exhibits()
    assert exhibits_of(stored) == []
