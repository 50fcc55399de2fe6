"""Fingerprints detect within some steps that two ranks differ in any bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from etrain_jupyter.trainer.state.weight_fingerprint import (
    MAX_SLICES,
    MODULUS,
    WeightFingerprint,
    ranks_agree,
)


def build() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 300), nn.Conv2d(3, 5, 3), nn.BatchNorm1d(8))
    model[1].to(memory_format=torch.channels_last)
    model.register_parameter("brain_", nn.Parameter(torch.randn(7, dtype=torch.bfloat16)))
    model.register_parameter("long_", nn.Parameter(torch.randn(7, 2, dtype=torch.float64).T))
    model.register_parameter("wave_", nn.Parameter(torch.randn(7, dtype=torch.complex64)))
    model.register_parameter("nothing_", nn.Parameter(torch.empty(0)))
    return model


def prints(model: nn.Module) -> list[int]:
    made = WeightFingerprint(model)
    return [int(made.at(step)) for step in range(MAX_SLICES)]


@pytest.mark.parametrize("name", [n for n, p in build().named_parameters() if p.numel()])
@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_bit_is_detected_within_one_rotation(name, place):
    model = build()
    other = copy.deepcopy(model)
    with torch.no_grad():
        numbers = other.get_parameter(name)
        numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
        flat = numbers.flatten()
        flat[place] = torch.nextafter(flat[place], torch.tensor(9.0, dtype=flat.dtype))
        numbers.copy_(flat.view_as(numbers))
    assert prints(model) != prints(other)


def test_change_of_the_upper_bits_only_is_detected():
    """Ones and twos differ in their exponents only, which are the upper bits of a float."""
    model, other = (nn.Linear(3, 2, bias=False) for _ in range(2))
    nn.init.ones_(model.weight)
    nn.init.constant_(other.weight, 2.0)
    assert prints(model) != prints(other)


def test_changed_average_is_detected_within_one_rotation():
    model, average = build(), torch.randn(50)
    made = [WeightFingerprint(model, [values]) for values in (average, average + 1)]

    one, other = ([int(found.at(step)) for step in range(MAX_SLICES)] for found in made)

    assert one != other


def test_equal_weights_have_equal_fingerprints_below_the_modulus():
    assert prints(build()) == prints(build())
    assert all(0 <= p < MODULUS for p in prints(build()))


def test_slices_are_covered_in_turn():
    model = nn.Linear(
        1 << 10, 1 << 10, bias=False
    )  # enough elements for the maximum number of slices
    before = prints(model)
    with torch.no_grad():
        model.weight[-1, -1] += 1
    changed = [a != b for a, b in zip(before, prints(model), strict=True)]
    assert changed == [False] * (MAX_SLICES - 1) + [True]


@pytest.mark.parametrize(
    ("prints", "expected"),
    [
        ([5], True),
        ([7, 7, 7], True),
        ([MODULUS - 1] * 1000, True),
        ([7, 7, 8], False),
        ([0, 14], False),
        ([MODULUS - 1] * 999 + [MODULUS - 2], False),
    ],
)
def test_sums_over_ranks_show_whether_all_are_equal(prints, expected):
    sums = torch.tensor([float(p) for p in prints], dtype=torch.float64)
    total, squares = float(sums.sum()), float(sums.square().sum())
    assert ranks_agree(len(prints), total, squares) is expected
