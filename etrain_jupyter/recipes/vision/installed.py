"""Import torchvision, or name the release to install.

Other modules of this package import ``tv_tensors`` and ``v2`` from here. torchvision contains
compiled operators for one release and one build of torch. With any other torch, its import fails
with an error that names neither library.
"""

from __future__ import annotations

import importlib.metadata

import torch

from etrain_jupyter.errors import RecipeError

_MINOR_OFFSET = 15
"""torchvision 0.(N + 15) belongs to torch 2.N."""


def why_unusable(cause: BaseException) -> str:
    """Return the message for a failed import of torchvision.

    Args:
        cause: The error that the import raised.
    """
    major, minor, *_ = torch.__version__.split("+")[0].split(".")
    wanted = f"torchvision==0.{int(minor) + _MINOR_OFFSET}.*" if major == "2" else "torchvision"
    # torchvision must be built for this build of torch.
    build = torch.__version__.partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    command = f"pip install --force-reinstall --no-deps {wanted}{index}"
    try:
        found = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return (
            "the vision recipe needs torchvision, which is not installed. Install the release for "
            f"torch {torch.__version__}: {command}"
        )
    needed = [
        text.replace(" ", "").strip(";()")
        for text in importlib.metadata.requires("torchvision") or ()
        if text.startswith("torch") and not text.startswith("torchvision")
    ]
    made_for = f" (which requires {needed[0]})" if needed else ""
    return (
        f"torchvision {found}{made_for} cannot be imported next to torch {torch.__version__}: "
        f"{cause}. Both must be of matching releases and from the same package index. Install "
        f"this one: {command}"
    )


try:
    from torchvision import tv_tensors
    from torchvision.transforms import v2
except (AttributeError, ImportError, OSError, RuntimeError) as exc:
    raise RecipeError(why_unusable(exc)) from exc

__all__ = ["tv_tensors", "v2", "why_unusable"]
