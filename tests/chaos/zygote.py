"""The fork server with changed constants: ``python -m tests.chaos.zygote CHANGES CONTROL``.

CHANGES are the arguments of ``Zygote`` as JSON; CONTROL is the server's descriptor.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from etrain_jupyter.trainer.main import main


def change_constants(keep_records: int | None, collective_timeout_s: float | None) -> None:
    """Reach early what grows by design up to a bound, for the soak test.

    These are the records that a rank keeps, and threads that gloo frees only at its timeout (gloo
    does not report the failure of a send that its thread was about to start when the connection
    broke). All other tests keep the product's values.
    """
    from etrain_jupyter.trainer.control import reporter
    from etrain_jupyter.trainer.group import backends

    assert reporter.KEEP_RECORDS, backends.COLLECTIVE_TIMEOUT
    if keep_records is not None:
        reporter.KEEP_RECORDS = keep_records
    if collective_timeout_s is not None:
        backends.COLLECTIVE_TIMEOUT = timedelta(seconds=collective_timeout_s)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  (imported by the constructor of every optimizer)

    change_constants(**json.loads(sys.argv[1]))
    sys.argv[1] = "--serve"
    main()
