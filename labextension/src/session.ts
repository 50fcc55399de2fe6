// All jobs of this JupyterLab: those of every notebook that is open, and which of them is meant.
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Token } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { IEntry, IFollower, IMerged, IPool, idlePools, KernelJobs, merge, targetOf } from './jobs';
import { KernelLink, linkOf } from './link';

/** A notebook, and what its kernel tells. */
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
  merged: IMerged<Follower> = { entries: [], offers: [] };
  idle: IPool[] = [];
  private followers: Follower[] = [];
  private chosen = '';
  private readonly changes = new Signal<this, void>(this);

  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach(panel => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel));
    tracker.currentChanged.connect(() => this.update());
  }

  /** There is something else to see, or another job is meant. */
  get changed(): ISignal<this, void> {
    return this.changes;
  }

  /** The job that was looked at last. */
  get selected(): string {
    return this.chosen;
  }

  select(jobId: string): void {
    if (jobId !== this.chosen) {
      this.chosen = jobId;
      this.changes.emit();
    }
  }

  /** Whom a command is about. */
  target(): Entry | null {
    return targetOf(this.merged.entries, this.chosen);
  }

  find(jobId: string): Entry | undefined {
    return this.merged.entries.find(entry => entry.id === jobId);
  }

  /** Whether some kernel can be asked. */
  get isUp(): boolean {
    return this.followers.some(follower => follower.link.isUp);
  }

  get hasLost(): boolean {
    return this.merged.entries.some(entry => entry.isGone);
  }

  look(): void {
    this.followers.forEach(follower => follower.link.look());
  }

  forget(): void {
    this.followers.forEach(follower => follower.link.forget());
  }

  /** The notebook that a person works in. */
  current(): Follower | null {
    return (
      this.followers.find(follower => follower.notebook === this.tracker.currentWidget) ?? null
    );
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

  /** The current notebook comes first: what several follow is asked for there. */
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
