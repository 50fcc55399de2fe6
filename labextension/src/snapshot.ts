// The state of a job as the kernel sends it, after the checks of protocol.ts.
//
// Generated from snapshot.py by `make snapshot`. Do not edit.

/** One stage of the start-up. */
export interface IStartupStage {
  name: string;
  /** When it began, in seconds since the epoch; null if it has not begun. */
  since: number | null;
  /** Its duration; null until it has ended. */
  took_s: number | null;
}

/** Time split of a worker's latest steps. */
export interface ITimeSplit {
  /** The last of these steps. */
  step: number;
  num_steps: number;
  samples_per_s: number;
  /**
   * Share of the time by part: `data`, `compute`, `communication`, `optimizer` and `other`. They
   * add up to 1.
   */
  shares: Record<string, number>;
}

/** One row of the table of workers. */
export interface IWorkerRow {
  worker: string;
  /** Rank in the current generation; null if it is not a member. */
  rank: number | null;
  /** `starting`, `warm`, `training`, `waiting`, `leaving`, `left`, `lost` or `done`. */
  state: string;
  /** Reason for the state; empty if the state needs no explanation. */
  note: string;
  device: string;
  /** Machine type; empty if the pool does not report it. */
  machine: string;
  zone: string;
  /** Purchase option of the machine, such as `spot`; empty if the pool does not report it. */
  lifecycle: string;
  /** Price per hour when the worker joined. */
  usd_per_h: number | null;
  trainer_pid: number | null;
  /** Number of steps in which the worker took part. */
  steps: number;
  /** Time split of its latest steps; null until reported. */
  split: ITimeSplit | null;
  /** Why the worker is not computing; empty if it is. */
  waits_for: string;
}

/** One entry of the event list. */
export interface IEventLine {
  /** Key of the entry in this view. */
  id: number;
  /** Sequence number of the event in the log; 0 if the event is not in the log. */
  seq: number;
  time: number;
  /** Class name of the event. */
  kind: string;
  /** `info`, `good`, `warning` or `error`. */
  level: string;
  text: string;
}

/** An event marked on the charts. */
export interface IMarker {
  /** Key of the marker in this view. */
  id: number;
  seq: number;
  /** The job's step at the time of the event. */
  step: number;
  time: number;
  /**
   * `failed`, `lost`, `restored`, `notice`, `waiting`, `paused`, `resumed`, `join`, `left` or
   * `checkpoint`.
   */
  kind: string;
  text: string;
}

/** The newest evaluation. */
export interface ILatestEval {
  step: number;
  epoch: number;
  samples: number;
  loss: number | null;
  metrics: Record<string, number>;
}

/** The best evaluation of the metric that `checkpoint.best` names. */
export interface IBestValue {
  step: number;
  metric: string;
  value: number | null;
}

/** The newest durable checkpoint. */
export interface ILatestCheckpoint {
  step: number;
  time: number;
  size_bytes: number;
  /** Number of checkpoints so far. */
  count: number;
}

/** When the next checkpoint is overdue: `limit_s` seconds after `since`. */
export interface ICheckpointDue {
  /** Time of the newest checkpoint, or of the start of training if that is later. */
  since: number | null;
  /** Null if the interval between checkpoints is unknown. */
  limit_s: number | null;
  /** Step and error of a newer checkpoint that failed. */
  failed: string;
}

/** Cost of the machines. */
export interface ICostSummary {
  spent_usd: number;
  /** Savings compared with on-demand prices. */
  saved_usd: number;
  /** Cost of training that preemptions discarded. */
  wasted_usd: number;
}

/** The error that made the job fail. */
export interface IErrorSummary {
  error: string;
  traceback: string;
  /** Workers that raised it. */
  workers: string[];
  step: number;
}

/** The charts of a job, derived from its configuration, so that no chart appears late. */
export interface IChartList {
  metrics: string[];
  has_eval: boolean;
}

/** The exhibits of one name: figures, texts or tables that `eval.score` returned. */
export interface IExhibitSeries {
  name: string;
  /** Steps of the evaluations that have one, in ascending order. */
  steps: number[];
}

/** The state of one job at one time. Times are seconds since the epoch. */
export interface ISnapshot {
  job_id: string;
  name: string;
  status: string;
  /** Reason for the status; empty if it needs no explanation. */
  reason: string;
  pool: string;
  submitted_at: number | null;
  /** Time of the first generation. */
  started_at: number | null;
  /** Time of the newest event. */
  updated_at: number;
  ended_at: number | null;
  /** The newest committed step. */
  step: number;
  /** Null until the job is planned. */
  total_steps: number | null;
  /** Epoch of the newest step, starting at 0. */
  epoch: number;
  /** Planned epochs; may be a fraction. */
  epochs: number | null;
  loss: number | null;
  lr: number | null;
  /** Metrics of the newest step. */
  metrics: Record<string, number>;
  eval: ILatestEval | null;
  best: IBestValue | null;
  global_batch_size: number | null;
  num_parameters: number | null;
  /** Parameters that require a gradient. */
  num_trained_parameters: number | null;
  world_size: number;
  min_workers: number | null;
  max_workers: number | null;
  generation: number;
  num_generations: number;
  /** Workers lost so far. */
  num_lost: number;
  /** Workers preempted so far. */
  num_preempted: number;
  /** Steps undone by rewinds so far. */
  num_undone: number;
  /** Time for which training stalled before the current generation. */
  stall_s: number | null;
  checkpoint: ILatestCheckpoint | null;
  /** Null if the pool does not report costs. */
  cost: ICostSummary | null;
  error: IErrorSummary | null;
  charts: IChartList;
  /** Sorted by name. A view requests their content when it displays them. */
  exhibits: IExhibitSeries[];
  /** Stages from the start of the scheduler until the first step; empty once it is committed. */
  startup: IStartupStage[];
  /** Number of ranks that `workers` leaves out. */
  num_more_workers: number;
  /** Share of the planned steps that are done, from 0 to 1. */
  progress: number | null;
  /** Estimated remaining time; null if unknown or not running. */
  eta_s: number | null;
  elapsed_s: number | null;
  /** Recent throughput. */
  samples_per_s: number | null;
  checkpoint_due: ICheckpointDue;
  /** Why each request is not possible now; empty if it is possible. */
  controls: Record<string, string>;
  /** Ranks in order, then newcomers, then workers that are gone; at most `workers.MAX_ROWS`. */
  workers: IWorkerRow[];
  /** Oldest first. */
  events: IEventLine[];
  /** Oldest first. */
  markers: IMarker[];
}
