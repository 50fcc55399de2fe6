// The state of a job as the kernel sends it; see snapshot.py.

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
  /** Time split of its latest steps; null until reported. */
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
  /**
   * The next checkpoint is overdue `limit_s` seconds after `since`; `failed` is the error of a
   * newer attempt.
   */
  checkpoint_due: { since: number | null; limit_s: number | null; failed: string };
  /** Cost of the machines; null if the pool does not report it. */
  cost: { spent_usd: number; saved_usd: number; wasted_usd: number } | null;
  /** Why each request is not possible now; empty if it is. */
  controls: Record<string, string>;
  error: { error: string; traceback: string } | null;
  charts: { metrics: string[]; has_eval: boolean };
  workers: IWorker[];
  events: IEventLine[];
  markers: IMarker[];
}
