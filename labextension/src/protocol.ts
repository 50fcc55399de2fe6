// What comes from the kernel or from a saved notebook. Both are treated as hostile: every field is checked and
// coerced here, once, so that the drawing code can trust it. See etrain_jupyter/dashboard/feed.py for the messages.
import { Curve } from './columns';

export interface IWorker {
  worker: string;
  rank: number | null;
  state: string;
  note: string;
  device: string;
  trainer_pid: number | null;
  steps: number;
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
  updated_at: number;
  step: number;
  total_steps: number | null;
  epoch: number;
  epochs: number | null;
  progress: number | null;
  eta_s: number | null;
  elapsed_s: number | null;
  loss: number | null;
  metrics: Record<string, number>;
  eval: { step: number; loss: number | null; metrics: Record<string, number> } | null;
  samples_per_s: number | null;
  global_batch_size: number | null;
  world_size: number;
  max_workers: number | null;
  generation: number;
  num_lost: number;
  num_preempted: number;
  checkpoint: { step: number; time: number; size_bytes: number } | null;
  error: { error: string; traceback: string } | null;
  charts: { metrics: string[]; has_eval: boolean };
  workers: IWorker[];
  events: IEventLine[];
  markers: IMarker[];
}

type Raw = Record<string, unknown>;
const MAX_ITEMS = 2000;
const MAX_TEXT = 20000;

const object = (value: unknown): Raw => (value && typeof value === 'object' && !Array.isArray(value) ? (value as Raw) : {});
const list = (value: unknown): Raw[] => (Array.isArray(value) ? value.slice(0, MAX_ITEMS).map(object) : []);
const text = (value: unknown): string =>
  (typeof value === 'string' ? value : typeof value === 'number' ? String(value) : '').slice(0, MAX_TEXT);

/** A number; null where there is none. The strings NaN and Infinity stand for what JSON lacks. */
function maybe(value: unknown): number | null {
  if (typeof value === 'number') {
    return value;
  }
  return value === 'NaN' || value === 'Infinity' || value === '-Infinity' ? Number(value) : null;
}
/** A finite number, `fallback` if it is not. */
function finite(value: unknown, fallback = 0): number {
  const n = maybe(value);
  return n !== null && Number.isFinite(n) ? n : fallback;
}
const finiteOrNull = (value: unknown): number | null => {
  const n = maybe(value);
  return n !== null && Number.isFinite(n) ? n : null;
};

function numbers(value: unknown): Record<string, number> {
  const out: Record<string, number> = Object.create(null);
  for (const [key, item] of Object.entries(object(value)).slice(0, 50)) {
    const n = maybe(item);
    if (n !== null) {
      out[key] = n;
    }
  }
  return out;
}

