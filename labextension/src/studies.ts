// The studies that a kernel reports: searches over hyper-parameters, whose trials are jobs.
// Independent of the DOM. Messages of kernels are untrusted, as in protocol.ts.
import { finite, finiteOrNull, jobId, line, list, Raw, text } from './untrusted';

/** A trial of a study, and its job. */
export interface ITrial {
  job_id: string;
  number: number;
  /** The state as a word: running, complete, pruned, failed or unfinished. */
  state: string;
  /** The newest value of the metric; null if there is none. */
  value: number | null;
  /** Its parameters, as text. */
  params: string;
}

export interface IStudy {
  study_id: string;
  name: string;
  status: string;
  reason: string;
  metric: string;
  /** The best value so far; null before the first one. */
  best: number | null;
  num_trials: number;
  num_begun: number;
  created: number;
  /** The best trials first; a large study reports only these. */
  trials: ITrial[];
}

/** A study that a kernel reports, or reported before it died. */
export interface IStudyEntry<F> {
  study: IStudy;
  /** Notebooks that can attach to its jobs; none if their kernels have died. */
  followers: F[];
  isGone: boolean;
}

const asTrial = (raw: Raw): ITrial => ({
  job_id: jobId(raw.job_id),
  number: finite(raw.number),
  state: line(raw.state),
  value: finiteOrNull(raw.value),
  params: line(raw.params)
});

/** Return the studies of a message by ID, without those that have no valid ID. */
export function asStudies(value: unknown): Map<string, IStudy> {
  const studies = list(value).map(raw => ({
    study_id: jobId(raw.study_id),
    name: line(raw.name),
    status: line(raw.status) || 'unknown',
    reason: text(raw.reason),
    metric: line(raw.metric),
    best: finiteOrNull(raw.best),
    num_trials: finite(raw.num_trials),
    num_begun: finite(raw.num_begun),
    created: finite(raw.created),
    trials: list(raw.trials)
      .map(asTrial)
      .filter(trial => trial.job_id)
  }));
  return new Map(studies.filter(s => s.study_id).map(s => [s.study_id, s]));
}

/** The studies that a kernel has reported, and those of its dead predecessors. */
export interface IStudyReport {
  readonly studies: ReadonlyMap<string, IStudy>;
  readonly lostStudies: ReadonlyMap<string, IStudy>;
}

/** Merge the studies of all followers: each once, newest first. */
export function mergeStudies<F extends { readonly jobs: IStudyReport }>(
  followers: readonly F[]
): IStudyEntry<F>[] {
  const entries = new Map<string, IStudyEntry<F>>();
  for (const follower of followers) {
    for (const [id, study] of follower.jobs.studies) {
      const known = entries.get(id);
      if (known) {
        known.followers.push(follower);
      } else {
        entries.set(id, { study, followers: [follower], isGone: false });
      }
    }
  }
  for (const follower of followers) {
    for (const [id, study] of follower.jobs.lostStudies) {
      if (!entries.has(id)) {
        entries.set(id, { study, followers: [], isGone: true });
      }
    }
  }
  return [...entries.values()].sort((a, b) => b.study.created - a.study.created);
}

/** Return whether a job is a trial of a study. Its ID is that of the study and a number. */
export const isTrialOf = (study: IStudy, id: string): boolean =>
  id.startsWith(`${study.study_id}-`) && /^\d+$/.test(id.slice(study.study_id.length + 1));
