"""The ``config.json`` of a ``transformers`` model, which goes beside its weights.

The library need not be here: a model that has it brought it along.
"""

from __future__ import annotations

import json
from typing import Any


def config_of(model: Any) -> bytes | None:
    """Return what ``from_pretrained`` needs besides the weights; None for any other model.

    ``architectures`` is what ``save_pretrained`` would write: the class that has these weights.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string"):
        return None
    try:
        values = json.loads(config.to_json_string())
        values["architectures"] = [type(model).__name__]
        return json.dumps(values, indent=2, sort_keys=True).encode()
    except (TypeError, ValueError, AttributeError):
        return None  # a config that JSON cannot say; the weights are saved all the same
