// Check and convert snapshots. They are untrusted: every field is checked here, once, so that the
// drawing code can rely on its type. feed.py describes the messages.
import {
  IBestValue,
  IChartList,
  ICostSummary,
  IErrorSummary,
  IEventLine,
  IExhibitSeries,
  ILatestCheckpoint,
  ILatestEval,
  IMarker,
  ISnapshot,
  IStartupStage,
  ITimeSplit,
  IWorkerRow
} from './snapshot';
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
  textList,
  texts
} from './untrusted';

const MAX_METRICS = 8;
const MAX_STAGES = 10;
const MAX_EXHIBITS = 50;
const MAX_EXHIBIT_STEPS = 300;

/** Convert any value to a snapshot. Missing and invalid fields get defaults. */
export function asSnapshot(value: unknown): ISnapshot {
  const raw = object(value);
  const due = object(raw.checkpoint_due);
  const progress = finiteOrNull(raw.progress);
  return {
    job_id: jobId(raw.job_id),
    name: line(raw.name),
    status: line(raw.status) || 'unknown',
    reason: text(raw.reason),
    pool: text(raw.pool),
    submitted_at: finiteOrNull(raw.submitted_at),
    started_at: finiteOrNull(raw.started_at),
    updated_at: finite(raw.updated_at),
    ended_at: finiteOrNull(raw.ended_at),
    step: finite(raw.step),
    total_steps: finiteOrNull(raw.total_steps),
    epoch: finite(raw.epoch),
    epochs: finiteOrNull(raw.epochs),
    loss: numberOrNull(raw.loss),
    lr: numberOrNull(raw.lr),
    metrics: numbers(raw.metrics),
    eval: orNull(raw.eval, asEval),
    best: orNull(raw.best, asBest),
    global_batch_size: finiteOrNull(raw.global_batch_size),
    num_parameters: finiteOrNull(raw.num_parameters),
    num_trained_parameters: finiteOrNull(raw.num_trained_parameters),
    world_size: finite(raw.world_size),
    min_workers: finiteOrNull(raw.min_workers),
    max_workers: finiteOrNull(raw.max_workers),
    generation: finite(raw.generation),
    num_generations: finite(raw.num_generations),
    num_lost: finite(raw.num_lost),
    num_preempted: finite(raw.num_preempted),
    num_undone: finite(raw.num_undone),
    stall_s: finiteOrNull(raw.stall_s),
    checkpoint: orNull(raw.checkpoint, asCheckpoint),
    cost: orNull(raw.cost, asCost),
    error: orNull(raw.error, asError),
    charts: asCharts(object(raw.charts)),
    startup: list(raw.startup).slice(0, MAX_STAGES).map(asStage),
    exhibits: list(raw.exhibits).slice(0, MAX_EXHIBITS).map(asExhibitSeries),
    progress: progress === null ? null : Math.min(1, Math.max(0, progress)),
    eta_s: finiteOrNull(raw.eta_s),
    elapsed_s: finiteOrNull(raw.elapsed_s),
    samples_per_s: numberOrNull(raw.samples_per_s),
    checkpoint_due: {
      since: finiteOrNull(due.since),
      limit_s: finiteOrNull(due.limit_s),
      failed: text(due.failed)
    },
    controls: texts(raw.controls),
    workers: list(raw.workers).map(asWorker),
    num_more_workers: finite(raw.num_more_workers),
    events: list(raw.events).map(asEvent),
    markers: list(raw.markers).map(asMarker)
  };
}

function orNull<T>(value: unknown, convert: (raw: Raw) => T): T | null {
  return value ? convert(object(value)) : null;
}

const asEval = (raw: Raw): ILatestEval => ({
  step: finite(raw.step),
  epoch: finite(raw.epoch),
  samples: finite(raw.samples),
  loss: numberOrNull(raw.loss),
  metrics: numbers(raw.metrics)
});

const asBest = (raw: Raw): IBestValue => ({
  step: finite(raw.step),
  metric: line(raw.metric),
  value: numberOrNull(raw.value)
});

const asCheckpoint = (raw: Raw): ILatestCheckpoint => ({
  step: finite(raw.step),
  time: finite(raw.time),
  size_bytes: finite(raw.size_bytes),
  count: finite(raw.count)
});

const asCost = (raw: Raw): ICostSummary => ({
  spent_usd: finite(raw.spent_usd),
  saved_usd: finite(raw.saved_usd),
  wasted_usd: finite(raw.wasted_usd)
});

const asError = (raw: Raw): IErrorSummary => ({
  error: text(raw.error),
  traceback: text(raw.traceback),
  workers: textList(raw.workers),
  step: finite(raw.step)
});

const asCharts = (raw: Raw): IChartList => ({
  metrics: textList(raw.metrics).slice(0, MAX_METRICS),
  has_eval: raw.has_eval === true
});

const asStage = (raw: Raw): IStartupStage => ({
  name: line(raw.name),
  since: finiteOrNull(raw.since),
  took_s: finiteOrNull(raw.took_s)
});

const asExhibitSeries = (raw: Raw): IExhibitSeries => ({
  name: line(raw.name),
  steps: Array.isArray(raw.steps) ? raw.steps.slice(0, MAX_EXHIBIT_STEPS).map(finite) : []
});

const asWorker = (raw: Raw): IWorkerRow => ({
  worker: text(raw.worker),
  rank: finiteOrNull(raw.rank),
  state: text(raw.state),
  note: text(raw.note),
  device: text(raw.device),
  machine: text(raw.machine),
  zone: text(raw.zone),
  lifecycle: text(raw.lifecycle),
  usd_per_h: finiteOrNull(raw.usd_per_h),
  trainer_pid: finiteOrNull(raw.trainer_pid),
  steps: finite(raw.steps),
  split: orNull(raw.split, asSplit),
  waits_for: text(raw.waits_for)
});

const asSplit = (raw: Raw): ITimeSplit => ({
  step: finite(raw.step),
  num_steps: finite(raw.num_steps),
  samples_per_s: finite(raw.samples_per_s),
  shares: numbers(raw.shares)
});

const asEvent = (raw: Raw): IEventLine => ({
  id: finite(raw.id),
  seq: finite(raw.seq),
  time: finite(raw.time),
  kind: text(raw.kind),
  level: text(raw.level),
  text: text(raw.text)
});

const asMarker = (raw: Raw): IMarker => ({
  id: finite(raw.id),
  seq: finite(raw.seq),
  step: finite(raw.step),
  time: finite(raw.time),
  kind: text(raw.kind),
  text: text(raw.text)
});

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
