// What comes from the kernel or from a saved notebook. Both are treated as hostile: every field is checked and
// coerced here, once, so that the drawing code can trust it. See etrain_jupyter/dashboard/feed.py for the messages.
import { Curve } from './columns';
import { LISTS, patched } from './lists';

export interface IWorker {
  worker: string;
  rank: number | null;
  state: string;
  note: string;
  device: string;
  machine: string;
  zone: string;
  lifecycle: string;
  usd_per_h: number | null;
  trainer_pid: number | null;
  steps: number;
  waits_for: string;
  /** What its latest steps took; null until it has told. */
  split: {
    step: number;
    num_steps: number;
    samples_per_s: number | null;
    shares: Record<string, number>;
  } | null;
}
export interface IEventLine {
  seq: number;
  time: number;
  kind: string;
  level: string;
  text: string;
}
export interface IMarker {
  seq: number;
  step: number;
  time: number;
  kind: string;
  text: string;
}
export interface ISnapshot {
  job_id: string;
  name: string;
  status: string;
  reason: string;
  started_at: number | null;
  updated_at: number;
  step: number;
  total_steps: number | null;
  epoch: number;
  epochs: number | null;
  progress: number | null;
  eta_s: number | null;
  elapsed_s: number | null;
  loss: number | null;
  lr: number | null;
  metrics: Record<string, number>;
  eval: { step: number; loss: number | null; metrics: Record<string, number> } | null;
  samples_per_s: number | null;
  global_batch_size: number | null;
  world_size: number;
  min_workers: number | null;
  max_workers: number | null;
  generation: number;
  num_lost: number;
  num_preempted: number;
  checkpoint: { step: number; time: number; size_bytes: number } | null;
  /** Overdue `limit_s` seconds after `since`, if both are known; `failed` says what went wrong after the newest. */
  checkpoint_due: { since: number | null; limit_s: number | null; failed: string };
  /** What the machines cost, where their pool knows it. */
  cost: { spent_usd: number; saved_usd: number; wasted_usd: number } | null;
  /** Why each request cannot be made now; empty where it can. */
  controls: Record<string, string>;
  error: { error: string; traceback: string } | null;
  charts: { metrics: string[]; has_eval: boolean };
  workers: IWorker[];
  events: IEventLine[];
  markers: IMarker[];
}

export type Raw = Record<string, unknown>;
const MAX_ITEMS = 2000;
const MAX_TEXT = 20000;
/** Beyond any step, second or byte that there will be, and far from where arithmetic breaks. */
const MAX_NUMBER = 1e15;

export const object = (value: unknown): Raw =>
  value && typeof value === 'object' && !Array.isArray(value) ? (value as Raw) : {};
export const list = (value: unknown): Raw[] =>
  Array.isArray(value) ? value.slice(0, MAX_ITEMS).map(object) : [];
export const text = (value: unknown): string =>
  (typeof value === 'string' ? value : typeof value === 'number' ? String(value) : '').slice(
    0,
    MAX_TEXT
  );

/** What may be the id of a job: one word, in a cell and in a path. The same pattern as in untrusted.py. */
const JOB_ID = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/;
/** The id of a job; empty for anything else, which is never made a cell of or sent anywhere. */
export const jobId = (value: unknown): string =>
  typeof value === 'string' && JOB_ID.test(value) ? value : '';

const MAX_LINE = 200;
/** Control characters, and what ends a line or turns the direction of text around. */
const NOT_IN_A_LINE =
  // eslint-disable-next-line no-control-regex -- removing them is what it is for
  /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+/g;
/** A text of one line, for a title or a name. */
export const line = (value: unknown): string =>
  text(value).slice(0, MAX_LINE).replace(NOT_IN_A_LINE, ' ');

const texted = (value: unknown): string[] =>
  Array.isArray(value) ? value.slice(0, MAX_ITEMS).map(text) : [];

/** A number; null where there is none. The strings NaN and Infinity stand for what JSON lacks. */
function maybe(value: unknown): number | null {
  if (typeof value === 'number') {
    return value;
  }
  return value === 'NaN' || value === 'Infinity' || value === '-Infinity' ? Number(value) : null;
}
export const finiteOrNull = (value: unknown): number | null => {
  const n = maybe(value);
  return n !== null && Number.isFinite(n) ? Math.min(MAX_NUMBER, Math.max(-MAX_NUMBER, n)) : null;
};
/** A finite number, 0 if it is not. */
export const finite = (value: unknown): number => finiteOrNull(value) ?? 0;

