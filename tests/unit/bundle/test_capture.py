"""Which objects are captured, which are refused, and the error messages."""

from __future__ import annotations

import functools
import io
import linecache
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.bundle import capture
from etrain_jupyter.bundle.capture import Bundle, capture_bundle
from etrain_jupyter.bundle.restore import open_bundle
from etrain_jupyter.errors import BundleError


class Notebook:
    """A kernel's names, and the cells that defined them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.cells: dict[str, int] = {}

    def run(self, text: str) -> None:
        number = len(self.cells) + 1
        filename = f"/tmp/ipykernel_1/{number}_{abs(hash(text))}.py"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        self.cells[filename] = number
        exec(compile(text, filename, "exec"), self.names)

    def capture(self, **references: str) -> Bundle:
        return capture_bundle(references, self.names, cell_numbers=self.cells)

    def refusal(self, **references: str) -> str:
        with pytest.raises(BundleError) as caught:
            self.capture(**references)
        return str(caught.value)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    for value in made.names.values():
        if isinstance(value, io.IOBase | socket.socket):
            value.close()
    for filename in made.cells:
        linecache.cache.pop(filename, None)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a notebook; its modules are unloaded after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("beside_"):
            del sys.modules[name]


def on_a_worker(code: str, folder: Path) -> str:
    """Run code in a process that sees neither the notebook nor its folder."""
    script = "import sys; from etrain_jupyter.bundle.restore import open_bundle\n" + code
    root = Path(capture.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", script, str(folder / "bundle")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPEN = "bundle = open_bundle(open(sys.argv[1], 'rb').read())\n"

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"v[a-z]{0,4}", fullmatch=True), plain, min_size=1))
def test_plain_values_round_trip(names: dict[str, Any]) -> None:
    bundle = capture_bundle({name: name for name in names}, names)
    opened = open_bundle(bundle.data)
    assert {name: opened.evaluate(name) for name in names} == names
    assert set(bundle.sizes) == set(names)


def test_only_names_used_by_expressions_are_captured(notebook: Notebook) -> None:
    notebook.run("a, b, secret = 1, 2, 'x' * 1000")
    bundle = notebook.capture(model="a + len([b for _ in range(3)])")
    assert set(bundle.sizes) == {"a", "b"}
    assert b"xxxx" not in bundle.data


def test_text_of_unused_cells_is_not_captured(notebook: Notebook) -> None:
    notebook.run("token = 'my-secret'")
    notebook.run("def loss(o, t):\n    return o - t")
    bundle = notebook.capture(loss="loss")
    assert b"my-secret" not in bundle.data
    assert [cell.label for cell in open_bundle(bundle.data).cells.values()] == ["Cell In[2]"]


def test_sizes_count_shared_objects_once() -> None:
    shared = bytes(100_000)
    sizes = capture_bundle({"x": "(a, b)"}, {"a": [shared], "b": [shared]}).sizes
    assert sizes["a"] > 100_000
    assert sizes["b"] < 1000


def test_class_and_its_helpers_work_in_another_process(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import math\nSCALE = 3\ndef helper(x):\n    return math.floor(x) * SCALE")
    notebook.run(
        "class Base:\n    def value(self):\n        return helper(2.5)\n"
        "class Net(Base):\n    def value(self):\n        return super().value() + 1"
    )
    (tmp_path / "bundle").write_bytes(notebook.capture(model="Net().value()").data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('model'))", tmp_path) == "7"


def test_function_that_uses_stdout_works_in_another_process(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.run("import sys\ndef loss(o, t, out=sys.stdout):\n    print('here', file=out)")
    (tmp_path / "bundle").write_bytes(notebook.capture(loss="loss").data)
    assert on_a_worker(OPEN + "bundle.evaluate('loss')(1, 2)", tmp_path) == "here"


# ------------------------------------------------------------------- modules next to the notebook


def test_local_module_is_captured_as_it_is_in_memory(beside: Path) -> None:
    (beside / "beside_nets.py").write_text("SIZE = 1\ndef build():\n    return SIZE\n")
    module = __import__("beside_nets")
    module.SIZE = 5
    data = capture_bundle({"model": "beside_nets.build()"}, {"beside_nets": module}).data
    (beside / "bundle").write_bytes(data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('model'))", beside) == "5"


def test_function_of_a_local_module_is_captured(beside: Path) -> None:
    (beside / "beside_fn.py").write_text("K = 2\ndef loss(o):\n    return o * K\n")
    from beside_fn import loss  # type: ignore[import-not-found]

    (beside / "bundle").write_bytes(capture_bundle({"loss": "loss"}, {"loss": loss}).data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('loss')(4))", beside) == "8"
    assert capture_bundle({"loss": "loss"}, {"loss": loss}).data.count(b"beside_fn.py") > 0


def test_import_path_of_a_local_module_is_captured(beside: Path) -> None:
    (beside / "beside_path.py").write_text("def loss(o):\n    return o + 1\n")
    data = capture_bundle({"loss": "beside_path:loss"}, {}).data
    (beside / "bundle").write_bytes(data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('loss')(4))", beside) == "5"


def test_import_path_that_fails_is_rejected_at_capture(beside: Path) -> None:
    (beside / "beside_broken.py").write_text("raise RuntimeError('half written')\n")
    with pytest.raises(BundleError, match="RuntimeError: half written"):
        capture_bundle({"loss": "beside_broken:loss"}, {})


def test_modules_that_import_each_other_are_captured(beside: Path) -> None:
    (beside / "beside_a.py").write_text("import beside_b\ndef f():\n    return beside_b.g()\n")
    (beside / "beside_b.py").write_text("import beside_a\ndef g():\n    return beside_a.__name__\n")
    module = __import__("beside_a")
    data = capture_bundle({"loss": "beside_a.f()"}, {"beside_a": module}).data
    (beside / "bundle").write_bytes(data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('loss'))", beside) == "beside_a"


def test_local_package_is_captured(beside: Path) -> None:
    (beside / "beside_pkg").mkdir()
    (beside / "beside_pkg" / "__init__.py").write_text("from . import nets\n")
    (beside / "beside_pkg" / "nets.py").write_text("class Net:\n    size = 3\n")
    module = __import__("beside_pkg")
    data = capture_bundle({"model": "beside_pkg.nets.Net().size"}, {"beside_pkg": module}).data
    (beside / "bundle").write_bytes(data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('model'))", beside) == "3"


def test_later_import_finds_the_captured_module(beside: Path) -> None:
    (beside / "beside_lazy.py").write_text("V = 9\n")
    module = __import__("beside_lazy")
    names = {"beside_lazy": module}
    exec("def f():\n    import beside_lazy as m\n    return m.V", {"__name__": "__main__"}, names)
    data = capture_bundle({"loss": "f()", "data.train": "beside_lazy"}, names).data
    (beside / "bundle").write_bytes(data)
    assert on_a_worker(OPEN + "print(bundle.evaluate('loss'))", beside) == "9"


def test_cloudpickle_registrations_are_undone(beside: Path) -> None:
    (beside / "beside_reg.py").write_text("def f(): ...\n")
    module = __import__("beside_reg")
    before = cloudpickle.list_registry_pickle_by_value()
    capture_bundle({"loss": "beside_reg.f"}, {"beside_reg": module})
    with pytest.raises(BundleError):
        capture_bundle({"loss": "x"}, {"x": threading.Lock()})
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_installed_modules_are_captured_by_name(beside: Path) -> None:
    data = capture_bundle({"loss": "functools.partial"}, {"functools": functools}).data
    assert len(data) < 2000


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("cell", "what", "remedy"),
    [
        ("x = open('/dev/null')", "it is an open file ('/dev/null')", "in __getitem__"),
        ("x = open('/dev/null', 'wb')", "it is an open file", "in __getitem__"),
        ("x = open('/dev/null'); x.close()", "it is a closed file", "in __getitem__"),
        ("import socket; x = socket.socket()", "it is an open socket", "Connect"),
        ("import threading; x = threading.Lock()", "it is a lock", "a separate process"),
        ("import threading; x = threading.RLock()", "it is a lock", "a separate process"),
        ("x = (i for i in [1])", "it is a running generator", "in a list"),
        ("import sqlite3; x = sqlite3.connect(':memory:')", "sqlite3.Connection", "on the worker"),
        ("import threading; x = {'a': [threading.Lock()]}", "'x['a'][0]' is a lock", ""),
        ("import threading; x = threading.Event()", "'x._cond._lock' is a lock", ""),
        (
            "import functools, threading; x = functools.partial(print, threading.Lock())",
            "'x.args[0]' is a lock",
            "",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_error_names_the_refused_object(
    notebook: Notebook, cell: str, what: str, remedy: str
) -> None:
    notebook.run("y = 1")
    notebook.run(cell)
    text = notebook.refusal(model="x")
    assert text.startswith("'x' (defined in Cell In[2]) cannot be sent to the workers: ")
    assert what in text
    assert "Nothing was submitted." in text
    assert remedy in text
    if "connect" in cell:
        notebook.names["x"].close()


def test_error_names_the_global_of_a_method_and_its_cell(notebook: Notebook) -> None:
    notebook.run("log = open('/dev/null', 'w')")
    notebook.run(
        "class Base:\n    def __init__(self):\n        pass\n"
        "class Net(Base):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "    def forward(self, x):\n        print(x, file=log)\n        return super()"
    )
    assert notebook.refusal(model="Net()") == (
        "'Net' (defined in Cell In[2]) cannot be sent to the workers: 'log', which Net.forward "
        "uses, is an open file ('/dev/null'), defined in Cell In[1]. Nothing was submitted. Open "
        "it where it is used, for example in __getitem__, or in a function that builds the data "
        "set."
    )


def test_error_names_the_variable_that_a_function_encloses(notebook: Notebook) -> None:
    notebook.run(
        "import threading\ndef make():\n    guard = threading.Lock()\n"
        "    return lambda o, t: guard\nloss = make()"
    )
    assert "'guard', which it encloses, is a lock" in notebook.refusal(loss="loss")


def test_unpicklable_object_is_found_through_helpers(notebook: Notebook) -> None:
    notebook.run("rows = (i for i in range(3))")
    notebook.run("def helper():\n    return next(rows)")
    notebook.run("def loss(o, t):\n    return [helper() for _ in o]")
    text = notebook.refusal(loss="loss")
    assert "'rows', which helper uses, is a running generator, defined in Cell In[1]" in text


def test_search_ends_for_functions_that_call_each_other(notebook: Notebook) -> None:
    notebook.run("import threading\nlock = threading.Lock()")
    notebook.run("def a(n):\n    return b(n)\ndef b(n):\n    return a(n), lock")
    assert "'lock', which b uses, is a lock" in notebook.refusal(loss="a")


def test_error_names_the_attribute_of_an_instance(notebook: Notebook) -> None:
    notebook.run("class Data:\n    def __init__(self):\n        self.handle = open('/dev/null')")
    notebook.run("train_set = Data()")
    text = notebook.refusal(model="train_set")
    assert text.startswith("'train_set' (defined in Cell In[2])")
    assert "'train_set.handle' is an open file" in text
    notebook.names["train_set"].handle.close()


def test_search_includes_the_class_of_an_instance(notebook: Notebook) -> None:
    notebook.run("import threading\nlock = threading.Lock()")
    notebook.run("class Data:\n    def __len__(self):\n        return bool(lock)\ndata = Data()")
    text = notebook.refusal(model="data")
    assert "'lock', which data.__class__.__len__ uses, is a lock" in text


def test_error_contains_the_exception_of_pickling(notebook: Notebook) -> None:
    notebook.run("class X:\n    def __reduce__(self):\n        raise ValueError('no way')\nx = X()")
    text = notebook.refusal(model="x")
    assert "it is of type X, which cannot be pickled (ValueError: no way)" in text


def test_shell_is_refused_before_its_history_is_pickled(notebook: Notebook) -> None:
    class InteractiveShell:
        def __init__(self) -> None:
            self.user_ns = {"lock": threading.Lock()}

        def get_ipython(self) -> Any: ...

    notebook.names["get_ipython"] = InteractiveShell().get_ipython
    notebook.run("def loss(o, t):\n    return get_ipython()")
    text = notebook.refusal(loss="loss")
    assert "'get_ipython.__self__', which it uses, is the notebook's IPython shell" in text


def test_caller_can_name_the_defining_cell() -> None:
    with pytest.raises(BundleError, match=r"'x' \(defined in Cell In\[9\]\)"):
        capture_bundle({"m": "x"}, {"x": threading.Lock()}, where=lambda name: "Cell In[9]")


def test_text_streams_in_memory_are_captured() -> None:
    opened = open_bundle(capture_bundle({"m": "x"}, {"x": io.StringIO("abc")}).data)
    assert opened.evaluate("m").read() == "abc"


def test_tensor_on_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tensor:
        device = "cuda:1"
        shape = (3, 4)

    fake = types.ModuleType("torch")
    fake.Tensor = Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(BundleError) as caught:
        capture_bundle({"m": "net"}, {"net": {"weight": Tensor()}})
    text = str(caught.value)
    assert "'net['weight']' is a tensor of shape (3, 4) on cuda:1 of this machine" in text
    assert ".cpu()" in text


def test_capture_imports_neither_torch_nor_ipython() -> None:
    code = (
        "import sys\nfrom etrain_jupyter.bundle.capture import capture_bundle\n"
        "capture_bundle({'m': 'x'}, {'x': 1})\n"
        "print([m for m in ('torch', 'IPython', 'distributed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_large_object_causes_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LARGE_BYTES", 3_000_000)
    bundle = capture_bundle({"d": "(big, small)"}, {"big": bytes(5 << 20), "small": bytes(10)})
    assert bundle.warnings == (
        "'big' (5 MB) will be copied to every worker. To avoid the copy, pass a function that "
        "builds or loads it there.",
    )
