"""What a run store may do to a user who looks at it: somebody else may have written all of it."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.cli import main
from etrain_jupyter.errors import EtrainError, UntrustedJobError
from etrain_jupyter.log.event_log import EventLog, LogReader
from etrain_jupyter.log.events import LOG_FORMAT, JobStatusChanged, JobSubmitted
from etrain_jupyter.log.segments import read_log
from etrain_jupyter.notebook.job import open_jobs
from etrain_jupyter.notebook.job.feed import EventFeed
from etrain_jupyter.notebook.job.history import peek_log
from etrain_jupyter.notebook.job.job_record import RunRecord
from etrain_jupyter.notebook.job.link import ClusterLink, UnreachableError
from etrain_jupyter.notebook.job.open_jobs import attach, link_of
from etrain_jupyter.notebook.job.resume import ResumeRequest, resume_job
from etrain_jupyter.notebook.job.run_store import RunStore, json_of
from etrain_jupyter.notebook.job.store_link import StoreLink
from etrain_jupyter.pools.own_clusters import note_scheduler
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.state_root import open_state_root, state_root
from etrain_jupyter.storage import ownership

ID = "digits-00c0ffee"
COMMON: dict[str, Any] = {"job_id": ID, "time": 1.0}
SUBMITTED = {"format": LOG_FORMAT, "name": "x", "min_workers": 1}


@pytest.fixture(autouse=True)
def _closed_feeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the feed of every job: tests elsewhere assert that no thread of a feed is left."""
    started: list[EventFeed] = []
    start = EventFeed.start

    def note_and_start(feed: EventFeed) -> None:
        started.append(feed)
        start(feed)

    monkeypatch.setattr(EventFeed, "start", note_and_start)
    yield
    for feed in started:
        feed.close()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open_jobs, "_held", {})
    monkeypatch.setattr(open_jobs, "_used", {})
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ETRAIN_POOLS", raising=False)
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path / "clone")


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs")


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """Give a scheduler that would answer with a pickle, if anybody connected."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def address_of(trap: socket.socket) -> str:
    return f"tcp://127.0.0.1:{trap.getsockname()[1]}"


def is_untouched(trap: socket.socket) -> bool:
    try:
        trap.accept()[0].close()
    except BlockingIOError:
        return True
    return False


def plant(store: RunStore, *, log: bool = True, **values: Any) -> RunRecord:
    """Put a job into the store as somebody else would: whatever it says, it is not signed."""
    folder = store.root / ID
    folder.mkdir(parents=True)
    record = RunRecord(job_id=ID, name="digits", created=1.0, folder=folder, host="elsewhere")
    (folder / "job.json").write_text(json.dumps(record.to_dict() | values))
    (folder / "bundle").write_bytes(b"objects")
    if log:
        written = EventLog(folder / "events.jsonl", fsync_every_s=None)
        written.append(
            [
                JobSubmitted(**COMMON, name="digits", min_workers=1, max_workers=1),
                JobStatusChanged(**COMMON, status="running"),
            ]
        )
        written.close()
    return store.find(ID)


# --- S2: whom a job's record makes us talk to ---


@pytest.mark.parametrize("kind", ["plain", "with a state directory", "with certificates"])
def test_reading_an_untrusted_job_opens_no_connection(
    kind: str,
    store: RunStore,
    trap: socket.socket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Review S2."""
    cluster = {"address": address_of(trap), "cluster_id": "Scheduler-1"}
    if kind == "with a state directory":
        # Files of a cloned repository are the user's own, too.
        evil = ClusterDir.make(tmp_path / "local-000000-000000", ClusterSettings())
        evil.publish(address_of(trap))
        cluster |= {"cluster_id": evil.cluster_id, "state_dir": str(evil.path)}
    if kind == "with certificates":
        cluster |= {name: "/etc/hostname" for name in ("tls_ca", "tls_cert", "tls_key")}
    plant(store, cluster=cluster)
    Path("pools.yaml").write_text(f"lab: {{kind: address, address: '{address_of(trap)}'}}\n")

    job = attach("digits")
    assert (job.status, job.step, job.wait(timeout=0.2)) == ("running", 0, "running")
    job.audit()
    job.cost()
    job.history()
    for words in ("ls", "show digits", "logs digits", "cost digits", "checkpoints digits", "pools"):
        main(words.split())
    assert "only its log is followed" in capsys.readouterr().out
    with pytest.raises(UnreachableError, match=r"nothing was done.*only its log is followed"):
        job.stop()
    with pytest.raises(UnreachableError):
        job.workers()
    with pytest.raises(UntrustedJobError):
        job.resume()

    assert is_untouched(trap)
    job._feed.close()


