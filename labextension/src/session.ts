// The jobs of all open notebooks, and the job that commands apply to.
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Token } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { IEntry, IFollower, IMerged, IPool, idlePools, KernelJobs, merge, targetOf } from './jobs';
import { KernelLink, linkOf } from './link';

/** A notebook and the jobs that its kernel reports. */
export class Follower implements IFollower {
  readonly link: KernelLink;

  constructor(readonly notebook: NotebookPanel) {
    this.link = linkOf(notebook.sessionContext);
  }

  get jobs(): KernelJobs {
    return this.link.jobs;
  }

  get name(): string {
    return this.notebook.title.label;
  }
}

export type Entry = IEntry<Follower>;

export const ISession = new Token<Session>(
  'etrain-jupyter:ISession',
  'The training jobs of all open notebooks.'
);

export class Session {
  merged: IMerged<Follower> = { entries: [], offers: [], studies: [] };
  idle: IPool[] = [];
  private followers: Follower[] = [];
  private chosen = '';
  private readonly changes = new Signal<this, void>(this);

  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach(panel => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => this.update());
  }

  /** The jobs or the selected job have changed. */
  get changed(): ISignal<this, void> {
    return this.changes;
  }

  /** The job that was opened or focused last. */
  get selected(): string {
    return this.chosen;
  }

  select(jobId: string): void {
    if (jobId !== this.chosen) {
      this.chosen = jobId;
      this.changes.emit();
    }
  }

  /** The job that commands apply to. */
  target(): Entry | null {
    return targetOf(this.merged.entries, this.chosen);
  }

  find(jobId: string): Entry | undefined {
    return this.merged.entries.find(entry => entry.id === jobId);
  }

  /** Whether any kernel has loaded etrain. */
  get isUp(): boolean {
    return this.followers.some(follower => follower.link.isUp);
  }

  get hasLost(): boolean {
    const { entries, studies } = this.merged;
    return [...entries, ...studies].some(entry => entry.isGone);
  }

  scan(): void {
    this.followers.forEach(follower => follower.link.scan());
  }

  forget(): void {
    this.followers.forEach(follower => follower.link.forget());
  }

  /** The notebook that has the focus. */
  current(): Follower | null {
    return (
      this.followers.find(follower => follower.notebook === this.tracker.currentWidget) ?? null
    );
  }

  /** Notebooks whose kernels have loaded etrain; the current one comes first. */
  connected(): Follower[] {
    const current = this.current();
    return this.followers
      .filter(follower => follower.link.isUp)
      .sort((a, b) => Number(b === current) - Number(a === current));
  }

  private add(notebook: NotebookPanel): void {
    const follower = new Follower(notebook);
    this.followers.push(follower);
    follower.link.changed.connect(() => this.update(), this);
    notebook.disposed.connect(() => {
      this.followers = this.followers.filter(other => other !== follower);
      this.update();
    });
    this.update();
  }

  /**
   * Merge the jobs. The current notebook comes first, so that requests about shared jobs go through
   * its kernel.
   */
  private update(): void {
    const current = this.current();
    const inOrder = current
      ? [current, ...this.followers.filter(follower => follower !== current)]
      : this.followers;
    this.merged = merge(inOrder);
    this.idle = idlePools(inOrder, this.merged.entries);
    this.changes.emit();
  }
}