/** Make a whole snapshot of whatever came. */
export function asSnapshot(value: unknown): ISnapshot {
  const raw = object(value);
  const charts = object(raw.charts);
  const evaluated = raw.eval ? object(raw.eval) : null;
  const checkpoint = raw.checkpoint ? object(raw.checkpoint) : null;
  const error = raw.error ? object(raw.error) : null;
  const progress = finiteOrNull(raw.progress);
  return {
    job_id: text(raw.job_id),
    name: text(raw.name),
    status: text(raw.status) || 'unknown',
    reason: text(raw.reason),
    updated_at: finite(raw.updated_at),
    step: finite(raw.step),
    total_steps: finiteOrNull(raw.total_steps),
    epoch: finite(raw.epoch),
    epochs: finiteOrNull(raw.epochs),
    progress: progress === null ? null : Math.min(1, Math.max(0, progress)),
    eta_s: finiteOrNull(raw.eta_s),
    elapsed_s: finiteOrNull(raw.elapsed_s),
    loss: maybe(raw.loss),
    metrics: numbers(raw.metrics),
    eval: evaluated && { step: finite(evaluated.step), loss: maybe(evaluated.loss), metrics: numbers(evaluated.metrics) },
    samples_per_s: maybe(raw.samples_per_s),
    global_batch_size: finiteOrNull(raw.global_batch_size),
    world_size: finite(raw.world_size),
    max_workers: finiteOrNull(raw.max_workers),
    generation: finite(raw.generation),
    num_lost: finite(raw.num_lost),
    num_preempted: finite(raw.num_preempted),
    checkpoint: checkpoint && {
      step: finite(checkpoint.step),
      time: finite(checkpoint.time),
      size_bytes: finite(checkpoint.size_bytes)
    },
    error: error && { error: text(error.error), traceback: text(error.traceback) },
    charts: {
      metrics: (Array.isArray(charts.metrics) ? charts.metrics : []).slice(0, 8).map(text),
      has_eval: charts.has_eval === true
    },
    workers: list(raw.workers).map(w => ({
      worker: text(w.worker),
      rank: finiteOrNull(w.rank),
      state: text(w.state),
      note: text(w.note),
      device: text(w.device),
      trainer_pid: finiteOrNull(w.trainer_pid),
      steps: finite(w.steps)
    })),
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

export type Buffer = ArrayBuffer | ArrayBufferView;

/** Copy a buffer's bytes: what arrives may be unaligned. */
function bytesOf(buffer: Buffer): ArrayBuffer {
  return buffer instanceof ArrayBuffer
    ? buffer
    : (buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength) as ArrayBuffer);
}

const BYTES_A_ROW = 12;
export type Taken = 'news' | 'gap' | 'nothing';

/** All that one view knows of its job. */
export class JobData {
  snapshot = asSnapshot({});
  curves = new Map<string, Curve>();
  /** Whether anything was there to draw yet. */
  isFilled = false;
  private rawSnapshot: Raw = {};
  private seq = 0;
  /** Whether every message since the last start has come. */
  isSynced = false;

  constructor(readonly view: string) {}

  /** Start from what a notebook keeps. */
  load(saved: unknown): void {
    const raw = object(saved);
    this.rawSnapshot = object(raw.snapshot);
    this.snapshot = asSnapshot(this.rawSnapshot);
    this.curves.clear();
    for (const [name, value] of Object.entries(object(raw.series)).slice(0, 50)) {
      const { x, y } = object(value);
      if (Array.isArray(x) && Array.isArray(y) && x.length === y.length) {
        this.curve(name).append(
          Float64Array.from(x, v => finite(v)),
          Float32Array.from(y, v => (typeof v === 'number' ? v : NaN))
        );
      }
    }
    this.isFilled = true;
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
    if (message.kind !== 'update' || (message.to && message.to !== this.view)) {
      return this.isSynced && !isNext ? this.lose() : 'nothing';
    }
    if (!message.reset && !(this.isSynced && isNext)) {
      return this.isSynced ? this.lose() : 'nothing';
    }
    if (message.reset) {
      this.curves.clear();
      this.rawSnapshot = {};
    }
    this.rawSnapshot = { ...this.rawSnapshot, ...object(message.snapshot) };
    this.snapshot = asSnapshot(this.rawSnapshot);
    list(message.blocks).forEach((block, i) => this.append(text(block.name), finite(block.rows), buffers[i]));
    this.isSynced = this.isFilled = true;
    return 'news';
  }

  private lose(): Taken {
    this.isSynced = false;
    return 'gap';
  }

  private append(name: string, rows: number, buffer: Buffer | undefined): void {
    if (!buffer || buffer.byteLength !== rows * BYTES_A_ROW) {
      return;
    }
    const bytes = bytesOf(buffer);
    this.curve(name).append(new Float64Array(bytes, 0, rows), new Float32Array(bytes, rows * 8, rows));
  }

  private curve(name: string): Curve {
    let curve = this.curves.get(name);
    if (!curve) {
      curve = new Curve();
      this.curves.set(name, curve);
    }
    return curve;
  }
}
