"""Verdict, share, confidence and abstention from the parts of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.insight.diagnosis.rules import (
    CAUSES,
    Finding,
    Round,
    StepParts,
    Verdict,
    doubt_exchange,
    judge,
    saved_s,
    shares_of,
    split_stragglers,
    step_s,
)
from tests.unit.insight.diagnosis.diagnosed_jobs import lockstep, parts


def main_of(verdict: Verdict) -> Finding:
    assert verdict.main is not None
    return verdict.main


def verdict_of(*workers: StepParts, transfer_s: float = 0.0, **more: float) -> Verdict:
    return judge(lockstep(*workers, transfer_s=transfer_s), num_steps=100, **more)


def both(**seconds: float | None) -> tuple[StepParts, StepParts]:
    return parts("w0", **seconds), parts("w1", **seconds)


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "seconds", "more"),
    [
        ("input", {"data_s": 0.01}, {}),
        ("optimizer", {"optimizer_s": 0.01}, {}),
        ("metrics", {"metrics_s": 0.01}, {}),
        ("evaluation", {"evaluation_s": 0.01}, {}),
        ("checkpoint", {"checkpoint_s": 0.01}, {}),
        # The copy blocks for 2 ms of a step, and the write slows the exchange down by 9 ms.
        ("checkpoint", {"checkpoint_s": 0.002, "slowed_s": 0.009}, {"transfer_s": 0.01}),
        ("overhead", {"rest_s": 0.01}, {}),
        ("communication", {}, {"transfer_s": 0.01}),
    ],
)
def test_part_of_half_a_step_is_the_cause_and_its_ceiling_is_twice_the_throughput(
    cause: str, seconds: dict[str, float], more: dict[str, float]
) -> None:
    main = main_of(verdict_of(*both(**seconds), **more))

    assert main.cause == cause
    assert (main.share, main.ceiling) == (pytest.approx(0.5), pytest.approx(1.0))


def test_slow_worker_is_a_straggler_and_is_named() -> None:
    main = main_of(verdict_of(parts("w0"), parts("w1", passes_s=0.03), parts("w2")))

    assert (main.cause, main.workers) == ("straggler", ("w1",))
    assert main.ceiling == pytest.approx(2.0)


def test_slow_data_on_one_worker_is_a_straggler_and_on_all_workers_is_input() -> None:
    one = verdict_of(parts("w0"), parts("w1", data_s=0.03), parts("w2"))
    every = verdict_of(*(parts(f"w{i}", data_s=0.03) for i in range(3)))

    assert (main_of(one).cause, main_of(every).cause) == ("straggler", "input")


def test_tiny_batch_is_overhead_even_if_communication_takes_more_time() -> None:
    verdict = verdict_of(*both(passes_s=0.010), transfer_s=0.012, fixed_s=0.009)

    assert main_of(verdict).cause == "overhead"


def test_expensive_update_is_not_taken_for_a_tiny_batch() -> None:
    verdict = verdict_of(*both(passes_s=0.010, optimizer_s=0.02), fixed_s=0.009)

    assert main_of(verdict).cause == "optimizer"


def test_fixed_cost_of_a_part_of_the_passes_is_no_overhead() -> None:
    verdict = verdict_of(*both(passes_s=0.010), fixed_s=0.005)

    assert (main_of(verdict).cause, main_of(verdict).ceiling) == ("compute", None)
    assert "overhead" not in verdict.not_measured


def test_passes_are_the_cause_if_no_other_part_is_large() -> None:
    main = main_of(verdict_of(*both(data_s=0.001, optimizer_s=0.001), transfer_s=0.001))

    assert (main.cause, main.share) == ("compute", pytest.approx(10 / 13))


# --- abstention -----------------------------------------------------------------------------------


def test_metrics_on_a_gpu_are_not_judged() -> None:
    verdict = judge(both(metrics_s=None), num_steps=100)

    assert set(verdict.not_measured) == {"metrics", "overhead"}


def test_without_durations_there_is_no_verdict() -> None:
    verdict = judge([parts(passes_s=0.0)], num_steps=100)

    assert (verdict.main, verdict.reason) == (None, "The log has no durations.")


def test_share_that_varies_too_much_is_no_verdict() -> None:
    rounds = [rounds_of(data_s) for data_s in (0.0, 0.0, 0.012)]

    verdict = judge([parts(data_s=0.004)], rounds=rounds, num_steps=100)

    assert verdict.main is None
    assert "varies too much" in verdict.reason


def rounds_of(data_s: float, num_steps: int = 50) -> Round:
    return Round(workers=(parts(data_s=data_s),), num_steps=num_steps)


@pytest.mark.parametrize(
    ("num_steps", "rounds", "confidence"),
    [
        (23, 4, "low"),
        (24, 0, "medium"),
        (24, 2, "medium"),
        (24, 3, "high"),
    ],
)
def test_confidence_grows_with_steps_and_reports(
    num_steps: int, rounds: int, confidence: str
) -> None:
    verdict = judge([parts(data_s=0.01)], rounds=[rounds_of(0.01)] * rounds, num_steps=num_steps)

    assert main_of(verdict).confidence == confidence


def test_smaller_causes_are_mentioned_if_their_interval_excludes_zero() -> None:
    worker = parts(data_s=0.01, optimizer_s=0.004)
    rounds = [Round(workers=(worker,), num_steps=50)] * 3

    known = judge([worker], rounds=rounds, num_steps=150)
    unknown = judge([worker], num_steps=150)

    assert [one.cause for one in known.others] == ["optimizer"]
    assert unknown.others == ()


# --- properties -----------------------------------------------------------------------------------

SECONDS = st.floats(0, 10)
WORKERS = st.lists(
    st.builds(
        parts,
        st.sampled_from(["a", "b", "c"]),
        data_s=SECONDS, passes_s=SECONDS, metrics_s=SECONDS, optimizer_s=SECONDS, rest_s=SECONDS,
        evaluation_s=SECONDS, checkpoint_s=SECONDS,
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@given(WORKERS, SECONDS, st.none() | SECONDS)
def test_no_cause_saves_more_than_the_time_of_a_step(
    workers: list[StepParts], transfer: float, fixed_s: float | None
) -> None:
    workers = lockstep(*workers, transfer_s=transfer)

    for seconds in saved_s(workers, fixed_s=fixed_s).values():
        assert seconds >= 0
    assert all(0 <= share <= 1 for share in shares_of(workers, fixed_s=fixed_s).values())


@given(WORKERS, SECONDS, st.none() | SECONDS)
def test_order_of_the_workers_and_unit_of_time_do_not_matter(
    workers: list[StepParts], transfer: float, fixed_s: float | None
) -> None:
    workers = lockstep(*workers, transfer_s=transfer)

    shares = shares_of(workers, fixed_s=fixed_s)

    assert shares_of(workers[::-1], fixed_s=fixed_s) == pytest.approx(shares, abs=1e-6)


@given(WORKERS, SECONDS)
def test_verdict_names_a_large_cause_and_is_stable(
    workers: list[StepParts], transfer: float
) -> None:
    workers = lockstep(*workers, transfer_s=transfer)

    verdict = judge(workers, num_steps=100)

    if verdict.main is not None:
        assert verdict.main.cause in CAUSES
        assert verdict.main.share >= 0.2
        assert (verdict.main.ceiling is None) == (
            verdict.main.cause == "compute" or verdict.main.share >= 1
        )
    else:
        assert verdict.reason


@given(WORKERS)
def test_stragglers_are_a_minority_and_slower_than_all_others(workers: list[StepParts]) -> None:
    slow, others = split_stragglers(workers)

    assert len(slow) + len(others) == len(workers)
    assert len(slow) <= max(1, (len(workers) - 1) // 2)
    assert others
    assert not slow or min(s.own_s for s in slow) > 1.2 * max(o.own_s for o in others)


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=6), SECONDS)
def test_without_the_straggler_a_step_takes_as_long_as_the_other_workers(
    passes: list[float], transfer: float
) -> None:
    workers = lockstep(
        *(parts(f"w{i}", passes_s=seconds) for i, seconds in enumerate(passes)),
        transfer_s=transfer,
    )
    _, others = split_stragglers(workers)

    after_s = step_s(workers) - saved_s(workers)["straggler"]

    assert after_s == pytest.approx(max(o.own_s for o in others) + transfer)


# --- doubts ---------------------------------------------------------------------------------------

STARVED = 0.006
"""Seconds of 10 ms of passes in which a worker waited for a core."""


def exchanging(core_wait_s: float | None, **seconds: float) -> list[StepParts]:
    """Return workers with 10 ms of passes and 20 ms of transfer."""
    return lockstep(*both(core_wait_s=core_wait_s, **seconds), transfer_s=0.02)


@pytest.mark.parametrize("core_wait_s", [None, 0.0, 0.001])
def test_exchange_of_workers_with_cores_is_communication(core_wait_s: float | None) -> None:
    workers = exchanging(core_wait_s)

    main = main_of(doubt_exchange(judge(workers, num_steps=100), workers))

    assert (main.cause, main.confidence) == ("communication", "medium")


def test_exchange_of_workers_without_cores_has_no_verdict() -> None:
    workers = exchanging(STARVED)

    verdict = doubt_exchange(judge(workers, num_steps=100), workers)

    assert verdict.main is None
    assert verdict.reason.startswith(
        "The exchange takes 67% of a step, but the workers waited for a core 60% of the time"
    )


def test_other_causes_on_workers_without_cores_keep_their_verdict_with_low_confidence() -> None:
    workers = lockstep(*both(core_wait_s=STARVED, data_s=0.03))

    main = main_of(doubt_exchange(judge(workers, num_steps=100), workers))

    assert (main.cause, main.confidence) == ("input", "low")


def test_exchange_during_endless_checkpoints_has_no_verdict_until_their_cost_is_known() -> None:
    unknown, known = exchanging(0.0), exchanging(0.0, slowed_s=0.004)

    doubted = doubt_exchange(judge(unknown, num_steps=100), unknown, writing_s=0.03)
    kept = doubt_exchange(judge(known, num_steps=100), known, writing_s=0.03)
    rare = doubt_exchange(judge(unknown, num_steps=100), unknown, writing_s=0.01)

    assert doubted.main is None
    assert "a checkpoint was being written during nearly all steps" in doubted.reason
    assert main_of(kept).cause == main_of(rare).cause == "communication"


def test_checkpoint_of_one_rank_makes_the_others_wait_and_is_not_communication() -> None:
    # Rank 0 begins its step 20 ms later, so the other rank waits in the exchange.
    late = parts("w0", checkpoint_s=0.02, communication_s=0.002, wait_s=0.0)
    waiting = parts("w1", communication_s=0.022, wait_s=0.02)

    main = main_of(judge([late, waiting], num_steps=100))

    assert (main.cause, main.share) == ("checkpoint", pytest.approx(20 / 32))


def test_slow_update_of_one_rank_is_not_communication() -> None:
    late = parts("w0", optimizer_s=0.02, communication_s=0.002, wait_s=0.0)
    waiting = parts("w1", communication_s=0.022, wait_s=0.02)

    main = main_of(judge([late, waiting], num_steps=100))

    assert main.cause in ("straggler", "optimizer")
