"""The page through which a trainer shows how far it is, whatever it does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from etrain_jupyter.wire import progress_page
from etrain_jupyter.wire.progress_page import ProgressPage, start_pulse


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    page = ProgressPage.create()
    yield page
    page.close()


def test_unwritten_page_is_idle_with_age_zero(page: ProgressPage) -> None:
    read = page.read()
    assert (read.generation, read.collectives, read.beats, read.phase) == (0, 0, 0, "idle")
    assert read.alive_age_s == 0.0


def test_reader_sees_what_the_trainer_wrote(page: ProgressPage) -> None:
    page.begin(3)
    page.beat(step=41, phase="computing")
    page.count_collective()
    page.count_collective()
    read = page.read()
    assert (read.generation, read.step, read.collectives) == (3, 41, 2)
    assert (read.phase, read.beats) == ("computing", 2)  # to begin is a sign of life, too


def test_generation_begins_with_no_collectives(page: ProgressPage) -> None:
    page.begin(1)
    page.count_collective()
    page.begin(2)
    assert (page.read().generation, page.read().collectives) == (2, 0)


def test_beat_without_a_step_keeps_the_step(page: ProgressPage) -> None:
    page.beat(step=5, phase="evaluating")
    page.beat()
    assert (page.read().step, page.read().phase, page.read().beats) == (5, "evaluating", 2)


def test_unknown_phase_is_refused(page: ProgressPage) -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        page.beat(phase="dreaming")


def test_no_count_is_lost_between_threads(page: ProgressPage) -> None:
    def count() -> None:
        for _ in range(5000):
            page.count_collective()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.read().collectives == 20_000


def test_pulse_resets_the_age(page: ProgressPage, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 7_000_000_000
    monkeypatch.setattr(progress_page, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    page.pulse()
    now_ns += 1_500_000_000
    assert page.read().alive_age_s == 1.5
    page.pulse()
    assert page.read().alive_age_s == 0.0


def test_pulse_thread_repeats_and_ends_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pulses = threading.Semaphore(0)

    class CountedPage(ProgressPage):
        def pulse(self) -> None:
            super().pulse()
            pulses.release()

    monkeypatch.setattr(progress_page, "PULSE_S", 0.01)
    page = CountedPage.create()
    thread = start_pulse(page)
    for _ in range(5):
        assert pulses.acquire(timeout=60)
    page.close()
    thread.join(60)
    assert not thread.is_alive()


def test_other_process_reads_the_same_page(page: ProgressPage) -> None:
    page.beat(step=9, phase="saving")
    code = (
        "import sys\n"
        "from etrain_jupyter.wire.progress_page import ProgressPage\n"
        "page = ProgressPage(int(sys.argv[1]))\n"
        "assert page.read().step == 9\n"
        "page.begin(7); page.pulse()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(page.fd)], pass_fds=[page.fd], check=True)
    assert page.read().generation == 7
    assert page.has_pulsed()


def test_closing_releases_the_descriptor_and_may_be_repeated() -> None:
    page = ProgressPage.create()
    fd = page.fd
    page.close()
    page.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