def test_log_of_an_untrusted_job_is_followed_to_its_end(store: RunStore) -> None:
    """Review S2: what can be seen without asking anybody is seen."""
    plant(store, cluster={"address": "tcp://10.0.0.1:1", "cluster_id": "Scheduler-1"})
    job = attach("digits")
    assert job.status == "running"
    assert "tcp://10.0.0.1:1 is unknown to you" in job.note
    assert "lab: {kind: address, address: tcp://10.0.0.1:1}" in job.note

    log = EventLog(job.record.log_path, fsync_every_s=None)
    log.append([JobStatusChanged(**COMMON, status="finished")])
    log.close()

    assert job.wait(timeout=20) == "finished"


def test_address_in_the_users_pools_is_contacted_with_its_certificates(
    store: RunStore, tmp_path: Path
) -> None:
    """Review S2."""
    own = tmp_path / "config" / "etrain" / "pools.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(
        "lab: {kind: address, address: 'tls://10.0.0.1:1', tls: {ca: a, cert: b, key: c}}\n"
    )
    cluster = {"address": "tls://10.0.0.1:1", "cluster_id": "x", "tls_ca": "/theirs"}

    link = link_of(plant(store, cluster=cluster))

    assert isinstance(link, ClusterLink)
    assert link.address == "tls://10.0.0.1:1"
    known = link._connection_args.__self__  # type: ignore[attr-defined]
    assert known.tls_ca == str(own.parent / "a")


def test_known_scheduler_is_contacted_at_its_noted_address(store: RunStore, tmp_path: Path) -> None:
    """Review S2."""
    ours = SchedulerAddress(address="tcp://10.0.0.2:1", cluster_id="Scheduler-2", tls_ca="/ours")
    note_scheduler(ours)
    note = next((tmp_path / "state" / "schedulers").iterdir())
    assert stat.S_IMODE(note.stat().st_mode) == 0o600

    link = link_of(plant(store, cluster={"cluster_id": "Scheduler-2", "address": "tcp://evil:1"}))

    assert isinstance(link, ClusterLink)
    assert link.address == "tcp://10.0.0.2:1"

    for folder in (note.parent, note.parent.parent):  # others could have written or replaced it
        folder.chmod(0o777)
        assert isinstance(link_of(store.find(ID)), StoreLink)
        folder.chmod(0o700)
        assert isinstance(link_of(store.find(ID)), ClusterLink)


def test_own_cluster_is_found_by_its_id_despite_other_fields_of_the_record(store: RunStore) -> None:
    """Review S2."""
    root = state_root()
    root.mkdir(mode=0o700)
    ours = ClusterDir.make(root / "local-aaaaaa-bbbbbb", ClusterSettings())
    ours.publish("tls://127.0.0.1:7")
    hostile = {
        "cluster_id": ours.cluster_id,
        "address": "tcp://evil:1",
        "state_dir": "/evil",
        "tls_dir": "/evil",
    }

    link = link_of(plant(store, cluster=hostile))

    assert isinstance(link, ClusterLink)
    assert link.address == "tls://127.0.0.1:7"
    assert link._connection_args.__self__.tls_dir == str(ours.tls)  # type: ignore[attr-defined]

    root.chmod(0o777)
    assert isinstance(link_of(store.find(ID)), StoreLink)


