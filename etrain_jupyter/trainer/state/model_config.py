"""The ``config.json`` of a ``transformers`` model, which is stored next to the weights.

This module does not import ``transformers``, which may not be installed.
"""

from __future__ import annotations

import json
from typing import Any


def config_of(model: Any) -> bytes | None:
    """Return the config that ``from_pretrained`` needs; None for any other model.

    ``architectures`` names the class of the model, as ``save_pretrained`` would write it.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string"):
        return None
    try:
        values = json.loads(config.to_json_string())
        values["architectures"] = [type(model).__name__]
        return json.dumps(values, indent=2, sort_keys=True).encode()
    except (TypeError, ValueError, AttributeError):
        return None  # JSON cannot represent this config; the weights are saved without it
