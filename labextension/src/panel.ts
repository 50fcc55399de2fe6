// The side panel: the list of all jobs, and the compact dashboard of the opened job.
import { LabIcon } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';
import { actionsIn } from './cells';
import { IMountedJob, mountJob } from './core';
import { make, setText } from './dom';
import * as format from './format';
import { countsOf, IPool } from './jobs';
import { KernelLink } from './link';
import { List } from './list';
import { Entry, Follower, Session } from './session';

export const jobsIcon = new LabIcon({
  name: 'etrain:jobs',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24"><path class="jp-icon3" fill="#616161" ' +
    'd="M3 3h2v16h16v2H3zM7 5h2c1 6 4 9 12 9v2C11 16 8 12 7 5z"/></svg>'
});

/** Minimum interval between redraws. One kernel reports no more often, but there may be several. */
const DRAW_EVERY_MS = 500;

export interface IPanelActions {
  show(entry: Entry): Promise<void>;
  attach(jobId: string): Promise<void>;
  compare(jobIds: readonly string[]): Promise<void>;
}

export class JobsPanel extends Widget {
  private readonly list: List<Follower>;
  private readonly head = make('header', 'etrain-side-head');
  private readonly count = make('span', 'etrain-tally');
  private readonly announcement = make('span', 'etrain-visually-hidden');
  private readonly clear = make('button', 'etrain-tool');
  private readonly compare = this.button('Compare', '', () => void this.compareChosen());
  private chosen: ReadonlySet<string> = new Set();
  private isComparing = false;
  private readonly pools = make('p', 'etrain-pools');
  private readonly detail = make('div', 'etrain-detail');
  private readonly host = make('div', 'etrain-host');
  private readonly goTo = make('button', 'etrain-tool');
  private readonly backButton = this.button('‹ All jobs', 'Back to the list (Escape)', () =>
    this.back()
  );
  private opened = '';
  /** A job to open as soon as a kernel reports it. */
  private awaited = '';
  private mounted: { job: IMountedJob; link: KernelLink } | null = null;
  private drawnAt = 0;
  private timer = 0;
  private clock = 0;

