"""Check expressions over the notebook's names before a job is submitted.

The expressions are evaluated later, by the ranks. Before that, three properties can be checked
without running the user's code: the syntax, the names, and the type of the object that a plain name
refers to.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import inspect
import keyword
import re
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.source_map import (
    NOWHERE,
    Path,
    SourceMap,
    did_you_mean,
    with_article,
)
from etrain_jupyter.config.vocabulary import DEFAULT_LR
from etrain_jupyter.config.yaml_nodes import visible_names
from etrain_jupyter.errors import ConfigError, ShardError

_IMPORT_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_BUILTINS = frozenset(dir(builtins))


def import_path(expression: str) -> tuple[str, str] | None:
    """Return module and attribute of ``package.module:attribute``, or None if it is an expression.

    >>> import_path("nets.small:Net")
    ('nets.small', 'Net')
    """
    # "lambda:x" matches the pattern too, but is an expression.
    match = _IMPORT_PATH.fullmatch(expression.strip())
    if match is None or any(keyword.iskeyword(part) for part in match[1].split(".")):
        return None
    return match[1], match[2]


def free_names(expression: str) -> frozenset[str]:
    """Return the names that an expression uses but does not define, including builtins.

    Raises:
        SyntaxError: If the text is not an expression.

    >>> sorted(free_names("[f(x) for x in xs]"))
    ['f', 'xs']
    """
    if import_path(expression):
        return frozenset()
    text = expression.strip()
    # symtable also accepts statements that only look like an expression; ast.parse rejects them.
    ast.parse(text, mode="eval")
    return frozenset(_globals_of(symtable.symtable(text, "<reference>", "eval"), top=True))


def _globals_of(table: symtable.SymbolTable, *, top: bool) -> Iterator[str]:
    for symbol in table.get_symbols():
        # At the top level, a name assigned by := belongs to the expression. Within a lambda or
        # comprehension, symtable marks names from outside as global.
        taken = symbol.is_referenced() and not symbol.is_assigned() if top else symbol.is_global()
        if taken:
            yield symbol.get_name()
    assigned = {s.get_name() for s in table.get_symbols() if s.is_assigned()} if top else set()
    for child in table.get_children():
        yield from (name for name in _globals_of(child, top=False) if name not in assigned)


def key_path(key: str) -> Path:
    """Return the path of a key of ``TrainConfig.references()``; metric names may contain dots.

    >>> key_path("metrics.top.5")
    ('metrics', 'top.5')
    """
    return tuple(key.split(".", 1))


# ------------------------------------------------------------------------------------ before submit


def check_references(
    config: TrainConfig, namespace: Mapping[str, Any], *, source: SourceMap = NOWHERE
) -> None:
    """Reject expressions that would fail on a rank, without evaluating any of them.

    Args:
        config: The job.
        namespace: The notebook's names, extended by ``ParsedJob.namespace_extra``.
        source: ``ParsedJob.source``, so that errors point into the cell.

    Raises:
        ConfigError: The first error in the cell.
    """
    errors = []
    for key, expression in config.references().items():
        try:
            _Check(key, expression, namespace, source).run()
        except ConfigError as exc:
            errors.append(exc)
    if errors:
        # Checked in schema order, but reported in the order of the cell.
        raise min(errors, key=lambda e: (getattr(e, "line", 0), getattr(e, "column", 0)))


class _Check:
    def __init__(
        self, key: str, expression: str, namespace: Mapping[str, Any], source: SourceMap
    ) -> None:
        self.key, self.text, self.namespace = key, expression.strip(), namespace
        self._path, self._source = key_path(key), source
        if key == "optimizer" and ("optimizer", "reference") in source.values:
            self._path = ("optimizer", "reference")

    def run(self) -> None:
        #   package.module:attribute  -> the module exists; its attribute, if it is loaded
        #   anything else             -> syntax -> names -> attributes of modules
        #                                -> a plain name or attribute: its type and signature
        #                                -> a call: the signature of the function
        #                                -> any other expression: only the rank evaluates it
        imported = import_path(self.text)
        if imported:
            self._check_import(*imported)
            return
        tree = self._parsed()
        self._check_names(tree)
        self._check_attributes(tree)
        found, value = self._resolve(tree)
        if found:
            check_kind(self.key, self.text, value, self._fault)
        elif isinstance(tree, ast.Lambda):
            check_call(self.key, "this lambda", _without_body(tree), self._fault)
        elif isinstance(tree, ast.Call):
            self._check_call(tree)

    def _fault(self, message: str, hint: str = "", node: ast.expr | None = None) -> ConfigError:
        inside = None
        if node is not None and "\n" not in self.text:
            # ast counts columns in UTF-8 bytes, the cell in characters.
            offset = len(self.text.encode()[: node.col_offset].decode())
            inside = (offset, (node.end_col_offset or 0) - node.col_offset)
        return self._source.error(self._path, message, hint=hint, inside=inside)

    def _parsed(self) -> ast.expr:
        try:
            return ast.parse(self.text, mode="eval").body
        except SyntaxError as exc:
            is_on_line = exc.lineno == 1 and "\n" not in self.text
            inside = ((exc.offset or 1) - 1, 1) if is_on_line else None
            message = f"{self.key}: '{self.text}' is not a valid Python expression ({exc.msg})"
            hint = "write an expression over this notebook's names, or package.module:attribute"
            raise self._source.error(self._path, message, hint=hint, inside=inside) from exc
        except (ValueError, RecursionError, MemoryError) as exc:
            raise self._fault(f"{self.key}: this is not a valid Python expression ({exc})") from exc

    def _check_names(self, tree: ast.expr) -> None:
        missing = free_names(self.text) - _BUILTINS - set(self.namespace)
        if not missing:
            return
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in missing)
        node = min(nodes, key=lambda n: (n.lineno, n.col_offset))
        known = visible_names(self.namespace)
        # Suggest optimizers only if the name is the whole expression.
        if self.key == "optimizer" and node is tree:
            # The user may have meant a name from torch.optim, for example `optimizer: AdmW`.
            known = [*known, *DEFAULT_LR]
        hint = did_you_mean(node.id, known, count=3) or "run the cell that defines it first"
        raise self._fault(f"{self.key}: '{node.id}' is not defined in this notebook", hint, node)

    def _check_attributes(self, tree: ast.expr) -> None:
        # Check attributes of modules only: for other objects, attribute access may run the user's
        # code.
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            found, owner = self._resolve(node.value)
            if found and isinstance(owner, ModuleType) and not _has(owner, node.attr):
                submodule = f"{owner.__name__}.{node.attr}"
                if hasattr(owner, "__path__") and importlib.util.find_spec(submodule):
                    continue
                # At this point, the attribute is neither loaded nor a submodule that could be
                # imported.
                name = ast.unparse(node.value)
                known = [f"{name}.{other}" for other in dir(owner) if not other.startswith("_")]
                hint = did_you_mean(f"{name}.{node.attr}", known, count=3)
                raise self._fault(f"{self.key}: module '{name}' has no '{node.attr}'", hint, node)

    def _resolve(self, node: ast.expr) -> tuple[bool, Any]:
        # Find the object that a literal, a plain name or an attribute of a module refers to. The
        # first return value distinguishes the object None from no object.
        if isinstance(node, ast.Constant):
            return True, node.value
        if isinstance(node, ast.Name):
            if node.id in self.namespace:
                return True, self.namespace[node.id]
            return node.id in _BUILTINS, getattr(builtins, node.id, None)
        if isinstance(node, ast.Attribute):
            found, owner = self._resolve(node.value)
            if found and isinstance(owner, ModuleType):
                with contextlib.suppress(
                    Exception
                ):  # A module's own __getattr__ may raise anything.
                    return True, getattr(owner, node.attr)
        return False, None

    def _check_call(self, tree: ast.Call) -> None:
        found, function = self._resolve(tree.func)
        if not found:
            return
        name = ast.unparse(tree.func)
        if not callable(function):
            raise self._fault(
                f"{self.key}: '{name}' is {_kind(function)} and cannot be called", node=tree.func
            )
        if self.key == "optimizer" and getattr(function, "__name__", "") in DEFAULT_LR:
            hint = (
                f"write optimizer: {{name: {function.__name__}, lr: 1e-3}}, or a function "
                "(parameters) that returns one"
            )
            raise self._fault(f"optimizer: {self.text} is called before the parameters exist", hint)
        # With *args or **kwargs the number of arguments is known only when the rank evaluates the
        # call.
        starred = any(isinstance(a, ast.Starred) for a in tree.args) or any(
            k.arg is None for k in tree.keywords
        )
        if not starred:
            arguments = dict.fromkeys(str(k.arg) for k in tree.keywords)
            problem = _misfit(function, [None] * len(tree.args), arguments)
            if problem:
                raise self._fault(
                    f"{self.key}: {name}() {problem}", f"it takes {name}{_signature(function)}"
                )

    def _check_import(self, module: str, attribute: str) -> None:
        if module == "__main__":
            raise self._fault(
                f"{self.key}: '{self.text}' is defined in this notebook",
                f"write {self.key}: {attribute}",
            )
        try:
            # A loaded module needs no search, and may have no file.
            spec = sys.modules.get(module) or importlib.util.find_spec(module)
        except Exception as exc:  # find_spec imports parent packages, which may raise anything.
            raise self._no_module(module, exc) from exc
        if spec is None:
            raise self._no_module(module, None)
        loaded = sys.modules.get(module)
        first = attribute.split(".")[0]
        if loaded is not None and not _has(loaded, first):
            hint = did_you_mean(first, [n for n in dir(loaded) if not n.startswith("_")], count=3)
            raise self._fault(f"{self.key}: module '{module}' has no '{first}'", hint)

    def _no_module(self, module: str, exc: Exception | None) -> ConfigError:
        is_known = exc is None or isinstance(exc, ModuleNotFoundError)
        why = "" if is_known else f" ({type(exc).__name__}: {exc})"
        return self._fault(
            f"{self.key}: module '{module}' was not found{why}",
            "install it, or put its file next to the notebook",
        )


def check_kind(key: str, text: str, value: Any, fault: Any) -> None:
    """Raise an error if the object that a plain name refers to is unsuitable for ``key``.

    ``key`` is one of ``TrainConfig.references()``. ``fault`` builds the error.
    """
    if value is None:
        raise fault(
            f"{key}: the value of '{text}' is None",
            "run the cell that builds it, or name a class or a function",
        )
    if isinstance(value, str | bytes | int | float | complex | ModuleType):
        raise fault(f"{key}: '{text}' is {_kind(value)}", _wanted(key))
    if key == "model":
        is_module = hasattr(value, "state_dict") and hasattr(value, "forward")
        if not is_module and not callable(value):
            raise fault(f"model: '{text}' is {_kind(value)}, not an nn.Module", _WANTED["model"])
    elif key in ("data.train", "data.eval"):
        _check_data(key, text, value, fault)
    elif key == "optimizer" and hasattr(value, "param_groups"):
        hint = (
            f"write optimizer: {{name: {type(value).__name__}, lr: ...}}, or a function "
            "(parameters) that returns one"
        )
        raise fault(
            f"optimizer: '{text}' is {_kind(value)}, whose parameters are not those of a worker",
            hint,
        )
    elif not callable(value):
        raise fault(f"{key}: '{text}' is {_kind(value)} and cannot be called", _wanted(key))
    else:
        check_call(key, f"'{text}'", value, fault)
    # The rank calls a class without arguments, except for these two keys.
    called = isinstance(value, type) and key not in ("optimizer", "data.collate")
    if called or (key in ("model", "data.train", "data.eval") and inspect.isfunction(value)):
        problem = _misfit(value, [], {})
        if problem:
            raise fault(
                f"{key}: {text}() {problem}",
                f"write {key}: {text}(...) with its arguments: {_signature(value)}",
            )


_WANTED = {
    "model": "name an nn.Module, its class, or a function that builds it",
    "data": "name a data set with len and [i], a data frame, a pair of tensors, or a function that "
    "builds it",
    "data.collate": "name a function (samples) that makes a batch from a list of samples",
    "loss": "name a function (output, target) such as F.cross_entropy",
    "step": "name a function (model, batch) that returns the loss; the job itself calls backward "
    "and updates the weights",
    "weight": "name a function (batch) that returns a number",
    "eval": "name a function: predict(model, batch) returns records, score(records) numbers",
    "metrics": "name a function (output, target) of one batch; to compute a metric over all of "
    "data.eval, use eval: {predict: predict, score: score}",
    "optimizer": "name one of torch.optim, or a function (parameters), (named_parameters) or "
    "(model) that returns an optimizer",
}
_ARGUMENTS = {
    "data.collate": "samples", "loss": "output, target", "metrics": "output, target",
    "step": "model, batch", "weight": "batch", "eval.predict": "model, batch",
    "eval.score": "records", "optimizer": "parameters",
}  # fmt: skip
"""Positional arguments with which the job calls the notebook's functions."""


