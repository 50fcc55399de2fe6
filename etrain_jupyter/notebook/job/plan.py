"""A validated job that is ready to submit, with its pool and its run store."""

from __future__ import annotations

from dataclasses import dataclass

from etrain_jupyter.bundle.capture import Bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.display.numbers import size
from etrain_jupyter.errors import ConfigError
from etrain_jupyter.notebook.job.run_store import ROOT_VARIABLE, RunStore
from etrain_jupyter.pools import Pool
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.processes import num_usable_cores


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A validated job that has not been submitted. ``str(plan)`` is the output of ``--dry-run``."""

    config: TrainConfig
    bundle: Bundle
    """The notebook objects that the job needs, captured by value."""
    pool: Pool
    """The pool named in the cell, resolved once but not started yet."""
    runs: RunStore
    """The run store, resolved once."""
    cell: str = ""
    """Text of the cell's body; empty for a job from Python."""
    warnings: tuple[str, ...] = ()
    """Warnings about the configuration, printed before the job starts."""
    model_size: str = ""
    """Parameters of the notebook's model as text; empty if the workers build the model."""

    def print_warnings(self) -> None:
        """Print the warnings about the configuration and the bundle."""
        for warning in (*self.warnings, *self.bundle.warnings):
            print(f"etrain: {warning}")

    def start_pool(self) -> SchedulerAddress:
        """Check that the job can be stored, then bring the pool up and return its address.

        Raises:
            RunStoreError: If the run store is not writable. Nothing was started.
            ConfigError: If the pool's scheduler cannot reach the run store. Nothing was started.
            PoolError: If the pool does not come up.
        """
        # Do both checks first, because starting a pool takes time and may cost money. A bucket is
        # reachable from everywhere; a folder only from machines that mount it.
        self.runs.check_writable()
        if self.pool.is_head_elsewhere and not self.runs.is_remote:
            raise ConfigError(
                f"the scheduler of pool {self.config.pool} runs on its own machine (head: "
                f"on-demand), which cannot reach {self.runs}. Nothing was started",
                hint=f"set {ROOT_VARIABLE}={self.pool.shared_place()} before the kernel starts, "
                "which stores jobs in the bucket, and restart the kernel",
            )
        return self.pool.up()

    def max_price(self, num_jobs: int = 1) -> str:
        """Return the maximum price of the job as text.

        Raises:
            PoolError: If the prices are not available.
        """
        return self.pool.price(num_jobs * self.config.max_workers())

    def __str__(self) -> str:
        config, sizes = self.config, self.bundle.sizes
        captured = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in sizes.items())
        total = size(sum(sizes.values()))
        length = f"{config.steps} steps" if config.steps else f"{config.epochs:g} epochs"
        each = config.batch.per_worker_batch_size
        batch = config.batch.size(1) if each is None else f"{each} per worker"
        lines = {
            "model": ", ".join(filter(None, (config.model, self.model_size))),
            "length": f"{length} of batch {batch}",
            "workers": _describe_workers(config),
            "captured": f"{total}: {captured}" if captured else "nothing",
            "price": self.max_price(),
        }
        table = [f"  {name:<10}{text}" for name, text in lines.items()]
        notes = [f"  note: {warning}" for warning in self.warnings]
        title = "The cell is a valid job. Nothing was submitted (--dry-run)."
        return "\n".join([title, *table, *notes])


def _describe_workers(config: TrainConfig) -> str:
    """Return the range of workers, with the reason if it ends below ``workers.max``."""
    most, wanted = config.max_workers(), config.workers.max or 0
    text = f"{config.workers.min} to {most} of pool {config.pool}"
    if most < wanted:
        share = "shards" if config.num_shards() else "samples"
        text += f" (not {wanted}: each needs one of the {most} {share} of a step)"
    if config.pool == "local" and most > (cores := num_usable_cores()):
        text += f", which share the {cores} cores of this machine"
    return text
