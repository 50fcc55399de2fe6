// Check and convert snapshots. They are untrusted: every field is checked here, once, so that the
// drawing code can rely on its type. feed.py describes the messages.
import { ISnapshot, IWorker } from './snapshot';
import {
  finite,
  finiteOrNull,
  jobId,
  line,
  list,
  numberOrNull,
  numbers,
  object,
  Raw,
  text,
  texts
} from './untrusted';

function asWorker(w: Raw): IWorker {
  const split = w.split ? object(w.split) : null;
  return {
    worker: text(w.worker),
    rank: finiteOrNull(w.rank),
    state: text(w.state),
    note: text(w.note),
    device: text(w.device),
    machine: text(w.machine),
    zone: text(w.zone),
    lifecycle: text(w.lifecycle),
    usd_per_h: finiteOrNull(w.usd_per_h),
    trainer_pid: finiteOrNull(w.trainer_pid),
    steps: finite(w.steps),
    waits_for: text(w.waits_for),
    split: split && {
      step: finite(split.step),
      num_steps: finite(split.num_steps),
      samples_per_s: numberOrNull(split.samples_per_s),
      shares: numbers(split.shares)
    }
  };
}

/** Convert any value to a snapshot. Missing and invalid fields get defaults. */
export function asSnapshot(value: unknown): ISnapshot {
  const raw = object(value);
  const charts = object(raw.charts);
  const evaluated = raw.eval ? object(raw.eval) : null;
  const checkpoint = raw.checkpoint ? object(raw.checkpoint) : null;
  const due = object(raw.checkpoint_due);
  const cost = raw.cost ? object(raw.cost) : null;
  const error = raw.error ? object(raw.error) : null;
  const progress = finiteOrNull(raw.progress);
  return {
    job_id: jobId(raw.job_id),
    name: line(raw.name),
    status: line(raw.status) || 'unknown',
    reason: text(raw.reason),
    started_at: finiteOrNull(raw.started_at),
    updated_at: finite(raw.updated_at),
    step: finite(raw.step),
    total_steps: finiteOrNull(raw.total_steps),
    epoch: finite(raw.epoch),
    epochs: finiteOrNull(raw.epochs),
    progress: progress === null ? null : Math.min(1, Math.max(0, progress)),
    eta_s: finiteOrNull(raw.eta_s),
    elapsed_s: finiteOrNull(raw.elapsed_s),
    loss: numberOrNull(raw.loss),
    lr: numberOrNull(raw.lr),
    metrics: numbers(raw.metrics),
    eval: evaluated && {
      step: finite(evaluated.step),
      loss: numberOrNull(evaluated.loss),
      metrics: numbers(evaluated.metrics)
    },
    samples_per_s: numberOrNull(raw.samples_per_s),
    global_batch_size: finiteOrNull(raw.global_batch_size),
    world_size: finite(raw.world_size),
    min_workers: finiteOrNull(raw.min_workers),
    max_workers: finiteOrNull(raw.max_workers),
    generation: finite(raw.generation),
    num_lost: finite(raw.num_lost),
    num_preempted: finite(raw.num_preempted),
    checkpoint: checkpoint && {
      step: finite(checkpoint.step),
      time: finite(checkpoint.time),
      size_bytes: finite(checkpoint.size_bytes)
    },
    checkpoint_due: {
      since: finiteOrNull(due.since),
      limit_s: finiteOrNull(due.limit_s),
      failed: text(due.failed)
    },
    cost: cost && {
      spent_usd: finite(cost.spent_usd),
      saved_usd: finite(cost.saved_usd),
      wasted_usd: finite(cost.wasted_usd)
    },
    controls: texts(raw.controls),
    error: error && { error: text(error.error), traceback: text(error.traceback) },
    charts: {
      metrics: (Array.isArray(charts.metrics) ? charts.metrics : []).slice(0, 8).map(text),
      has_eval: charts.has_eval === true
    },
    workers: list(raw.workers).map(asWorker),
    events: list(raw.events).map(e => ({
      seq: finite(e.seq),
      time: finite(e.time),
      kind: text(e.kind),
      level: text(e.level),
      text: text(e.text)
    })),
    markers: list(raw.markers).map(m => ({
      seq: finite(m.seq),
      step: finite(m.step),
      time: finite(m.time),
      kind: text(m.kind),
      text: text(m.text)
    }))
  };
}

/** Return the time of the newest event of a saved job. */
export const savedAt = (saved: unknown): number =>
  finite(object(object(saved).snapshot).updated_at);

/**
 * Return the problem with the newest checkpoint at `now`, in seconds. The same rule as `trouble_of`
 * in freshness.py.
 */
export function checkpointTrouble(s: ISnapshot, now: number): '' | 'failed' | 'overdue' {
  const { since, limit_s, failed } = s.checkpoint_due;
  if (failed) {
    return 'failed';
  }
  const isOverdue =
    s.status === 'running' && since !== null && limit_s !== null && now - since > limit_s;
  return isOverdue ? 'overdue' : '';
}