function numbers(value: unknown): Record<string, number> {
  const out = Object.create(null) as Record<string, number>;
  for (const [key, item] of Object.entries(object(value)).slice(0, 50)) {
    const n = maybe(item);
    if (n !== null) {
      out[key] = n;
    }
  }
  return out;
}

function texts(value: unknown): Record<string, string> {
  return Object.fromEntries(
    Object.entries(object(value))
      .slice(0, 50)
      .map(([key, item]) => [key, text(item)])
  );
}

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
      samples_per_s: maybe(split.samples_per_s),
      shares: numbers(split.shares)
    }
  };
}

/** Make a whole snapshot of whatever came. */
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
    loss: maybe(raw.loss),
    lr: maybe(raw.lr),
    metrics: numbers(raw.metrics),
    eval: evaluated && {
      step: finite(evaluated.step),
      loss: maybe(evaluated.loss),
      metrics: numbers(evaluated.metrics)
    },
    samples_per_s: maybe(raw.samples_per_s),
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

/** When the newest event of a saved picture happened. */
export const savedAt = (saved: unknown): number =>
  finite(object(object(saved).snapshot).updated_at);

export type Buffer = ArrayBuffer | ArrayBufferView;

/** Copy a buffer's bytes: what arrives may be unaligned. */
function bytesOf(buffer: Buffer): ArrayBuffer {
  return buffer instanceof ArrayBuffer
    ? buffer
    : (buffer.buffer.slice(
        buffer.byteOffset,
        buffer.byteOffset + buffer.byteLength
      ) as ArrayBuffer);
}

const BYTES_A_ROW = 12;
const MEAN = 'mean.';
export type Taken = 'news' | 'detail' | 'gap' | 'nothing';

/** The curves of whose means a smoothed line is drawn; the same rule as `_is_noisy` in feed.py. */
const isNoisy = (name: string) =>
  name === 'loss' || name === 'samples_per_s' || name.startsWith('metrics.');

/** Curves by name. Where the kernel had no need to thin, the points serve as their own means. */
class Curves {
  private readonly byName = new Map<string, Curve>();

  get(name: string): Curve | undefined {
    return this.byName.get(name);
  }

  has(name: string): boolean {
    return this.byName.has(name);
  }

  append(name: string, x: ArrayLike<number>, y: ArrayLike<number>): void {
    let curve = this.byName.get(name);
    if (!curve) {
      curve = new Curve(name.startsWith(MEAN));
      this.byName.set(name, curve);
    }
    curve.append(x, y);
  }

  /** Take blocks of a message. */
  take(blocks: Raw[], buffers: readonly (Buffer | undefined)[]): void {
    const names = new Set(blocks.map(block => text(block.name)));
    blocks.forEach((block, i) => {
      const name = text(block.name);
      const rows = finite(block.rows);
      const buffer = buffers[i];
      if (buffer?.byteLength !== rows * BYTES_A_ROW) {
        return;
      }
      const bytes = bytesOf(buffer);
      this.add(
        name,
        new Float64Array(bytes, 0, rows),
        new Float32Array(bytes, rows * 8, rows),
        names
      );
    });
  }

  /** Take curves of a saved notebook; points that go backwards are left out. */
  load(series: Raw): void {
    const entries = Object.entries(series).slice(0, 50);
    const names = new Set(entries.map(([name]) => name));
    for (const [name, value] of entries) {
      const x = written(object(value).x).map(finite);
      const y = written(object(value).y);
      if (x.length === y.length) {
        const rising = rowsThatRise(x);
        this.add(
          name,
          rising.map(i => x[i]),
          rising.map(i => y[i]),
          names
        );
      }
    }
  }

  private add(name: string, x: ArrayLike<number>, y: ArrayLike<number>, names: Set<string>): void {
    this.append(name, x, y);
    if (isNoisy(name) && !names.has(MEAN + name)) {
      this.append(MEAN + name, x, y);
    }
  }
}

const MAX_SAVED = 20000;