def test_own_cluster_is_found_in_a_state_folder_that_the_user_has_linked(
    store: RunStore, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    ours = ClusterDir.make(open_state_root() / "local-aaaaaa-bbbbbb", ClusterSettings())
    ours.publish("tls://127.0.0.1:7")

    record = {"cluster_id": ours.cluster_id, "address": "tcp://evil:1", "state_dir": str(ours.path)}
    link = link_of(plant(store, cluster=record))

    assert isinstance(link, ClusterLink)


@pytest.mark.plugins
def test_remote_head_is_found_by_its_id(store: RunStore) -> None:
    """Review S2: what this machine has of such a cluster is its keys and where it is reached."""
    root = state_root()
    root.mkdir(mode=0o700)
    ours = ClusterDir.make(root / "aws-aaaaaa-bbbbbb", ClusterSettings())
    told = {"address": "tls://10.0.0.9:1", "instance_id": "i", "reached_at": "tls://127.0.0.1:8"}
    (ours.path / "head.json").write_text(json.dumps(told))
    record = plant(store, cluster={"cluster_id": ours.cluster_id, "address": "tcp://evil:1"})

    link = link_of(record)

    assert isinstance(link, ClusterLink)
    assert link.address == "tls://127.0.0.1:8"


@pytest.mark.parametrize("cluster_id", ["../../x", "local-../../x", "local-a/b", "", "local-\0"])
def test_cluster_id_is_never_used_as_a_path(cluster_id: str, store: RunStore) -> None:
    """Review S2, S4."""
    record = plant(store, cluster={"cluster_id": cluster_id, "address": "a", "state_dir": "/s"})

    assert isinstance(link_of(record), StoreLink)


def test_ended_cluster_of_this_machine_is_known_to_have_ended(store: RunStore) -> None:
    gone = state_root() / "local-aaaaaa-bbbbbb"
    values = {"cluster_id": gone.name, "address": "tls://127.0.0.1:1", "state_dir": str(gone)}

    record = plant(store, cluster=values, host=platform.node())

    assert link_of(record) is None
    assert store.summarize(record).is_gone


def test_job_that_may_still_be_training_is_resumed_only_by_force(store: RunStore) -> None:
    plant(store, cluster={"address": "tcp://10.0.0.1:1", "cluster_id": "Scheduler-1"})

    with pytest.raises(EtrainError, match=r"may still be training.*add --force"):
        attach("digits").resume(trust=True)


# --- who submitted a job ---


def own(store: RunStore) -> RunRecord:
    return store.create(
        {"name": "digits", "created": 1.0, "config": {"epochs": 3}, "bundle_digest": "d"},
        bundle=b"objects",
        job_id=ID,
    )


def test_own_job_is_known_and_survives_its_file(store: RunStore) -> None:
    assert own(store).is_own
    assert store.find(ID).is_own
    assert store.rewrite(store.find(ID)).is_own


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pool", "tcp://evil:1"),
        ("config", {"epochs": 4}),
        ("bundle_digest", "other"),
        ("cwd", "/evil"),
        ("signature", ""),
        ("signature", "ä"),
        ("signature", "0" * 64),
    ],
)
def test_modified_record_is_not_trusted(name: str, value: Any, store: RunStore) -> None:
    path = own(store).folder / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    assert not store.find(ID).is_own
    with pytest.raises(UntrustedJobError, match=r"Nothing was run.*--trust"):
        resume_job(attach("digits"), ResumeRequest())


def test_own_record_under_another_id_is_not_trusted(store: RunStore) -> None:
    made = own(store)
    other = made.folder.with_name("digits-11111111")
    made.folder.rename(other)
    values = json.loads((other / "job.json").read_text())
    (other / "job.json").write_text(json.dumps(values | {"job_id": other.name}))

    assert not store.find(other.name).is_own


def test_signing_key_is_private_and_a_readable_one_is_not_trusted(
    store: RunStore, tmp_path: Path
) -> None:
    record = own(store)
    key = tmp_path / "state" / ownership.KEY_FILE
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert [path.name for path in key.parent.iterdir()] == [ownership.KEY_FILE]

    key.chmod(0o644)
    assert not record.is_own


def test_without_a_storable_key_jobs_are_created_unsigned(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "file" / "below"))

    record = own(store)

    assert record.signature == ""
    assert not record.is_own


