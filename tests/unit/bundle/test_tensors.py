"""Tensors and arrays in a bundle: elements are stored once, and sharing is preserved."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from etrain_jupyter.bundle import capture, payload
from etrain_jupyter.bundle.capture import Bundle, capture_bundle
from etrain_jupyter.bundle.restore import OpenBundle, open_bundle
from etrain_jupyter.errors import BundleError


def captured(**objects: Any) -> Bundle:
    return capture_bundle({name: name for name in objects}, objects)


def in_a_file(bundle: Bundle, folder: Path) -> OpenBundle:
    path = folder / "bundle"
    path.write_bytes(bundle.data)
    return open_bundle(path, digest=bundle.digest)


def returned(**objects: Any) -> dict[str, Any]:
    opened = open_bundle(captured(**objects).data)
    return {name: opened.evaluate(name) for name in objects}


def test_two_halves_of_a_tensor_count_as_halves_and_are_stored_as_one() -> None:
    whole = torch.randn(1000, 100)
    bundle = captured(first=whole[:500], second=whole[500:])
    assert 200_000 <= bundle.sizes["first"] < 201_000
    assert 200_000 <= bundle.sizes["second"] < 201_000
    assert len(bundle.data) < 403_000


def test_view_is_stored_without_the_rest_of_its_storage() -> None:
    whole = torch.randn(1000, 100)
    bundle = captured(x=whole[100:110])
    assert len(bundle.data) < 8_000
    assert torch.equal(open_bundle(bundle.data).evaluate("x"), whole[100:110])


def test_rows_of_a_tensor_in_tuples_count_their_own_size() -> None:
    x, y = torch.randn(5000, 42), torch.arange(5000)
    rows = [(x[i], y[i]) for i in range(500)]
    bundle = captured(rows=rows)
    assert 500 * (42 * 4 + 8) <= bundle.sizes["rows"] < 200_000
    back = open_bundle(bundle.data).evaluate("rows")
    assert all(
        torch.equal(a, b)
        for one, two in zip(rows, back, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_data_set_of_views_is_stored_as_its_own_elements() -> None:
    x, y = torch.randn(10_000, 50), torch.arange(10_000)
    bundle = captured(train=TensorDataset(x[:100], y[:100]))
    assert bundle.sizes["train"] < 25_000
    back = open_bundle(bundle.data).evaluate("train")
    assert torch.equal(back.tensors[0], x[:100])
    assert back[7][1] == 7


def test_storage_of_two_names_is_stored_once_and_stays_shared() -> None:
    x = torch.randn(1000, 100)
    bundle = captured(a=x, b=x[200:300], c=torch.from_numpy(x.numpy()))
    assert len(bundle.data) < 403_000
    assert bundle.sizes["b"] < 1000
    opened = open_bundle(bundle.data)
    a, b, c = (opened.evaluate(name) for name in "abc")
    a[250].fill_(7.0)
    assert torch.equal(b[50], a[250])
    assert torch.equal(c, a)


def test_sparse_columns_are_stored_alone_unless_they_share_elements() -> None:
    table = torch.arange(100_000.0).reshape(1000, 100)
    bundle = captured(x=table[:, 3], y=table[:, 7])
    assert len(bundle.data) < 12_000
    opened = open_bundle(bundle.data)
    assert torch.equal(opened.evaluate("x"), table[:, 3])
    assert torch.equal(opened.evaluate("y"), table[:, 7])

    back = returned(column=table[:, 3], row=table[5])
    back["row"][3] = -1.0
    assert back["column"][5] == -1.0


def test_layouts_are_preserved() -> None:
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    table = torch.randn(6, 4)
    back = returned(images=images, turned=table.t(), spread=torch.randn(5, 1).expand(5, 3))
    assert back["images"].stride() == images.stride()
    assert back["turned"].stride() == (1, 4)
    assert back["spread"].stride() == (1, 0)


def test_all_kinds_of_tensors_are_restored(tmp_path: Path) -> None:
    class Marked(torch.Tensor): ...

    leaf = torch.randn(3, requires_grad=True)
    kinds = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(4).to(torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "leaf": leaf,
        "parameter": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
    }
    bundle = captured(**kinds)
    opened = in_a_file(bundle, tmp_path)
    for name, value in kinds.items():
        made = opened.evaluate(name)
        assert (type(made), made.dtype, made.shape) == (type(value), value.dtype, value.shape), name
        assert made.requires_grad == value.requires_grad, name
        dense = (made.to_dense(), value.to_dense()) if value.is_sparse else (made, value)
        assert torch.equal(*dense), name
    assert opened.evaluate("complex").is_conj()


def test_views_of_two_types_share_one_storage() -> None:
    x = torch.arange(64, dtype=torch.int32)
    back = returned(whole=x[3:], halves=x.view(torch.int16)[5:])
    back["whole"][0] = -1
    assert back["halves"][1:3].tolist() == [-1, -1]


def test_views_of_arrays_are_stored_as_their_own_elements(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(10_000, 50))
    bundle = captured(x=whole[:100], columns=whole[:, 3], frozen=np.broadcast_to(np.ones(1), 5))
    assert 40_000 <= bundle.sizes["x"] < 41_000
    assert bundle.sizes["columns"] < 81_000
    opened = in_a_file(bundle, tmp_path)
    x = opened.evaluate("x")
    assert np.array_equal(x, whole[:100])
    x += 1  # as writable as it was
    assert np.array_equal(opened.evaluate("columns"), whole[:, 3])


def test_training_changes_neither_the_file_nor_later_reads(tmp_path: Path) -> None:
    opened = in_a_file(captured(net=torch.randn(100_000), a=np.zeros(100_000)), tmp_path)
    before = (tmp_path / "bundle").read_bytes()
    first = opened.evaluate("net")
    kept = first.clone()
    first.zero_()
    opened.evaluate("a")[:] = 5
    (tmp_path / "bundle").unlink()  # a job that ends may take it away
    assert torch.equal(opened.evaluate("net"), kept)
    assert opened.evaluate("a").sum() == 0
    assert len(before) > 0


def test_tensors_of_a_file_are_mapped_and_not_read(tmp_path: Path) -> None:
    bundle = captured(x=torch.zeros(64 << 18))  # 64 MB
    opened = in_a_file(bundle, tmp_path)
    before = resident_kb()
    x = opened.evaluate("x")
    assert resident_kb() - before < 8_000
    assert x[-1] == 0
    assert x.data_ptr() % 64 == 0


def resident_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_bundle_does_not_copy_the_notebooks_memory() -> None:
    x, a = torch.ones(16 << 18), np.ones(16 << 17)  # 16 MB each
    before = resident_kb()
    bundle = captured(x=x, a=a)
    chunks = [len(chunk) for chunk in bundle.chunks()]
    assert resident_kb() - before < 8_000
    assert sum(chunks) > 32 << 20
    assert max(chunks) <= 1 << 20
    assert bundle.digest == hashlib.sha256(bundle.data).hexdigest()


def test_large_pickles_are_kept_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_IN_MEMORY_BYTES", 1000)
    words = [f"word {n}" for n in range(1000)]
    bundle = captured(words=words)
    assert open_bundle(bundle.data).evaluate("words") == words


def test_corrupt_file_is_rejected_before_any_of_its_code_runs(tmp_path: Path) -> None:
    bundle = captured(x=torch.randn(1000))
    data = bytearray(bundle.data)
    data[-2000] ^= 1
    (tmp_path / "bundle").write_bytes(data)
    with pytest.raises(BundleError, match=r"bundle is corrupt: its SHA-256 is .* Submit the job"):
        open_bundle(tmp_path / "bundle", digest=bundle.digest)


def test_error_for_a_too_large_bundle_names_the_largest_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MAX_BYTES", 5 << 20)
    monkeypatch.setattr(capture, "LARGE_BYTES", 1 << 20)
    objects = {"big": torch.zeros(4 << 18), "less": np.zeros(2 << 17), "small": 1}
    with pytest.raises(BundleError) as refused:
        captured(**objects)
    assert str(refused.value) == (
        "this job uses at least 6 MB of notebook objects; at most 5 MB can be sent to the workers. "
        "The largest: 'big' 4 MB, 'less' 2 MB. Nothing was submitted. Instead of a large object, "
        "pass a function that builds or loads it there, for example data: {train: load_train_set}."
    )
    with pytest.raises(BundleError, match="The largest: 'text' 5 MB"):
        captured(text=["x" * (1 << 20) + str(n) for n in range(9)])


# --- any views of a few storages ---

index = st.one_of(
    st.builds(slice, st.integers(0, 7), st.integers(0, 8), st.integers(1, 3)), st.integers(0, 7)
)
views = st.lists(st.tuples(st.integers(0, 1), index, index, st.booleans()), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(views, st.sampled_from([torch.float32, torch.int64, torch.uint8]))
def test_random_views_keep_their_values_and_sharing(chosen: list[Any], dtype: torch.dtype) -> None:
    """A write through one view appears in the same other views as before."""
    bases = [
        torch.arange(64).reshape(8, 8).to(dtype),
        torch.arange(64, 128).reshape(8, 8).to(dtype),
    ]
    here = {}
    for number, (base, rows, columns, is_turned) in enumerate(chosen):
        view = bases[base][rows, columns]
        here[f"v{number}"] = view.t() if is_turned and view.dim() == 2 else view
    there = returned(**here)
    for name, view in here.items():
        assert torch.equal(view, there[name])
        assert view.shape == there[name].shape
    for number, name in enumerate(here):
        here[name].fill_(200 + number)
        there[name].fill_(200 + number)
        assert all(torch.equal(here[other], there[other]) for other in here)
