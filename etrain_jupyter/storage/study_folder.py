"""Folder of a study in the run store: its record, and Optuna's storage.

::

    etrain-runs/
    ├── digits-1a2b3c4d/         the study
    │   ├── study.json           what was submitted, signed like a job.json
    │   ├── bundle               the notebook's objects, shared by all trials
    │   └── optuna.journal       trials and evaluations; opens in optuna-dashboard
    └── digits-1a2b3c4d-000/     a trial: an ordinary job
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etrain_jupyter.errors import EtrainError

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.json"
JOURNAL_FILE = "optuna.journal"

STATUS = "status"
"""Attribute of the Optuna study: ``running``, ``finished``, ``stopped`` or ``failed``."""
REASON = "reason"
"""Attribute of a study or a trial: why it ended, as text; empty if that needs no explanation."""
ENDED_AT = "ended_at"
"""Attribute of the study: when it last ended, in seconds since the epoch."""
RUNGS = "rungs"
"""Attribute of the study: sample counts of the rungs, once the first trial has reported them."""
NUM_SAMPLES = "num_samples"
"""Attribute of the study: samples of a whole trial."""
NUM_TRIALS = "num_trials"
"""Attribute of the study: trials to run in total; a resume may raise it."""
JOB = "job"
"""Attribute of a trial: id of its job."""
SAMPLES = "samples"
"""Attribute of an ended trial: samples that it was trained on."""


def import_optuna() -> Any:
    """Return the package optuna.

    Raises:
        EtrainError: If it is not installed.
    """
    try:
        import optuna
    except ImportError as exc:
        raise EtrainError(
            "a search needs the package optuna, which is not installed here. Nothing was started. "
            "Run: pip install 'etrain-jupyter[search]'"
        ) from exc
    # Otherwise it prints a line for each trial.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(folder: Path) -> optuna.storages.BaseStorage:
    """Open Optuna's storage of a study; the journal is created if it does not exist."""
    optuna = import_optuna()
    from optuna.storages.journal import JournalFileBackend

    return optuna.storages.JournalStorage(  # type: ignore[no-any-return]
        JournalFileBackend(str(folder / JOURNAL_FILE))
    )