# --- S4: ids and names ---

EVIL_ID = "digits-00000001\nopen('PWNED','w').write('x')"


@pytest.mark.parametrize(
    "values",
    [
        {"job_id": EVIL_ID},
        {"job_id": "../../../etc"},
        {"job_id": "digits-11111111"},
        {"job_id": 3},
        {"created": "1"},
        {"created": 1e300},
        {"created": True},
        {"cluster": "x"},
        {"cluster": {"address": 3}},
        {"config": []},
        {"config": {"checkpoint": 3}},
        {"config": {"checkpoint": {"to": ["x"]}}},
        {"config": {"log": "x"}},
        {"bundle_file": "../../x"},
        {"bundle_file": "/etc/passwd"},
        {"pool": None},
        {"cell": {}},
        {"format": None},
        {"format": True},
    ],
)
def test_invalid_record_is_named_with_the_reason_and_ignored(
    values: dict[str, Any], store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Review S4."""
    good = store.create({"name": "good", "created": 1.0})
    folder = store.root / ID
    folder.mkdir()
    record = RunRecord(job_id=ID, name="digits", created=1.0, folder=folder)
    (folder / "job.json").write_text(json.dumps(record.to_dict() | values))

    assert store.records() == [good]
    assert list(store.scan().problems) == [ID]
    assert main(["ls"]) == 0
    told = capsys.readouterr().out
    assert f"delete the folder):\n  {ID}: " in told
    assert len(told.splitlines()) == 5


@pytest.mark.parametrize("text", ["", "[]", "3", "[" * 100_000, '{"job_id": ', "\ud800"])
def test_file_that_is_not_a_record_is_skipped(text: str, store: RunStore) -> None:
    """Review S4."""
    (store.root / ID).mkdir(parents=True)
    (store.root / ID / "job.json").write_text(text, errors="surrogatepass")

    assert store.records() == []
    assert ID in store.scan().problems


def test_folder_whose_name_is_not_a_job_id_is_skipped(store: RunStore) -> None:
    """Review S4."""
    folder = store.root / EVIL_ID.replace("/", "")
    folder.mkdir(parents=True)
    record = RunRecord(job_id=folder.name, name="x", created=1.0, folder=folder)
    (folder / "job.json").write_bytes(json_of(record))

    assert store.records() == []
    with pytest.raises(ValueError, match="is not a valid job id"):
        store.create({"name": "x", "created": 1.0}, job_id="../x")


def test_unsafe_characters_in_a_job_name_are_replaced(store: RunStore) -> None:
    """Review S4."""
    record = plant(store, name="\x1b[2J<script>alert(1)</script>\nimport os")

    assert record.name == "2J-script-alert-1-script-import-os"


def test_untrusted_log_cannot_send_terminal_control_sequences(
    store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Review S4."""
    record = plant(store, log=False)
    events = [
        {"event": "JobSubmitted", **SUBMITTED, "max_workers": 1},
        {"event": "LogLine", "level": "info", "worker": "\x1b[31mw1", "text": "a\x1b]0;b\x07\rc"},
        {"event": "JobStatusChanged", "status": "\x1b[2Jdone", "reason": "\x9b5m"},
        {"event": "JobStatusChanged", "status": "failed", "reason": "\x1b[5mblink"},
    ]
    lines = [json.dumps({**COMMON, "seq": n, **e}) for n, e in enumerate(events, start=1)]
    record.log_path.write_text("\n".join(lines) + "\n")

    for words in ("ls", "show digits", "logs digits", "wait digits"):
        main(words.split())

    told = capsys.readouterr()
    text = told.out + told.err
    assert "a\\x1b]0;b\\x07\\rc" in text
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0]


# --- S6 and files that are none ---


def test_job_folders_are_accessible_by_their_owner_only(store: RunStore) -> None:
    """Review S6."""
    before = os.umask(0)
    try:
        record = own(store)
        EventLog(record.log_path, fsync_every_s=None).close()
        store.rewrite(record, bundle=b"other")
    finally:
        os.umask(before)

    assert stat.S_IMODE(record.folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in record.folder.iterdir()}
    assert modes == dict.fromkeys(modes, 0o600)
    assert {"job.json", "bundle", "events.jsonl"} < set(modes)


