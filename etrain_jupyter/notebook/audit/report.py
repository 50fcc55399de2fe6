"""The audit's report, for users to read and for tests to assert on."""

from __future__ import annotations

from dataclasses import dataclass, field

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.display.tables import align_columns, html_list, html_of, html_table
from etrain_jupyter.untrusted import plain_text

_MOST_ROWS = 12
_MOST_PROBLEMS = 20
_CUT_SHORT = {
    "stopped": "one cut short: the job was stopped",
    "failed": "one cut short: the job failed",
    "finished": "one cut short: the job ended early",
}
_COLUMNS = ("epoch", "samples", "once", "repeated", "missing")


@dataclass(frozen=True, kw_only=True)
class EpochCoverage:
    """Sample counts of the committed steps in one epoch."""

    epoch: int
    samples: int
    """Samples trained on; a repeated sample counts each time."""
    seen_once: int
    """Samples trained on exactly once."""
    repeated: int
    """Samples trained on more than once."""
    missing: int
    """Samples that were due but not trained on; samples of future steps are not due."""
    is_complete: bool
    """True if the whole epoch was due; False for an epoch in progress or cut short."""

    @property
    def is_exact(self) -> bool:
        """True if each due sample was trained on once, and no other sample was trained on."""
        return self.repeated == 0 and self.missing == 0


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The result of ``audit_log``; ``print`` it, or assert ``ok``."""

    problems: tuple[str, ...] = ()
    """The problems, one sentence each; empty if the audit passed."""
    epochs: tuple[EpochCoverage, ...] = ()
    """One row per epoch that was started."""
    status: str = ""
    """The job's last status; empty if the log has none."""
    steps_committed: int = 0
    """Steps that led to the newest weights."""
    steps_undone: int = 0
    """Steps undone because a worker was lost; they were repeated with the same samples."""
    steps_rolled_back: int = 0
    """Committed steps that were repeated from a checkpoint because no worker survived."""
    steps_compared: int = 0
    """Committed steps with several ranks whose fingerprints (of part of the weights) are equal."""
    steps_alone: int = 0
    """Committed steps with a single rank, so there was no other rank to compare with."""
    digests_compared: int = 0
    """Weight digests that were compared with another rank's digest at the same step."""
    last_step: int = 0
    """The last of the steps that led to the newest weights; 0 before the first step."""
    saved_step: int = 0
    """Step of the newest checkpoint; 0 if there is none."""
    digest_step: int = 0
    """Step of ``newest_digest``; 0 if there is none."""
    newest_digest: str = ""
    """The newest SHA-256 of the weights and its step; equal for equal ``reproducible`` jobs."""
    num_evals: int = 0
    """Number of evaluations."""
    num_kinds: dict[str, int] = field(default_factory=dict)
    """Number of events by kind."""

    @property
    def ok(self) -> bool:
        """True if the audit found no problem."""
        return not self.problems

    @property
    def steps_executed(self) -> int:
        """All steps executed, including those undone or repeated."""
        return self.steps_committed + self.steps_undone + self.steps_rolled_back

    @property
    def verdict(self) -> str:
        """The first line of the report."""
        if self.problems:
            return f"audit FAILED: {counted(len(self.problems), 'problem')}"
        if not self.epochs:
            return "audit ok: nothing has been trained yet"
        # Only the last epoch, or an epoch in which a resume changed the rules, may be incomplete.
        num_complete = sum(epoch.is_complete for epoch in self.epochs)
        parts = [f"{counted(num_complete, 'epoch')} complete"] if num_complete else []
        cut_short = _CUT_SHORT.get(self.status, "one in progress")
        if self.status == "finished" and "EarlyStopped" not in self.num_kinds:
            cut_short = "the last one in part, as configured"
        parts += [cut_short] if num_complete < len(self.epochs) else []
        return f"audit ok: every sample exactly once ({', '.join(parts)})"

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  ! {problem}" for problem in self._listed_problems())]
        if self.epochs:
            table = [_COLUMNS, *map(_cells, self._listed_epochs())]
            shown = align_columns(table, num_left=0, min_width=8)
            lines += [f"  {line}" for line in shown.splitlines()] + self._left_out()
        lines += [f"  {name:<8}  {text}" for name, text in self._facts()]
        return plain_text("\n".join(lines))

    def _repr_html_(self) -> str:
        colour = "#1a7f37" if self.ok else "#cf222e"
        rows = [*map(_cells, self._listed_epochs())]
        facts = "<br>".join(f"{name}: {html_of(text)}" for name, text in self._facts())
        return (
            f'<div><b style="color:{colour}">{html_of(self.verdict)}</b>'
            + html_list(self._listed_problems())
            + (html_table(_COLUMNS, rows) if rows else "")
            + "".join(f"<div>{html_of(line.strip())}</div>" for line in self._left_out())
            + f"<small>{facts}</small></div>"
        )

    def _facts(self) -> list[tuple[str, str]]:
        wasted = f"{self.steps_undone} undone"
        if self.steps_rolled_back:
            wasted += f", {self.steps_rolled_back} trained again from a checkpoint"
        lost, left = self.num_kinds.get("WorkerLost", 0), self.num_kinds.get("WorkerLeft", 0)
        formed = self.num_kinds.get("GenerationFormed", 0)
        digest = self.newest_digest
        if digest and self.digest_step != self.last_step:
            digest += f"; the last step, {self.last_step}, has none"
        return [
            (
                "steps",
                f"{self.steps_executed} executed, {self.steps_committed} committed, {wasted}",
            ),
            ("workers", f"{lost} lost, {left} left, {counted(formed, 'generation')}"),
            ("weights", self._proof_of_weights()),
            *([("digest", digest)] if digest else []),
            *([("saved", f"the weights of step {self.saved_step}")] if self.saved_step else []),
            ("eval", f"{counted(self.num_evals, 'evaluation')}"),
        ]

    def _proof_of_weights(self) -> str:
        """Describe to what extent the log proves that all ranks had the same weights."""
        parts = []
        if self.steps_compared:
            steps = counted(self.steps_compared, "step")
            parts.append(f"fingerprints of all ranks equal at {steps}")
        if self.digests_compared:
            parts.append(f"{self.digests_compared} digests compared between ranks")
        if self.steps_alone:
            steps = counted(self.steps_alone, "step")
            parts.append(f"nothing to compare at {steps} of a single rank")
        return ", ".join(parts) or "nothing to compare"

    def _listed_problems(self) -> list[str]:
        more = len(self.problems) - _MOST_PROBLEMS
        listed = list(self.problems[:_MOST_PROBLEMS])
        return [*listed, f"... and {more} more in report.problems"] if more > 0 else listed

    def _listed_epochs(self) -> list[EpochCoverage]:
        """Return all rows or, if there are too many, the incorrect and the newest correct ones."""
        if len(self.epochs) <= _MOST_ROWS:
            return list(self.epochs)
        # Incorrect rows take precedence over correct ones.
        wrong = [row for row in self.epochs if not row.is_exact][:_MOST_ROWS]
        num_fine = _MOST_ROWS - len(wrong)
        newest = [row for row in self.epochs if row.is_exact][-num_fine:] if num_fine else []
        return sorted([*wrong, *newest], key=lambda row: row.epoch)

    def _left_out(self) -> list[str]:
        more = len(self.epochs) - len(self._listed_epochs())
        return [f"  ... and {counted(more, 'epoch')} more in report.epochs"] if more else []


def _cells(row: EpochCoverage) -> tuple[str, ...]:
    name = f"{row.epoch}" if row.is_complete else f"{row.epoch}*"  # * marks an incomplete epoch
    counts = (row.samples, row.seen_once, row.repeated, row.missing)
    return (name, *map(str, counts))