/** Numbers of a saved curve: one text, since in a list JupyterLab gives each a line of its own. */
const written = (value: unknown): number[] =>
  typeof value === 'string' && value ? value.split(' ', MAX_SAVED).map(Number) : [];

function rowsThatRise(x: number[]): number[] {
  let highest = -Infinity;
  return x.flatMap((value, i) => {
    const isRising = value >= highest;
    highest = Math.max(highest, value);
    return isRising ? [i] : [];
  });
}

interface IDetail {
  first: number;
  last: number;
  curves: Curves;
}

/** All that one view knows of its job. */
export class JobData {
  snapshot = asSnapshot({});
  curves = new Curves();
  /** Whether every message since the last start has come. */
  isSynced = false;
  /** The curves of the steps that somebody zoomed to, as the kernel has them. */
  private detail: IDetail | null = null;
  private rawSnapshot: Raw = {};
  private seq = 0;

  constructor(readonly view: string) {}

  /** Start from what a notebook keeps. */
  load(saved: unknown): void {
    const raw = object(saved);
    this.rawSnapshot = object(raw.snapshot);
    this.snapshot = asSnapshot(this.rawSnapshot);
    this.begin();
    this.curves.load(object(raw.series));
    this.isSynced = false;
  }

  /** Take a message of the kernel's; `gap` means that some were missed and a hello is due. */
  take(content: unknown, buffers: readonly Buffer[]): Taken {
    const message = object(content);
    if (typeof message.seq !== 'number') {
      return 'nothing';
    }
    const isNext = message.seq === this.seq + 1;
    this.seq = message.seq;
    const isMine = !message.to || message.to === this.view;
    if (this.isSynced && !isNext && !(message.reset && isMine)) {
      this.isSynced = false;
      return 'gap';
    }
    if (message.kind === 'detail' && isMine && this.isSynced) {
      this.detail = {
        first: finite(message.first),
        last: finite(message.last),
        curves: new Curves()
      };
      this.detail.curves.take(list(message.blocks), buffers);
      return 'detail';
    }
    if (message.kind !== 'update' || !isMine || !(message.reset || this.isSynced)) {
      return 'nothing';
    }
    if (message.reset) {
      this.begin();
      this.rawSnapshot = {};
    }
    this.rawSnapshot = { ...this.rawSnapshot, ...object(message.snapshot) };
    for (const [name, key] of LISTS) {
      const { rows, gone, order } = object(object(message.lists)[name]);
      if (rows || gone || order) {
        const patch = { rows: list(rows), gone: texted(gone), order: texted(order) };
        this.rawSnapshot[name] = patched(list(this.rawSnapshot[name]), key, patch);
      }
    }
    this.snapshot = asSnapshot(this.rawSnapshot);
    this.curves.take(list(message.blocks), buffers);
    if (this.detail && this.detail.last >= this.snapshot.step) {
      this.detail.curves.take(list(message.blocks), buffers);
    }
    this.isSynced = true;
    return 'news';
  }

  /** Whether the kernel has told all that it knows between two steps. */
  hasDetail(first: number, last: number): boolean {
    return this.detailOf(first, last) !== null;
  }

  /** The curve that tells most between two steps. */
  curveIn(name: string, first: number, last: number): Curve | undefined {
    return (this.detailOf(first, last) ?? this.curves).get(name);
  }

  private detailOf(first: number, last: number): Curves | null {
    const { detail } = this;
    return detail && detail.first <= first && detail.last >= last ? detail.curves : null;
  }

  /** The curve of means of another one. */
  meansIn(name: string, first: number, last: number): Curve | undefined {
    return this.curveIn(MEAN + name, first, last);
  }

  private begin(): void {
    this.curves = new Curves();
    this.detail = null;
  }
}

/** What is wrong with the newest checkpoint at `now`, in seconds; the same rule as `trouble_of` in freshness.py. */
export function checkpointTrouble(s: ISnapshot, now: number): '' | 'failed' | 'overdue' {
  const { since, limit_s, failed } = s.checkpoint_due;
  if (failed) {
    return 'failed';
  }
  const isOverdue =
    s.status === 'running' && since !== null && limit_s !== null && now - since > limit_s;
  return isOverdue ? 'overdue' : '';
}