def test_folder_that_others_can_read_stays_usable(store: RunStore) -> None:
    """Review S6."""
    record = own(store)
    record.folder.chmod(0o755)
    (record.folder / "job.json").chmod(0o644)

    assert store.find(ID).is_own
    assert store.rewrite(record).is_own


@pytest.mark.parametrize("name", ["job.json", "events.jsonl"])
@pytest.mark.parametrize("what", ["pipe", "link", "loop", "folder", "device"])
def test_special_files_and_links_neither_block_nor_are_followed(
    what: str, name: str, store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Review S6: looking must not wait for ever."""
    record = plant(store, cluster={"address": "tcp://10.0.0.1:1", "cluster_id": "Scheduler-1"})
    path, elsewhere = record.folder / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    before = elsewhere.read_bytes()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": elsewhere, "loop": path, "device": "/dev/zero"}[what])

    assert main(["ls"]) == 0
    if name == "job.json":
        assert what == "loop" or "job.json cannot be read: it is" in capsys.readouterr().out
    else:
        assert peek_log(path).status == "submitted"
        job = attach("digits")
        assert job.status == "submitted"
        job._feed.close()
        with pytest.raises((OSError, EtrainError)):
            EventLog(path)
    assert elsewhere.read_bytes() == before


def test_oversized_record_is_reported_and_not_read_into_memory(store: RunStore) -> None:
    record = plant(store)
    with (record.folder / "job.json").open("r+b") as file:
        file.truncate(1 << 40)

    assert "larger than 16,000,000 bytes" in store.scan().problems[ID]


# --- logs with anything in them ---


def test_line_beyond_the_length_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.log.event_log._LONGEST_LINE", 3_000_000)
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)

    for limit in (1, None):
        with pytest.raises(EtrainError, match="a line of over"):
            LogReader(path).read(limit)
    assert peek_log(path).status == "submitted"


@pytest.mark.parametrize(
    "event",
    [
        "[" * 50_000,
        "3",
        "null",
        '{"event": ["x"]}',
        '{"event": "LogLine"}',
        '{"event": "JobStatusChanged", "job_id": "x", "time": "now", "status": "running"}',
        '{"event": "JobStatusChanged", "job_id": "x", "time": 1, "status": {"a": 1}}',
        '{"event": "JobStatusChanged", "job_id": 3, "time": 1, "status": "running"}',
        '{"event": "Unheard", "job_id": "x", "time": [], "seq": 1}',
        '{"event": "UserErrorRaised", "job_id": "x", "time": 1, "error": "e", "traceback": "t",'
        ' "workers": [1]}',
        '{"event": "EvalCompleted", "job_id": "x", "time": 1, "step": 1, "loss": 1.0,'
        ' "metrics": {"a": "b"}, "num_samples": 1, "duration_s": 1.0, "epoch": 1}',
    ],
)
def test_line_that_is_not_an_event_is_named_and_ignored_by_peek(event: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(event + "\n")

    with pytest.raises(EtrainError, match=r"Line 1 of .* is not an event"):
        read_log(path)
    assert peek_log(path).status == "submitted"


def test_huge_numbers_in_a_log_do_not_break_the_list(
    store: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record = plant(store, log=False)
    far = {**COMMON, "time": 1e300}
    events = [
        {**far, "event": "JobSubmitted", **SUBMITTED, "max_workers": 2**62},
        {**far, "event": "LogLine", "level": "info", "worker": "w1", "text": "one"},
        {**far, "event": "JobStatusChanged", "status": "finished"},
    ]
    lines = [json.dumps({**e, "seq": n}) for n, e in enumerate(events, start=1)]
    record.log_path.write_text("\n".join(lines) + "\n")

    assert main(["ls"]) == 0
    assert main(["show", "digits"]) == 0
    assert main(["logs", "digits"]) == 0
    assert "w1: one" in capsys.readouterr().out