def _wanted(key: str) -> str:
    return _WANTED.get(key) or _WANTED[key.split(".")[0]]


def check_call(key: str, name: str, value: Any, fault: Callable[[str, str], Exception]) -> None:
    """Raise an error if the job cannot call an object with the arguments of its ``key``.

    A key that is not called and an object without a known signature always pass.
    """
    wanted = _ARGUMENTS.get("metrics" if key.startswith("metrics.") else key)
    # For a class such as nn.CrossEntropyLoss, the job calls an instance.
    if wanted is None or (isinstance(value, type) and key not in ("optimizer", "data.collate")):
        return
    if not isinstance(value, type) and hasattr(value, "state_dict"):
        value = getattr(value, "forward", value)  # __call__ of nn.Module takes any arguments
    if _misfit(value, [None] * len(wanted.split(", ")), {}):
        message = f"{key}: the job calls {name} with ({wanted}), but it takes {_signature(value)}"
        raise fault(message, _wanted(key))


def _without_body(tree: ast.Lambda) -> Any:
    """Return a function with the parameters of a lambda; no code of the notebook runs."""
    nothing = ast.Constant(None)
    defaults = {
        "defaults": [nothing for _ in tree.args.defaults],
        "kw_defaults": [default and nothing for default in tree.args.kw_defaults],
    }
    args = ast.arguments(**{**dict(ast.iter_fields(tree.args)), **defaults})
    bare = ast.fix_missing_locations(ast.Expression(ast.Lambda(args=args, body=nothing)))
    return eval(compile(bare, "<lambda>", "eval"), {})


