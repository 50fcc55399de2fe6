"""Warm-up of a rank: trial passes that are undone before the rank reports that it is ready.

A forward and backward pass reveals errors and the effects of a pass. With ``compile: true``, the
model is compiled; with ``batch.micro: auto``, the micro-batch size is determined. No other rank
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.compiled import (
    compile_in_place,
    freeze_compiled,
    heartbeats,
    mark_batch,
    reason_of,
    undo_compile,
)
from etrain_jupyter.trainer.control.error_origin import device_error_in
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Indices, SampleSource, Share
from etrain_jupyter.trainer.micro_batch import (
    MicroBatch,
    Reserve,
    does_not_fit,
    free_memory,
    in_gib,
    is_out_of_memory,
    largest_fit,
    memory_of,
)
from etrain_jupyter.trainer.objective.measures import Pass
from etrain_jupyter.trainer.objective.one_pass import eval_mode
from etrain_jupyter.trainer.prefetch import to_device
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.scoring.records import pack_records
from etrain_jupyter.trainer.seeds import seeded
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import WorkPlan
from etrain_jupyter.trainer.trial_checks import (
    MAX_CUT,
    Cut,
    carried_buffers,
    check_trained,
    dependence_on_cut,
    forward_only,
    half_precision_weights,
    parameters_left_out,
    parameters_outside,
)
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import TextLogged, WarmUpBegun


class PassEffects(NamedTuple):
    """Effects of a pass on the model."""

    moving: RunningBuffers
    """The running buffers, that is, the buffers that a pass changes."""
    has_unused: bool
    """True if some parameters have no gradient after a pass."""


class WarmUp:
    """The warm-up of one workload.

    Args:
        micro: The micro-batch size; determined here for ``auto``.
        order: Samples for the trials, in the order in which to use them.
        is_first: True for the job's first trainer, which also logs the warnings.
    """

    def __init__(
        self,
        workload: Workload,
        config: TrainConfig,
        plan: WorkPlan,
        *,
        micro: MicroBatch,
        order: Indices,
        send: Send,
        beat: Callable[[], None],
        is_first: bool = False,
    ) -> None:
        self._workload = workload
        self._config = config
        self._plan = plan
        self._micro = micro
        self._order = order
        self._send = send
        self._beat = beat
        self._buffers = RunningBuffers.of(workload.model)
        self._before = self._buffers.copy()
        self._is_first = is_first
        self._is_tried = False

    def run(self) -> PassEffects:
        """Run all trials, and return the effects of a pass.

        Raises:
            WorkloadError: If the notebook's objects do not fit together, or into memory.
            Exception: Any error that the notebook's code raises on its own data.
        """
        # The trials draw random numbers, which must not affect training.
        with seeded(self._config.seed):
            count = self._first_pass()
            parameters = [p for p in self._workload.model.parameters() if p.requires_grad]
            has_unused = any(p.grad is None for p in parameters)
            workload = self._workload
            check_trained(workload.model, workload.optimizer, source=workload.loss_source)
            self._check_gradients()
            moving = self._buffers.moved_since(self._before)
            self._undo()
            if self._is_first:
                self._warn(carried_buffers(self._workload.model, moving))
                self._warn(self._dependence_on_cut(count))
            # Compile before the search, because compiled passes need a different amount of memory.
            if self._config.compile:
                self._compile(count)
            if self._micro.is_auto:
                self._find_micro_batch()
            self._try_predict()
        return PassEffects(moving, has_unused)

    # --- passes ---

    def _first_pass(self) -> int:
        # Returns the number of samples.
        if self._micro.is_auto:
            # The size is determined later, after the model is compiled.
            few = min(2, self._micro.most)
            if not (count := largest_fit(self._fits, few)):
                raise does_not_fit(self._describe())
            return count
        size = self._plan.global_batch_size
        first = self._plan.span(0, size).samples
        # At least two samples if possible, because BatchNorm rejects a single sample.
        count = min(self._micro.size or size, self._plan.num_train, max(2, first))
        self._pass(self._order[:count])
        return count

    def _pass(self, indices: Indices, *, marks: bool = False) -> None:
        # Keeps the gradients, which ``run`` checks after the first pass.
        count = len(indices)
        batch = self._fetch(self._workload.train, indices, marks=marks)
        workload = self._workload
        with workload.precision.explained():
            if self._is_tried:
                passed = workload.forward(workload.module, batch, count, count)
            else:
                passed = self._try(batch, count)
            passed.loss.backward()  # type: ignore[no-untyped-call]
        self._beat()

    def _try(self, batch: Any, count: int) -> Pass:
        # This is the very first forward pass.
        workload = self._workload
        with forward_only(workload.model, workload.loss_source):
            passed = workload.forward(workload.module, batch, count, count)
        self._is_tried = True
        for metric in workload.whole_set.values():
            metric.try_on(passed.output, passed.target, workload.device)
        if self._is_first:
            functions, source = workload.objective.functions, workload.loss_source
            self._warn(half_precision_weights(workload.model))
            self._warn(parameters_left_out(workload.model, workload.optimizer))
            self._warn(parameters_outside(passed.loss, workload.model, functions, source=source))
        return passed

    def _dependence_on_cut(self, count: int) -> str:
        workload, half = self._workload, min(count, MAX_CUT) // 2
        if not half:
            return ""
        order, size = self._order[: 2 * half], 2 * half

        def measure(seed: int) -> Cut:
            batches = [
                self._fetch(workload.train, part, seed=seed)
                for part in (order, order[:half], order[half:])
            ]
            weight = workload.weight.of(batches[0], size) / size if workload.weight else 1.0
            losses = []
            for batch, count in zip(batches, (size, half, half), strict=True):
                with seeded(seed):
                    passed = workload.forward(
                        workload.module, batch, count, size, is_measured=False
                    )
                losses.append(float(passed.loss) / weight)
                self._undo()
                self._beat()
            return Cut(losses[0], losses[1] + losses[2])

        try:
            with eval_mode(workload.model), torch.no_grad():
                return dependence_on_cut(measure, source=workload.loss_source, size=size)
        except Exception as exc:
            # Some models compute no loss in evaluation mode; the job may never need it.
            if device_error_in(exc) is not None:
                raise
            return ""
        finally:
            self._undo()

    def _fetch(
        self, source: SampleSource, indices: Indices, *, marks: bool = False, seed: int = 0
    ) -> Any:
        [(_, batch)] = source.batches([Share(indices, seed, job_seed=seed)])
        batch = to_device(batch, self._workload.device)
        if marks:
            mark_batch(batch, len(indices))
        return batch

    def _fits(self, count: int) -> bool:
        self._undo()
        try:
            self._pass(self._order[:count])
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
        else:
            return True
        # This is not done in the except clause, where the exception keeps the frames alive, and
        # with them the tensors.
        self._undo()
        free_memory()
        return False

    def _undo(self) -> None:
        self._buffers.put_back(self._before)
        self._workload.optimizer.zero_grad(set_to_none=True)
        self._workload.model.zero_grad(set_to_none=True)

    def _try_predict(self) -> None:
        # Otherwise, an error in ``eval.predict`` would appear only after the first epoch.
        workload = self._workload
        if workload.predict is None or workload.eval is None:
            return
        samples = range(min(2, self._plan.num_eval))
        with eval_mode(workload.model), torch.no_grad():
            [(_, batch)] = workload.eval.batches([Share(samples)])
            pack_records(workload.predict_batch(batch), samples)
        self._undo()
        self._beat()

    def _check_gradients(self) -> None:
        if self._config.reproducible is None and self._workload.shards is None:
            return
        for name, parameter in self._workload.model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                why, key = "has no reproducible sum", "reproducible: false"
                if self._config.reproducible is None:
                    why, key = "cannot be divided among the workers", "shard: none"
                raise WorkloadError(
                    f"parameter {name!r} has a sparse gradient, which {why}. Build its layer with "
                    f"sparse=False, or write {key}."
                )

    # --- batch.micro: auto ---

    def _find_micro_batch(self) -> None:
        # Runs trial passes while blocks of memory are reserved for everything else that training
        # needs.
        device = self._workload.device
        share = 1.0
        if self._workload.shards is not None:
            share = min(1.0, 2 / self._config.workers.min)  # two shards
        reserve = Reserve(self._workload.optimizer, device, state_share=share)
        peak = 0

        def fits(count: int) -> bool:
            nonlocal peak
            self._beat()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            is_fitting = self._fits_next_to(reserve, count)
            if is_fitting and device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device)
            return is_fitting

        num_tries = self._micro.find(fits, self._describe)
        self._undo()
        free_memory()
        used = f"{in_gib(peak)} used at the peak, " if peak else ""
        self._log(
            "info",
            f"batch.micro: auto: {self._micro.size} of {self._micro.most} samples in one pass "
            f"on {device}, after {num_tries} {'try' if num_tries == 1 else 'tries'} ({used}"
            f"{in_gib(reserve.num_bytes)} of it reserved for training; {self._describe()})",
        )

    def _fits_next_to(self, reserve: Reserve, count: int) -> bool:
        try:
            with reserve.held():
                return self._fits(count)
        except Exception as exc:  # the reserve itself does not fit
            if not is_out_of_memory(exc):
                raise
        free_memory()
        return False

    def _describe(self) -> str:
        return f"{self._workload.device}: {memory_of(self._workload.device)}"

    # --- compile: true ---

    def _compile(self, count: int) -> None:
        # A compiler error must not fail the job, so the model runs in eager mode instead.
        model = self._workload.model
        self._send(WarmUpBegun(phase="compile"))
        started = time.monotonic()
        try:
            with heartbeats(self._beat):
                compile_in_place(model)
                self._call_all(count)
        except Exception as exc:
            reason = reason_of(exc)
        else:
            freeze_compiled()
            took_s = time.monotonic() - started
            self._log("info", f"compile: true: the model was compiled in {took_s:.1f} s")
            return
        finally:
            self._undo()
        undo_compile(model)
        free_memory()
        self._log("warning", f"compile: true: the model trains in eager mode, because {reason}")

    def _call_all(self, count: int) -> None:
        # Calls the model in each mode with batches of two sizes: dimensions that differ become
        # dynamic. The second batch has other samples, which may be longer or shorter.
        for indices in _two_batches(self._order, count):
            self._pass(indices, marks=True)
            self._undo()
        if self._workload.eval is None or not self._config.eval.loss:
            return
        with eval_mode(self._workload.model), torch.no_grad():
            for indices in _two_batches(range(self._plan.num_eval), count):
                batch = self._fetch(self._workload.eval, indices, marks=True)
                size = len(indices)
                self._workload.forward(self._workload.module, batch, size, size)
                self._beat()

    def _warn(self, text: str) -> None:
        if text:
            self._log("warning", text)

    def _log(self, level: str, text: str) -> None:
        self._send(TextLogged(level=level, text=text))


def _two_batches(order: Indices, count: int) -> list[Indices]:
    """Return two batches, of the first and of the last samples, whose sizes differ by one.

    A batch of one sample is compiled separately, so it is used only if no other batch is available.

    >>> _two_batches(range(9), 4), _two_batches(range(9), 2), _two_batches(range(1), 4)
    ([range(0, 4), range(6, 9)], [range(0, 2), range(6, 9)], [range(0, 1)])
    """
    count = min(count, len(order))
    other = count - 1 if count > 2 else count + 1
    batches = [order[:count]]
    if other <= len(order):
        batches.append(order[len(order) - other :])
    return batches
