"""Read a mapping from Python as a cell is read: ``"!py lr * 2"`` is an expression, as in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etrain_jupyter.config.source_map import Path, SourceMap, did_you_mean
from etrain_jupyter.config.yaml_nodes import PY_TAG, visible_names
from etrain_jupyter.errors import ConfigError


def read_mapping(
    mapping: Mapping[str, Any], *, namespace: Mapping[str, Any], only: str = ""
) -> tuple[dict[str, Any], SourceMap]:
    """Return the values of a mapping, with its expressions evaluated.

    Args:
        mapping: The keys of a cell; its values may be objects.
        namespace: The caller's names.
        only: The top-level key to read; empty for all. Other keys are neither read nor evaluated.

    Returns:
        The values, and a source map without positions that contains the expressions.

    Raises:
        ConfigError: If an expression is invalid or raises.

    >>> data, source = read_mapping({"optimizer": {"lr": "!py lr * 2"}}, namespace={"lr": 0.5})
    >>> data, source.expressions
    ({'optimizer': {'lr': 1.0}}, {('optimizer', 'lr'): 'lr * 2'})
    """
    expressions: dict[Path, str] = {}

    def read(value: Any, path: Path) -> Any:
        if path[:1] == ("data",) and len(path) > 1 and not isinstance(value, str):
            return value  # a data set, which may be a long list
        if type(value) is dict:
            return {key: read(inner, (*path, key)) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return [read(inner, (*path, number)) for number, inner in enumerate(value)]
        if isinstance(value, str) and value.startswith(f"{PY_TAG} "):
            text = value.removeprefix(PY_TAG).strip()
            expressions[path] = text
            return _evaluate(text, namespace, path)
        return value

    chosen = {key: value for key, value in mapping.items() if not only or key == only}
    data = read(chosen, ())
    return data, SourceMap(expressions=expressions)


def _evaluate(text: str, namespace: Mapping[str, Any], path: Path) -> Any:
    try:
        # A copy, so that an assignment expression does not change the caller's names.
        return eval(compile(text, "<!py>", "eval"), dict(namespace))
    except SyntaxError as exc:
        message = f"!py {text}: this is not a valid Python expression ({exc.msg})"
        raise ConfigError(message, path=path) from exc
    except NameError as exc:
        unknown = exc.name or str(exc)
        hint = did_you_mean(unknown, visible_names(namespace), count=3)
        message = f"!py {text}: '{unknown}' is not defined where the search is submitted"
        raise ConfigError(message, path=path, hint=hint) from exc
    except Exception as exc:  # the caller's code may raise any exception
        message = f"!py {text} raised {type(exc).__name__}: {exc}"
        raise ConfigError(message, path=path) from exc
