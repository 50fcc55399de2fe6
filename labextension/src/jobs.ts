// The jobs of all kernels as one list: what the panel, the status bar and the palette decide from. Nothing here
// touches the page or JupyterLab. What kernels send is treated as hostile, as in protocol.ts.
import {
  asSnapshot,
  finite,
  finiteOrNull,
  ISnapshot,
  jobId,
  line,
  list,
  object,
  Raw,
  text
} from './protocol';

export const OVER = new Set(['finished', 'stopped', 'failed']);
/** A pool may rest for a while between two jobs before that is worth a warning. */
export const IDLE_AFTER_S = 60;
const MOST_POINTS = 200;

/** A job that a kernel follows, or followed until it was gone. */
export interface IRow {
  snapshot: ISnapshot;
  submitted_at: number;
  /** As a notebook keeps a job: what its view starts from. */
  saved: { snapshot: Raw; series: { loss: { x: string; y: string } } };
  /** The small curve; null where there was no number. */
  curve: (number | null)[];
}

/** A job that runs and that a kernel offers to follow. */
export interface IOther {
  job_id: string;
  name: string;
  status: string;
  step: number;
  total_steps: number;
  world_size: number;
}

export interface IPool {
  pool: string;
  cluster_id: string;
  workers: number;
  /** 0 while it has a job. */
  idle_s: number;
  /** When it ends by itself; null for never. */
  ends_in_s: number | null;
  time: number;
}

function asRow(raw: Raw): IRow {
  const snapshot = object(raw.snapshot);
  const { x, y } = object(raw.loss);
  const numbers = (values: unknown) =>
    (Array.isArray(values) ? values : []).slice(0, MOST_POINTS).map(finiteOrNull);
  const written = (values: unknown) =>
    numbers(values)
      .map(value => value ?? 'NaN')
      .join(' ');
  return {
    snapshot: asSnapshot(snapshot),
    submitted_at: finite(snapshot.submitted_at),
    saved: { snapshot, series: { loss: { x: written(x), y: written(y) } } },
    curve: numbers(y)
  };
}

const asOther = (raw: Raw): IOther => ({
  job_id: jobId(raw.job_id),
  name: line(raw.name),
  status: line(raw.status) || 'unknown',
  step: finite(raw.step),
  total_steps: finite(raw.total_steps),
  world_size: finite(raw.world_size)
});

const asPool = (raw: Raw): IPool => ({
  pool: text(raw.pool),
  cluster_id: text(raw.cluster_id),
  workers: finite(raw.workers),
  idle_s: finite(raw.idle_s),
  ends_in_s: finiteOrNull(raw.ends_in_s),
  time: finite(raw.time)
});

/** What one kernel has told, and what it had told before it was gone. */
export class KernelJobs {
  rows = new Map<string, IRow>();
  others: IOther[] = [];
  pools: IPool[] = [];
  /** Jobs that nobody tells of any more. */
  readonly lost = new Map<string, IRow>();

  /** Take a message of side_panel.py's. */
  take(content: unknown): void {
    const message = object(content);
    if (message.whole) {
      this.rows = new Map();
    }
    for (const row of list(message.rows).map(asRow)) {
      if (row.snapshot.job_id) {
        this.rows.set(row.snapshot.job_id, row);
        this.lost.delete(row.snapshot.job_id);
      }
    }
    (Array.isArray(message.gone) ? message.gone : []).forEach(id => this.rows.delete(text(id)));
    if (Array.isArray(message.others)) {
      this.others = list(message.others)
        .map(asOther)
        .filter(other => other.job_id);
    }
    if (Array.isArray(message.pools)) {
      this.pools = list(message.pools).map(asPool);
    }
  }

  /** The kernel is gone: what it told is the last that was seen. */
  lose(): void {
    this.rows.forEach((row, id) => this.lost.set(id, row));
    this.rows = new Map();
    this.others = [];
    this.pools = [];
  }
}

/** Whoever follows jobs: a notebook and its kernel. */
export interface IFollower {
  readonly jobs: KernelJobs;
}

export interface IEntry<F> {
  id: string;
  row: IRow;
  /** All that follow it; those that did, if nobody does. */
  followers: F[];
  isGone: boolean;
  /** Who could follow it, if nobody does. */
  offers: F[];
}

