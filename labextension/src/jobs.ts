// Merge the jobs of all kernels into one list for the panel, the status bar and the palette.
// Independent of the DOM and of JupyterLab. Messages of kernels are untrusted, as in protocol.ts.
import { asSnapshot } from './protocol';
import { ISnapshot } from './snapshot';
import { asStudies, IStudy, IStudyEntry, mergeStudies } from './studies';
import { finite, finiteOrNull, jobId, line, list, object, Raw, text } from './untrusted';

export const ENDED = new Set(['finished', 'stopped', 'failed']);
/** Seconds without a job after which the panel warns of an idle pool. */
export const IDLE_AFTER_S = 60;
const MAX_POINTS = 200;

/** A job that a kernel is attached to, or was attached to before it died. */
export interface IRow {
  snapshot: ISnapshot;
  /** The same format as a job saved in a notebook: the initial state of its view. */
  saved: { snapshot: Raw; series: { loss: { x: string; y: string } } };
  /** Loss values of the sparkline; null for a value that is not finite. */
  curve: (number | null)[];
}

/** A running job that a kernel can attach to. */
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
  /** Seconds without a job; 0 while it has one. */
  idle_s: number;
  /** Seconds until it shuts down; null for never. */
  ends_in_s: number | null;
  time: number;
}

const submittedAt = (row: IRow): number => row.snapshot.submitted_at ?? 0;

function asRow(raw: Raw): IRow {
  const snapshot = object(raw.snapshot);
  const { x, y } = object(raw.loss);
  const numbers = (values: unknown) =>
    (Array.isArray(values) ? values : []).slice(0, MAX_POINTS).map(finiteOrNull);
  const written = (values: unknown) =>
    numbers(values)
      .map(value => value ?? 'NaN')
      .join(' ');
  return {
    snapshot: asSnapshot(snapshot),
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

/**
 * The jobs that one kernel has reported, including those of its dead predecessors in the same
 * notebook.
 */
export class KernelJobs {
  rows = new Map<string, IRow>();
  others: IOther[] = [];
  pools: IPool[] = [];
  studies = new Map<string, IStudy>();
  /** Last known state of jobs whose kernel has died. */
  readonly lost = new Map<string, IRow>();
  readonly lostStudies = new Map<string, IStudy>();

  /** Apply a message of side_panel.py. */
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
    if (Array.isArray(message.studies)) {
      this.studies = asStudies(message.studies);
      this.studies.forEach((_, id) => this.lostStudies.delete(id));
    }
  }

  /** The kernel has died: keep its last report. */
  lose(): void {
    this.rows.forEach((row, id) => this.lost.set(id, row));
    this.studies.forEach((study, id) => this.lostStudies.set(id, study));
    this.rows = new Map();
    this.studies = new Map();
    this.others = [];
    this.pools = [];
  }

  /** Forget the reports of dead kernels. */
  forget(): void {
    this.lost.clear();
    this.lostStudies.clear();
  }
}

/** A notebook and its kernel, which may be attached to jobs. */
export interface IFollower {
  readonly jobs: KernelJobs;
}

export interface IEntry<F> {
  id: string;
  row: IRow;
  /** Notebooks attached to it; if there are none, those that were. */
  followers: F[];
  isGone: boolean;
}

export interface IOffer<F> {
  other: IOther;
  offers: F[];
}

export interface IMerged<F> {
  /** Newest job first; each job once, even if several notebooks are attached. */
  entries: IEntry<F>[];
  /** Running jobs that no notebook is or was attached to. */
  offers: IOffer<F>[];
  /** Newest study first. */
  studies: IStudyEntry<F>[];
}

/**
 * Merge the jobs of all followers.
 *
 * If several followers report a job, the first one's report is used. Of dead kernels, the newest
 * report is used.
 */
export function merge<F extends IFollower>(followers: readonly F[]): IMerged<F> {
  const entries = new Map<string, IEntry<F>>();
  const enter = (id: string, row: IRow, follower: F, isGone: boolean) => {
    const known = entries.get(id);
    if (!known) {
      entries.set(id, { id, row, followers: [follower], isGone });
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
      const offer = offers.get(other.job_id);
      if (offer) {
        offer.offers.push(follower);
      } else if (!entries.has(other.job_id)) {
        offers.set(other.job_id, { other, offers: [follower] });
      }
    }
  }
  const newest = (a: IEntry<F>, b: IEntry<F>) =>
    submittedAt(b.row) - submittedAt(a.row) || (a.id < b.id ? -1 : 1);
  return {
    entries: [...entries.values()].sort(newest),
    offers: [...offers.values()],
    studies: mergeStudies(followers)
  };
}

/** Whether the job is attached and has not ended. */
export const isActive = (entry: IEntry<unknown>): boolean =>
  !entry.isGone && !ENDED.has(entry.row.snapshot.status);

/**
 * Return the source of a cell that shows a job. The cell is executed, so only a valid job ID may
 * enter it.
 */
export const showLine = (id: unknown): string => `%etrain show ${checkedId(id)}`;

/** The line that loads our magics into a kernel. */
export const LOAD = '%load_ext etrain_jupyter';

/** Return the source of a cell that attaches a kernel, for example after a restart, to a job. */
export const attachLines = (id: unknown): string =>
  `${LOAD}\n%etrain attach ${checkedId(id)} -o job`;

function checkedId(id: unknown): string {
  const checked = jobId(id);
  if (!checked) {
    throw new Error('Invalid job ID. No cell was inserted.');
  }
  return checked;
}

/**
 * Return the job that a command applies to: the selected job if active, else the only active job,
 * else the selected one.
 */
export function targetOf<F>(entries: readonly IEntry<F>[], selected: string): IEntry<F> | null {
  const chosen = entries.find(entry => entry.id === selected) ?? null;
  const active = entries.filter(isActive);
  return chosen && isActive(chosen) ? chosen : active.length === 1 ? active[0] : chosen;
}

/** Return the follower that is attached to most of the jobs; of several, the first one. */
export function bestFollower<F>(entries: readonly IEntry<F>[], followers: readonly F[]): F | null {
  const attached = (follower: F) =>
    entries.filter(entry => !entry.isGone && entry.followers.includes(follower)).length;
  return followers.reduce<F | null>(
    (best, follower) => (best === null || attached(follower) > attached(best) ? follower : best),
    null
  );
}

/** Return why a request is not possible; empty if it is. */
export function whyNot(entry: IEntry<unknown> | null, request: string): string {
  if (!entry) {
    return 'Select a job in the etrain panel.';
  }
  return entry.isGone
    ? 'No kernel is attached to the job.'
    : (entry.row.snapshot.controls[request] ??
        'The kernel has not reported whether this is possible.');
}

/** Return the running clusters, each once, by its newest report. */
export function poolsOf(followers: readonly IFollower[]): IPool[] {
  const pools = new Map<string, IPool>();
  for (const pool of followers.flatMap(follower => follower.jobs.pools)) {
    if (pool.time >= (pools.get(pool.cluster_id)?.time ?? -Infinity)) {
      pools.set(pool.cluster_id, pool);
    }
  }
  return [...pools.values()];
}

/** Return the clusters without a job, unless a job was submitted after the report. */
export function idlePools(
  followers: readonly IFollower[],
  entries: readonly IEntry<unknown>[]
): IPool[] {
  const newestJob = Math.max(...entries.filter(isActive).map(entry => submittedAt(entry.row)));
  return poolsOf(followers).filter(pool => pool.idle_s >= IDLE_AFTER_S && newestJob < pool.time);
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