  constructor(
    private readonly session: Session,
    private readonly actions: IPanelActions
  ) {
    super();
    this.id = 'etrain-jobs';
    this.addClass('etrain-side');
    this.title.icon = jobsIcon;
    this.title.caption = 'etrain jobs';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'etrain jobs');
    this.list = new List<Follower>({
      open: id => this.open(id),
      select: id => session.select(id),
      show: id => this.showInNotebook(id),
      attach: id => void actions.attach(id),
      openTrial: id => void this.openTrial(id),
      choose: (id, isChosen) => this.choose(id, isChosen)
    });
    this.build();
    session.changed.connect(() => this.schedule(), this);
    this.schedule();
  }

  dispose(): void {
    window.clearTimeout(this.timer);
    window.clearInterval(this.clock);
    this.leave();
    super.dispose();
  }

  /** Show the compact dashboard of a job. */
  open(jobId: string): void {
    if (this.session.find(jobId)) {
      this.leave();
      this.awaited = '';
      this.opened = jobId;
      this.session.select(jobId);
      this.draw();
      this.backButton.focus();
    }
  }

  private async openTrial(jobId: string): Promise<void> {
    if (!this.session.find(jobId)) {
      this.awaited = jobId;
      await this.actions.attach(jobId);
    }
    this.open(jobId);
  }

  protected onActivateRequest(): void {
    if (!this.node.contains(document.activeElement)) {
      if (this.opened) {
        this.backButton.focus();
      } else {
        this.list.focus(this.session.selected);
      }
    }
  }

  protected onAfterShow(): void {
    this.draw();
    this.clock = window.setInterval(() => this.schedule(), 1000); // ages grow between messages
  }

  protected onAfterHide(): void {
    window.clearInterval(this.clock);
  }

  private schedule(): void {
    if (!this.timer) {
      const wait = Math.max(0, DRAW_EVERY_MS - (Date.now() - this.drawnAt));
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.draw();
      }, wait);
    }
  }

  private draw(): void {
    if (!this.isVisible) {
      return;
    }
    this.drawnAt = Date.now();
    const { merged } = this.session;
    if (this.awaited && this.session.find(this.awaited)) {
      this.open(this.awaited);
      return; // it has drawn the job
    }
    const entry = this.session.find(this.opened);
    if (this.opened && !entry) {
      this.back();
    }
    this.drawHead();
    this.list.element.hidden = !!entry;
    this.detail.hidden = !entry;
    if (entry) {
      this.drawDetail(entry);
    } else {
      const target = this.session.target()?.id ?? '';
      this.list.draw(merged, this.session.isUp, target, Date.now() / 1000, this.chosen);
    }
  }

  private drawHead(): void {
    const { jobs, active, workers } = countsOf(this.session.merged.entries);
    const { length } = this.session.merged.studies;
    const searches = length ? `${length} ${length === 1 ? 'study' : 'studies'}, ` : '';
    const summary =
      searches + format.plural(jobs, 'job') + (jobs ? `, ${active || 'none'} active` : '');
    setText(this.count, summary + (active ? `, ${format.plural(workers, 'worker')}` : ''));
    setText(this.announcement, summary); // the number of workers changes too often to be announced
    this.clear.hidden = !this.session.hasLost || !!this.opened;
    this.drawCompare();
    this.pools.hidden = !this.session.idle.length;
    setText(
      this.pools,
      this.session.idle.map(pool => `⚠ ${describeIdle(pool, Date.now() / 1000)}`).join('\n')
    );
  }

  private drawCompare(): void {
    // A job may have left the list since it was selected.
    this.chosen = new Set([...this.chosen].filter(id => this.session.find(id)));
    const { size } = this.chosen;
    this.compare.hidden = !size || !!this.opened;
    this.compare.disabled = size < 2 || this.isComparing;
    setText(
      this.compare,
      this.isComparing ? 'Comparing…' : `Compare ${format.plural(size, 'job')}`
    );
    this.compare.title =
      size < 2 ? 'Select at least two jobs' : 'Open a table and the curves of the selected jobs';
  }

  private choose(id: string, isChosen: boolean): void {
    const others = [...this.chosen].filter(other => other !== id);
    this.chosen = new Set(isChosen ? [...others, id] : others);
    this.drawCompare();
  }

  private async compareChosen(): Promise<void> {
    this.isComparing = true;
    this.drawCompare();
    try {
      await this.actions.compare([...this.chosen]);
    } finally {
      this.isComparing = false;
      this.drawCompare();
    }
  }

  /** Mount the dashboard; mount it again if a different kernel reports the job now. */
  private drawDetail(entry: Entry): void {
    const { link, notebook } = entry.followers[0];
    if (this.mounted?.link !== link) {
      this.mounted?.job.unmount();
      const saved = () => this.session.find(entry.id)?.row.saved ?? entry.row.saved;
      this.mounted = {
        job: mountJob(
          this.host,
          { ...link.source(entry.id, saved), ...actionsIn(notebook, entry.id) },
          { isCompact: true }
        ),
        link
      };
    }
  }

  private back(): void {
    const id = this.opened;
    const hadFocus = this.detail.contains(document.activeElement);
    this.leave();
    if (this.isVisible) {
      this.draw();
      if (hadFocus) {
        this.list.focus(id);
      }
    }
  }

  private leave(): void {
    this.mounted?.job.unmount();
    this.mounted = null;
    this.opened = '';
  }

  private showInNotebook(id: string): void {
    const entry = this.session.find(id);
    if (entry) {
      void this.actions.show(entry);
    }
  }

  private build(): void {
    const title = make('h2');
    title.textContent = 'etrain jobs';
    this.announcement.setAttribute('role', 'status');
    const refresh = this.button('⟳', 'Refresh the jobs that run elsewhere', () =>
      this.session.scan()
    );
    refresh.setAttribute('aria-label', refresh.title);
    this.clear.textContent = 'Clear';
    this.clear.type = 'button';
    this.clear.title =
      'Remove jobs of dead kernels from this list. The jobs themselves are not affected.';
    this.clear.onclick = () => this.session.forget();
    this.compare.hidden = true;
    this.head.append(title, this.announcement, this.compare, this.clear, refresh);
    this.goTo.type = 'button';
    this.goTo.textContent = 'Show in Notebook';
    this.goTo.onclick = () => this.showInNotebook(this.opened);
    this.backButton.classList.add('etrain-back');
    const bar = make('div', 'etrain-detail-bar');
    bar.append(this.backButton, this.goTo);
    this.detail.append(bar, this.host);
    this.detail.onkeydown = event => event.key === 'Escape' && this.back();
    this.node.append(this.head, this.count, this.pools, this.list.element, this.detail);
  }

  private button(text: string, about: string, action: () => void): HTMLButtonElement {
    const button = make('button', 'etrain-tool');
    button.type = 'button';
    button.textContent = text;
    button.title = about;
    button.onclick = action;
    return button;
  }
}

/** Describe an idle pool: since when, its workers, and when it shuts down. */
export function describeIdle(pool: IPool, now: number): string {
  const passed = Math.max(0, now - pool.time);
  const left =
    pool.ends_in_s === null
      ? 'runs until %etrain down'
      : `shuts down in ${format.age(pool.ends_in_s - passed)}`;
  return `pool ${pool.pool} is up and idle for ${format.age(pool.idle_s + passed)}: ${format.plural(pool.workers, 'worker')}, ${left}`;
}