STREAM_HINT = (
    "A stream has no index, so no sample could be trained exactly once, and no job could resume. "
    "Write it once with write_shards(dataset, to=...) from etrain_jupyter.data, and train on "
    "Shards(...)"
)


def is_stream(value: Any) -> bool:
    """Return True for an ``IterableDataset`` of torch or Hugging Face, and for an iterator."""
    # By name: neither library is imported here.
    names = {kind.__name__ for kind in type(value).__mro__}
    return "IterableDataset" in names or (hasattr(value, "__next__") and hasattr(value, "__iter__"))


def splits_of(value: Any) -> list[str]:
    """Return the names of the splits of a Hugging Face ``DatasetDict``; empty for other objects."""
    names = {kind.__name__ for kind in type(value).__mro__}
    return [str(split) for split in value] if "DatasetDict" in names else []


def _check_data(key: str, text: str, value: Any, fault: Any) -> None:
    if splits := splits_of(value):
        raise fault(
            f"{key}: '{text}' is {_kind(value)} with the splits {', '.join(splits)}",
            f"name one of them, in quotes: \"{text}['{splits[0]}']\"",
        )
    if is_stream(value):
        raise fault(
            f"{key}: '{text}' is {_kind(value)}: a stream, which has no index. No sample of it "
            "could be trained exactly once, and no job could resume",
            f"write it once: write_shards({text}, to='corpus') from etrain_jupyter.data; then "
            f"{key.removeprefix('data.')}: Shards('corpus')",
        )
    # A class or function builds the data set on the worker, so there is nothing to inspect yet.
    if isinstance(value, type) or (callable(value) and not hasattr(value, "__len__")):
        return
    if hasattr(value, "__iter__") and hasattr(value, "batch_sampler") and hasattr(value, "dataset"):
        hint = f"pass its data set, {key}: {text}.dataset; the workers make the batches"
        raise fault(f"{key}: '{text}' is {_kind(value)}", hint)
    lengths = {}
    for name, part in _parts(text, value).items():
        try:
            lengths[name] = len(part)
        except (TypeError, NotImplementedError) as exc:
            raise fault(
                f"{key}: '{name}' is {_kind(part)} without a length", _WANTED["data"]
            ) from exc
        except ShardError as exc:
            raise fault(f"{key}: {exc} Nothing was submitted.", "") from exc
        if lengths[name] == 0:
            raise fault(f"{key} is empty: len({name}) is 0", "run the cell that fills it")
        if not hasattr(part, "__getitem__"):
            raise fault(f"{key}: '{name}' is {_kind(part)} and cannot be indexed", _WANTED["data"])
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"len({name}) is {length}" for name, length in lengths.items())
        raise fault(
            f"{key}: its parts differ in length: {shown}",
            "each sample needs one entry of each part",
        )


def _parts(text: str, value: Any) -> dict[str, Any]:
    """Split a pair or a dict of arrays into the arrays; return any other value as a single part."""
    pairs: Any = value.items() if isinstance(value, Mapping) else ()
    pairs = enumerate(value) if isinstance(value, tuple) else pairs
    parts = {f"{text}[{name!r}]": part for name, part in pairs}
    are_arrays = all(getattr(part, "shape", ()) != () for part in parts.values())
    return parts if parts and are_arrays else {text: value}


def _has(owner: ModuleType, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except Exception:  # A module's own __getattr__ may raise anything, which the rank reports.
        return True


def _kind(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"the module '{value.__name__}'"
    name = type(value).__name__
    names = {"str": "a text", "int": "a number", "float": "a number", "NoneType": "None"}
    return names.get(name) or with_article(name)


def _misfit(function: Any, args: list[None], kwargs: dict[str, None]) -> str:
    """Return Python's error message for a call with the wrong arguments; empty if they fit."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        return str(exc)
    return ""


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return text if len(text) <= 80 else "(...)"
