"""Tables of the benchmarks of SQuAD and pretraining."""

from __future__ import annotations

from benchmarks.models import pretraining, squad


def test_table_has_the_mean_and_the_deviation_over_seeds() -> None:
    row = {"wall_s": 10.0, "cpu_s": 18.0, "wasted_steps": 1}
    runs = [{**row, "exact": 40.0, "f1": 50.0}, {**row, "exact": 42.0, "f1": 53.0}]
    throughput = {
        "ratio": 0.99,
        "ratios": [0.98, 1.0],
        "rates": {"ours": [9.0], "ddp": [9.1]},
        "cpu_s": {"ours": [0.125], "ddp": [0.25]},
        "cpu_ratio": 2.0,
    }

    table = squad.table_of({"scores": {"2 workers": runs}, "throughput": throughput})

    assert "| 2 workers | 41.0 (1.4) | 51.5 (2.1) | 10      | 18           | 2" in table
    assert (
        "| etrain-jupyter | 9.0       | 0.990 | 0.98 1.00 | 0.1250             | 2.000 |" in table
    )


def test_loss_curves_are_means_over_tenths_of_the_job() -> None:
    steps = list(range(1, 26))
    losses = [float(step) for step in steps]
    columns = dict.fromkeys(("mlm_loss", "order_loss", "order_accuracy"), losses)

    curve = pretraining.curve_of({"step": steps, **columns})

    assert [row["step"] for row in curve] == [3, 6, 9, 12, 15, 18, 21, 24, 25]
    assert [row["mlm_loss"] for row in curve[:2]] == [2.0, 5.0]
