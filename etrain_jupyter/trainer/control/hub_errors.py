"""Recognize errors of a worker that cannot reach the Hugging Face hub."""

from __future__ import annotations

from etrain_jupyter.trainer.control.error_chain import chain_of

_UNREACHABLE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
"""Errors of huggingface_hub if neither the hub nor its cache has a file."""

HINT_FOR_HUB = (
    "This worker has no access to the hub, and the files are not in its cache. Call "
    "from_pretrained(...).save_pretrained('FOLDER') on a machine with access, copy the folder to "
    "the same path on every worker, and give this path in place of the name. If the workers can "
    "reach a mirror, set HF_ENDPOINT in their environment"
)
"""Remedy for a hub that cannot be reached."""


def is_hub_unreachable(exc: BaseException) -> bool:
    """Return True if the hub could not be reached; False, for example, for a misspelled name."""
    # By name: importing the library would take seconds, and the job may not use it.
    return any(
        type(link).__name__ in _UNREACHABLE
        and type(link).__module__.partition(".")[0] == "huggingface_hub"
        for link in chain_of(exc)
    )
