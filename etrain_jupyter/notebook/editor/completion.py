"""Complete the text at the cursor, on an ``%etrain`` line or in a cell."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from etrain_jupyter.config.describe import describe
from etrain_jupyter.config.keys import (
    METRICS,
    OPTIMIZER,
    KeyPath,
    accepts,
    extra_group,
    group_at,
    is_reference,
    keys_at,
    units_of,
    words_of,
)
from etrain_jupyter.config.schema import MetricConfig, Section
from etrain_jupyter.config.vocabulary import NAMED_LR
from etrain_jupyter.config.yaml_nodes import visible_names
from etrain_jupyter.notebook.editor.lines import complete_line, find_magic
from etrain_jupyter.notebook.editor.offers import Completion, Facts, Offers, matching
from etrain_jupyter.notebook.editor.outline import CursorContext, Outline, read_outline

_NAME = re.compile(r"(?:[^\W\d]\w*)?")
_ATTRIBUTE = re.compile(r"([^\W\d][\w.]*)\.\w*")
_IMPORTED = re.compile(r"([^\W\d][\w.]*):(\w*)")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([ \t]*)([A-Za-z]*)")
_LAST_NAME = re.compile(r"(?<![\w.])(?:[^\W\d]\w*)?$")
_DATA = (("data", "train"), ("data", "eval"))
_ROUTINES = (FunctionType, BuiltinFunctionType, MethodType)
_SCALARS = (str, bytes, int, float, complex)
_NUM_ARGUMENTS = {"loss": 2, "metrics": 2, "step": 2, "weight": 1, "optimizer": 1, "data": 1}
"""Number of arguments passed to the function of a key; ``data`` stands for ``data.collate``."""
_PREDICT = ("eval", "predict")


def complete(text: str, cursor: int, facts: Facts) -> Offers | None:
    """Return the completions at an offset; None if the text is not an etrain line or cell.

    Completion runs no user code. A cell with errors still gets the completions that are possible.
    """
    cursor = min(max(cursor, 0), len(text))
    magic = find_magic(text, cursor)
    if magic is None:
        return None
    if not magic.is_in_body(cursor):
        return complete_line(magic, cursor, facts)
    start = magic.body_start
    outline = read_outline(text[start:], cursor - start)
    context = outline.context
    # Before or inside an existing word, an insertion would leave the rest of the word behind.
    if context is None or context.rest.strip() or context.is_whole:
        return Offers(cursor)
    own = tuple(magic.line.split()[:1])  # the command's name, also the key of its own group
    if extra_group(context.path) and context.path[:1] != own:
        return Offers(cursor)
    if context.is_key:
        items = _keys(context, outline, facts)
        if extra_group(own) and not context.path and own[0] not in outline.given(()):
            items += matching([own[0] + ("" if context.has_colon else ": ")], context.word, "key")
        return Offers(start + context.start, tuple(items))
    offers = _values(context, outline, facts)
    # `epochs:|` is not a key until a space follows the colon, so insert the space with the
    # completion.
    space = " " if context.lacks_space else ""
    found = tuple(Completion(f"{space}{offer.text}", offer.kind) for offer in offers.items)
    return Offers(start + context.start + offers.start, found)


# --- keys -----------------------------------------------------------------------------------------


def _keys(context: CursorContext, outline: Outline, facts: Facts) -> list[Completion]:
    if context.path == METRICS:
        return _metric_keys(context, outline, facts)
    end = "" if context.has_colon else ": "
    return matching(
        (f"{key}{end}" for key in _free_keys(context.path, outline)), context.word, "key"
    )


def _free_keys(group: KeyPath, outline: Outline) -> list[str]:
    top = {
        path[0]: outline.given(path) if group_at(path) is not None else text
        for path, text in outline.values.items()
        if len(path) == 1
    }
    return keys_at(group, outline.given(group), top=top)


def _metric_keys(context: CursorContext, outline: Outline, facts: Facts) -> list[Completion]:
    # Any metric name is allowed, so offer each of the notebook's functions under its own name.
    given = outline.given(METRICS)
    found = []
    for offer in names_for((*METRICS, "any"), facts.names):
        # A completion ends with "(" or "." if the name alone is not a value.
        name = offer.text.rstrip("(.")
        if offer.kind in ("function", "instance") and name not in given:
            found.append(name if context.has_colon else f"{name}: {name}")
    return matching(found, context.word, "key")


# --- values ---------------------------------------------------------------------------------------


def _values(context: CursorContext, outline: Outline, facts: Facts) -> Offers:
    # `start` of the result is an offset in the value's text:
    #
    #   path                       completions
    #   any, after !py             Python
    #   unknown to the schema      none
    #   an interval, "30 |"        units
    #   any other                  words of the schema, pools, metrics
    #   a reference, "Net|"        fitting names of the notebook too
    #   a reference, "nn.Li|"      attributes and keywords
    word, path = context.word, context.path
    if context.is_computed:
        return _with_space(facts.complete_python(word), word, outline)
    if word.startswith("!"):
        return Offers(0, tuple(matching(["!py "], word, "value")))
    # The optimizer's name determines which options are valid keys.
    optimizer = outline.values.get((*OPTIMIZER, "name"), "").strip("'\"") or "AdamW"
    if not is_reference(path) and describe(path, optimizer=optimizer) is None:
        return Offers(0)
    # After a number only a unit is possible, such as "30 min".
    units = _units(path, word)
    if units is not None:
        return units
    offers = Offers(0, tuple(_literals(context, outline, facts)))
    if not is_reference(path):
        return offers
    found = _python(path, word, facts)
    if not _NAME.fullmatch(word):
        found = _with_space(found, word, outline)  # a name of the space alone is not a reference
    # Inside an expression (start > 0), literal values of the key are not possible.
    if found.start == 0:
        return Offers(0, (*offers.items, *found.items))
    return found


def _literals(context: CursorContext, outline: Outline, facts: Facts) -> Iterator[Completion]:
    word, path = context.word, context.path
    if path == ("pool",):
        known = [pool for pool in facts.pools() if accepts(path, pool)]
        yield from matching(known, word, "pool")
    elif path[-1] == "metric" and issubclass(group_at(path[:-1]) or Section, MetricConfig):
        yield from matching(["loss", *outline.given(METRICS)], word, "value")
    else:
        names = NAMED_LR if path == OPTIMIZER else ()
        yield from matching([*words_of(path), *names], word, "value")
    # Where a group is expected, an empty value may also be the start of a group in braces.
    extra = extra_group(path)
    if not word and extra and path[:-1] == extra.names:
        yield from (Completion(form, "value") for form in extra.forms)
    elif not word and group_at(path) is not None:
        yield from (Completion(f"{{{key}: ", "key") for key in _free_keys(path, outline))
    if not word and path == METRICS:
        found = _metric_keys(context, outline, facts)
        yield from (Completion(f"{{{offer.text}", offer.kind) for offer in found)


def _units(path: KeyPath, word: str) -> Offers | None:
    # Returns None if the text is not a number or the key has no units.
    match = _NUMBER.fullmatch(word)
    if match is None:
        return None
    number, space, begun = match.groups()
    units = units_of(path, number)
    if not units:
        return None
    # Write a space between number and unit, as a job's output does.
    lead = "" if space else " "
    start = match.start(3) if space else len(number)
    items = [Completion(f"{lead}{unit}", "unit") for unit in units if unit.startswith(begun)]
    return Offers(start, tuple(items))


# --- Python ---------------------------------------------------------------------------------------


def _python(path: KeyPath, word: str, facts: Facts) -> Offers:
    """Return the completions of a Python expression; a plain name must fit the key."""
    if _NAME.fullmatch(word):
        # Names are matched case-sensitively here, as in Python; words of the schema are not.
        fitting = names_for(path, facts.names)
        return Offers(0, tuple(offer for offer in fitting if offer.text.startswith(word)))
    # "package.module:attribute" is not Python, so IPython cannot complete it.
    imported = _IMPORTED.fullmatch(word)
    if imported is not None:
        return _of_module(path, *imported.groups(), start=imported.start(2))
    offers = facts.complete_python(word)
    attribute = _ATTRIBUTE.fullmatch(word)
    owner = _module(attribute[1], facts) if attribute is not None else None
    if owner is None:
        return offers
    return Offers(offers.start, tuple(fitting_attributes(path, owner, offers.items)))


def _with_space(offers: Offers, word: str, outline: Outline) -> Offers:
    """Add the names that a group of the cell defines for every expression of the cell."""
    begun = _LAST_NAME.search(word)
    if begun is None:  # an attribute
        return offers
    groups = [group for key in outline.given(()) if (group := extra_group((key,)))]
    names = [n for group in groups for n in outline.given(group.names) if n.startswith(begun[0])]
    known = {offer.text for offer in offers.items}
    items = [Completion(name, "name") for name in names if name not in known]
    if not items:
        return offers
    same = offers.items if offers.start == begun.start() else ()
    return Offers(begun.start(), (*items, *same))


def _module(dotted: str, facts: Facts) -> ModuleType | None:
    # Look in dictionaries only, because getattr may run a module's __getattr__ and so import.
    first, *rest = dotted.split(".")
    found = facts.names.get(first)
    for name in rest:
        found = vars(found).get(name) if is_module(found) else None
    return found if is_module(found) else None


def _of_module(path: KeyPath, name: str, begun: str, *, start: int) -> Offers:
    # Do this only if the module is loaded, since an import may run user code.
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return Offers(start)
    names = [n for n in vars(module) if not n.startswith("_") and n.startswith(begun)]
    offers = [Completion(n, kind_of(vars(module)[n])) for n in names]
    fitting = fitting_attributes(path, module, offers)
    return Offers(start, tuple(o for o in fitting if o.kind != "module"))


# --- names that fit a key ---
#
# The checks before a submit (``config.references``) are stricter, but may run user code, such as a
# data set's ``__len__``. These functions inspect types and signatures only. They do not use
# ``isinstance``, which reads the object's ``__class__`` and could cause a lazy proxy to load its
# object.


def names_for(path: KeyPath, names: Mapping[str, Any]) -> list[Completion]:
    """Return the notebook's names that fit a key, most likely first.

    A name that must be called with arguments ends with ``(``, a module with ``.``.
    """
    ranked = []
    for name in visible_names(names):
        offer = _offer(path, name, names[name])
        if offer is not None:
            ranked.append((_rank(path, names[name]), offer))
    # Among equally likely names, the most recently defined one comes first.
    return [offer for _, offer in sorted(reversed(ranked), key=lambda pair: pair[0])]


def is_module(value: Any) -> bool:
    """Return True if an object is a module."""
    return issubclass(type(value), ModuleType)


def fits(path: KeyPath, value: Any) -> bool:
    """Return True if an object can be a key's value, judged by its type and signature."""
    kind = type(value)
    # These types fit no key, although a str has a length and items, as a data set does.
    if value is None or issubclass(kind, (*_SCALARS, ModuleType)):
        return False
    if path == ("model",):
        return _is_model(kind) or issubclass(kind, (type, *_ROUTINES))
    if path in _DATA:
        return _is_data(value)
    # Check the methods of a class, because its instance will be the data set.
    if issubclass(kind, type):
        return True
    num_arguments = 2 if path == _PREDICT else _NUM_ARGUMENTS.get(path[0], 1)
    return callable(value) and _takes(value, num_arguments)


def _is_data(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, type):
        return _looks_like_data(value)
    if issubclass(kind, list | tuple | dict):
        # len() of a built-in container runs no user code; a subclass may define its own.
        return len(value) > 0 if kind.__module__ == "builtins" else True
    return issubclass(kind, _ROUTINES) or _looks_like_data(kind)


def _is_model(kind: type) -> bool:
    return hasattr(kind, "state_dict") and hasattr(kind, "forward")


def _looks_like_data(kind: type) -> bool:
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not _is_model(kind)


def _offer(path: KeyPath, name: str, value: Any) -> Completion | None:
    if is_module(value):
        return Completion(f"{name}.", "module")
    if not fits(path, value):
        return None
    return Completion(f"{name}(" if _must_be_called(path, value) else name, kind_of(value))


def kind_of(value: Any) -> str:
    """Return the kind of an object for IPython's completions."""
    if is_module(value):
        return "module"
    if issubclass(type(value), type):
        return "class"
    return "function" if callable(value) else "instance"


def _must_be_called(path: KeyPath, value: Any) -> bool:
    """Return True if the plain name would be rejected because the object needs arguments."""
    is_built = path == ("model",) or path in _DATA
    kind = type(value)
    if not (issubclass(kind, type) or (is_built and issubclass(kind, FunctionType))):
        return False
    # For these keys, the trainer calls a class itself and passes the arguments.
    if path in (("optimizer",), ("data", "collate")):
        return False
    return not _takes(value, 0)


def _takes(function: Any, count: int) -> bool:
    """Return True if a function accepts ``count`` positional arguments, or if that is unknown."""
    kind = type(function)
    is_plain = issubclass(kind, (type, *_ROUTINES))
    try:
        # For an object with __call__, read the class, because reading the object's attributes may
        # run user code.
        signature = inspect.signature(function if is_plain else kind.__call__)
        signature.bind(*[None] * (count if is_plain else count + 1))
    except TypeError:
        return False
    except Exception:  # __signature__ may be any user object.
        return True
    return True


def _rank(path: KeyPath, value: Any) -> int:
    # 0: likely, for example an instance of nn.Module for `model`. 1: possible. 2: a module, whose
    # attributes may fit.
    if is_module(value):
        return 2
    kind = value if issubclass(type(value), type) else type(value)
    if path == ("model",):
        return 0 if _is_model(kind) else 1
    if path in _DATA:
        is_plain = kind.__module__ == "builtins"
        return 0 if _looks_like_data(kind) and not is_plain else 1
    return 1 if kind is value else 0


def fitting_attributes(
    path: KeyPath, owner: ModuleType, offers: Sequence[Completion]
) -> list[Completion]:
    """Return the attributes of a module that fit a key, and its submodules."""
    known = vars(owner)
    found = []
    for offer in offers:
        value = known.get(offer.text.rpartition(".")[2], offer)
        if value is offer:  # a lazy attribute, which reading would import
            found.append(offer)
        elif is_module(value) or fits(path, value):
            end = "(" if _must_be_called(path, value) else ""
            found.append(Completion(f"{offer.text}{end}", kind_of(value)))
    return found