export interface IOffer<F> {
  other: IOther;
  offers: F[];
}

export interface IMerged<F> {
  /** The newest first; each job once, however many follow it. */
  entries: IEntry<F>[];
  /** Running jobs that nobody follows or followed. */
  offers: IOffer<F>[];
}

/** Make one list; where several followers know a job, the earlier one speaks for it. */
export function merge<F extends IFollower>(followers: readonly F[]): IMerged<F> {
  const entries = new Map<string, IEntry<F>>();
  const enter = (id: string, row: IRow, follower: F, isGone: boolean) => {
    const known = entries.get(id);
    if (!known) {
      entries.set(id, { id, row, followers: [follower], isGone, offers: [] });
    } else if (known.isGone === isGone) {
      known.followers.push(follower);
      known.row =
        isGone && row.snapshot.updated_at > known.row.snapshot.updated_at ? row : known.row;
    }
  };
  followers.forEach(f => f.jobs.rows.forEach((row, id) => enter(id, row, f, false)));
  followers.forEach(f => f.jobs.lost.forEach((row, id) => enter(id, row, f, true)));
  const offers = new Map<string, IOffer<F>>();
  for (const follower of followers) {
    for (const other of follower.jobs.others) {
      const entry = entries.get(other.job_id);
      const offer = entry ?? offers.get(other.job_id);
      if (offer) {
        offer.offers.push(follower);
      } else {
        offers.set(other.job_id, { other, offers: [follower] });
      }
    }
  }
  const newest = (a: IEntry<F>, b: IEntry<F>) =>
    b.row.submitted_at - a.row.submitted_at || (a.id < b.id ? -1 : 1);
  return { entries: [...entries.values()].sort(newest), offers: [...offers.values()] };
}

/** Whether something still happens to it, as far as anybody tells. */
export const isActive = (entry: IEntry<unknown>): boolean =>
  !entry.isGone && !OVER.has(entry.row.snapshot.status);

/** The line of a cell that shows a job. A cell is run, so nothing but the id of a job gets into it. */
export function showLine(id: unknown): string {
  const checked = jobId(id);
  if (!checked) {
    throw new Error('This is not the id of a job, so no cell was made of it.');
  }
  return `%etrain show ${checked}`;
}

/** Whom a command is about: the selected job if it is active, else the only one that is, else the selected one. */
export function targetOf<F>(entries: readonly IEntry<F>[], selected: string): IEntry<F> | null {
  const chosen = entries.find(entry => entry.id === selected) ?? null;
  const active = entries.filter(isActive);
  return chosen && isActive(chosen) ? chosen : active.length === 1 ? active[0] : chosen;
}

/** Why a request cannot be made of a job; empty where it can. */
export function whyNot(entry: IEntry<unknown> | null, request: string): string {
  if (!entry) {
    return 'Select a job in the etrain panel.';
  }
  return entry.isGone
    ? 'No kernel follows the job.'
    : (entry.row.snapshot.controls[request] ?? 'The kernel does not say.');
}

/** The clusters that are up, each once, as they were told of last. */
export function poolsOf(followers: readonly IFollower[]): IPool[] {
  const pools = new Map<string, IPool>();
  for (const pool of followers.flatMap(follower => follower.jobs.pools)) {
    if (pool.time >= (pools.get(pool.cluster_id)?.time ?? -Infinity)) {
      pools.set(pool.cluster_id, pool);
    }
  }
  return [...pools.values()];
}

/** Those that are up for nothing, unless a job has come since it was looked. */
export function idlePools(
  followers: readonly IFollower[],
  entries: readonly IEntry<unknown>[]
): IPool[] {
  const newest = Math.max(...entries.filter(isActive).map(entry => entry.row.submitted_at));
  return poolsOf(followers).filter(pool => pool.idle_s >= IDLE_AFTER_S && newest < pool.time);
}

export interface ICounts {
  jobs: number;
  active: number;
  workers: number;
}

export function countsOf(entries: readonly IEntry<unknown>[]): ICounts {
  const active = entries.filter(isActive);
  return {
    jobs: entries.length,
    active: active.length,
    workers: active.reduce((sum, entry) => sum + entry.row.snapshot.world_size, 0)
  };
}
