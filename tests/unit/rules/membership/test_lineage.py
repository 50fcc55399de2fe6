"""A checkpoint that was written by ranks that had been given up is told from the job's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log.job_record import NOT_BEGUN
from etrain_jupyter.rules.membership.lineage import is_of_job


def test_generation_that_has_not_begun_fences_no_checkpoint():
    assert is_of_job(generation=1, step=10_000, starts=[0, NOT_BEGUN])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_job_owns_exactly_the_states_in_the_history_of_its_last_generation(ahead, data):
    # Each generation makes some steps; the next goes on from any of its states.
    starts, owned = [0], {(1, 0)}
    for generation, steps in enumerate(ahead, start=1):
        first = starts[-1]
        owned |= {(generation, step) for step in range(first, first + steps + 1)}
        if generation < len(ahead):
            starts.append(data.draw(st.integers(0, first + steps)))
            owned = {(g, step) for g, step in owned if step <= starts[-1]}
            owned.add((generation + 1, starts[-1]))
    for generation in range(1, len(starts) + 1):
        for step in range(starts[generation - 1], starts[generation - 1] + 21):
            is_made = step <= starts[generation - 1] + ahead[generation - 1]
            if is_made:
                claimed = is_of_job(generation=generation, step=step, starts=starts)
                assert claimed == ((generation, step) in owned)
