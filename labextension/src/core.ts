// The view of one job, independent of any framework: it draws the snapshots of a source and sends
// it requests. Texts enter the page as text only, never as markup: names and messages may come from
// an untrusted notebook.
import { Charts } from './charts';
import { Controls } from './controls';
import { make, setText } from './dom';
import { drawing } from './drawing';
import { Events } from './events';
import { Exhibits } from './exhibits';
import * as format from './format';
import { Buffer, JobData } from './job_data';
import { savedAt } from './protocol';
import { ISnapshot } from './snapshot';
import { ErrorBox, isStarting, OpenCell, StartupList } from './startup';
import { Tiles } from './tiles';
import { Workers } from './workers';

/** A transport: the anywidget model or JupyterLab's comm. */
export interface IJobSource {
  /**
   * Return the saved state of the job in the notebook. It is drawn until the kernel answers, or if
   * it never does.
   */
  saved(): unknown;
  /**
   * Listen to the kernel's messages and to connects and disconnects. Return a function that stops
   * listening.
   */
  listen(
    onMessage: (content: unknown, buffers: readonly Buffer[]) => void,
    onLink: (isUp: boolean) => void
  ): () => void;
  /** Send a message to the kernel; without a kernel, drop it. */
  send(content: Record<string, unknown>): void;
  /** Insert and run a cell that attaches the notebook's kernel to the job; missing elsewhere. */
  attach?(): void;
  /** Show a line of a cell of the notebook; missing elsewhere. */
  openCell?: OpenCell;
}

export interface IMountedJob {
  /** The notebook has saved a newer state. */
  refresh(): void;
  unmount(): void;
}

const ANSWER_WITHIN_MS = 3000;
/** Minimum interval between two announcements to a screen reader. */
const ANNOUNCE_EVERY_MS = 3000;
const ENDED = new Set(['finished', 'stopped', 'failed']);

/** Connection to the kernel: waiting for an answer, receiving updates, or none. */
type Phase = 'connecting' | 'live' | 'gone';

export interface IJobOptions {
  /** Layout for the side panel: few charts, and no table of workers. */
  isCompact?: boolean;
}

export function mountJob(
  host: HTMLElement,
  source: IJobSource,
  options: IJobOptions = {}
): IMountedJob {
  const view = new JobElement(host, source, options.isCompact ?? false);
  return { refresh: () => view.refresh(), unmount: () => view.unmount() };
}

class JobElement {
  private readonly data = new JobData(Math.random().toString(36).slice(2));
  private readonly root = make('section', 'etrain-job');
  private readonly name = make('strong', 'etrain-name');
  private readonly pill = make('span', 'etrain-status');
  private readonly announcement = make('span', 'etrain-visually-hidden');
  private readonly progress = make('progress', 'etrain-progress');
  private readonly position = make('span', 'etrain-where');
  private readonly note = make('span', 'etrain-note');
  private readonly attach = make('button', 'etrain-button etrain-primary etrain-attach');
  private readonly error: ErrorBox;
  private readonly startup = new StartupList();
  private readonly tiles = new Tiles();
  private readonly controls = new Controls((request, args) => this.request(request, args));
  private readonly charts: Charts;
  private readonly workers = new Workers((worker, opener) =>
    this.controls.press('preempt', opener, worker)
  );
  private readonly exhibits = new Exhibits((name, step) => this.requestExhibit(name, step));
  private readonly events = new Events();
  private readonly cleanups: (() => void)[] = [];
  private phase: Phase = 'connecting';
  private helloAt = 0;
  /** Time of the newest event that the notebook has saved. */
  private savedAt = 0;
  private drawnAt = 0;
  private tookMs = 0;
  private timer = 0;
  private announcedAt = 0;
  private announcedStatus = '';

  constructor(
    host: HTMLElement,
    private readonly source: IJobSource,
    private readonly isCompact: boolean
  ) {
    this.error = new ErrorBox(source.openCell);
    this.charts = new Charts(
      this.data,
      (first, last) => this.requestDetail(first, last),
      isCompact
    );
    this.build();
    host.append(this.root);
    this.refresh();
    this.cleanups.push(
      source.listen(
        (content, buffers) => this.onMessage(content, buffers),
        isUp => (isUp ? this.hello() : this.setPhase('gone'))
      )
    );
    const observer = new ResizeObserver(() => this.charts.resize());
    observer.observe(this.root);
    // A theme changes CSS variables, which a canvas does not notice.
    const themes = new MutationObserver(() => this.charts.draw());
    themes.observe(document.body, {
      attributes: true,
      attributeFilter: ['class', 'data-jp-theme-name', 'data-jp-theme-light']
    });
    const clock = window.setInterval(() => this.tick(), 1000);
    this.cleanups.push(() => {
      observer.disconnect();
      themes.disconnect();
      window.clearInterval(clock);
      window.clearTimeout(this.timer);
    });
    if (this.phase === 'connecting') {
      this.hello();
    }
  }

  refresh(): void {
    if (this.phase !== 'live') {
      const saved = this.source.saved();
      this.data.load(saved);
      this.exhibits.load(saved);
      this.schedule();
    } else {
      this.savedAt = savedAt(this.source.saved());
    }
  }

  unmount(): void {
    this.cleanups.forEach(cleanup => cleanup());
    this.charts.destroy();
    this.controls.destroy();
    this.root.remove();
  }

  private hello(): void {
    this.helloAt = Date.now();
    if (this.phase === 'gone') {
      this.setPhase('connecting');
    }
    this.charts.forgetRequest();
    this.source.send({ kind: 'hello', view: this.data.view });
  }

  private request(request: string, args: Record<string, unknown>): void {
    this.source.send({ kind: 'request', request, args, view: this.data.view });
  }

  private requestDetail(first: number, last: number): void {
    if (this.phase === 'live') {
      this.source.send({ kind: 'detail', view: this.data.view, first, last });
    }
  }

  private requestExhibit(name: string, step: number): void {
    this.source.send({ kind: 'exhibit', view: this.data.view, name, step });
  }

  private onMessage(content: unknown, buffers: readonly Buffer[]): void {
    const message = (content ?? {}) as Record<string, unknown>;
    const { kind, to } = message;
    const taken = this.data.take(content, buffers);
    if (taken === 'gap') {
      this.hello();
    } else if (taken === 'update') {
      if (message.reset) {
        this.charts.forgetRequest(); // a reset has discarded the details of a zoomed range
        this.exhibits.forget();
      }
      this.setPhase('live');
    } else if (kind === 'unknown' && to === this.data.view) {
      this.setPhase('gone');
    } else if (kind === 'notice' && to === this.data.view) {
      this.controls.onAnswer(String(message.request), String(message.level), String(message.text));
    } else if (kind === 'exhibit' && to === this.data.view) {
      this.exhibits.take(content, buffers);
    }
    this.schedule();
  }

  private setPhase(phase: Phase): void {
    if (phase !== this.phase) {
      this.phase = phase;
      this.schedule();
    }
  }

  private tick(): void {
    const isTimedOut = Date.now() - this.helloAt > ANSWER_WITHIN_MS;
    if (this.phase === 'connecting' && isTimedOut) {
      this.setPhase('gone');
    }
    // The kernel's last message may have been lost. Then no later message reveals the gap, but the
    // notebook's newer state does.
    const isBehind = this.data.snapshot.updated_at < this.savedAt;
    if (this.phase === 'live' && isTimedOut && (!this.data.isSynced || isBehind)) {
      this.hello();
    }
    if (this.phase === 'live' && !this.hasEnded) {
      this.drawFigures(); // ages grow between messages
    }
    this.charts.recolour();
    this.announce();
  }

  /** Schedule a redraw: at most `redrawsPerS`, and drawing takes at most a third of the time. */
  private schedule(): void {
    if (!this.timer) {
      const pause = Math.max(1000 / drawing.redrawsPerS, 2 * this.tookMs);
      const wait = Math.max(0, pause - (Date.now() - this.drawnAt));
      this.timer = window.setTimeout(() => requestAnimationFrame(() => this.draw()), wait);
    }
  }

  private draw(): void {
    this.timer = 0;
    const startedAt = Date.now();
    const { snapshot } = this.data;
    this.drawFigures();
    if (!this.isCompact) {
      this.exhibits.draw(snapshot.exhibits, this.phase === 'live');
      this.workers.draw(snapshot, this.controls.whyNot('preempt'));
    }
    this.events.draw(snapshot.events);
    // Without a step, there are no figures and no curves.
    const hasTrained = snapshot.step > 0 || snapshot.loss !== null;
    this.tiles.element.hidden = this.charts.element.hidden = !hasTrained;
    this.charts.draw();
    this.announce();
    this.drawnAt = Date.now();
    this.tookMs = this.drawnAt - startedAt;
  }

  private get hasEnded(): boolean {
    return ENDED.has(this.data.snapshot.status);
  }

  private drawFigures(): void {
    const { snapshot } = this.data;
    this.drawHeader(snapshot);
    this.controls.draw(snapshot, this.phase === 'live');
    const now = this.phase === 'live' && !this.hasEnded ? Date.now() / 1000 : null;
    this.tiles.draw(snapshot, now);
    this.startup.draw(snapshot, now);
  }

  private drawHeader(s: ISnapshot): void {
    Object.assign(this.root.dataset, {
      jobId: s.job_id,
      status: s.status,
      step: String(s.step),
      phase: this.phase
    });
    setText(this.name, s.name);
    this.name.title = s.job_id;
    // Each job waits for its first workers, so that is not shown as a warning.
    const isCalm = s.status === 'waiting' && isStarting(s);
    this.pill.dataset.status = this.isGone ? 'gone' : isCalm ? 'submitted' : s.status;
    setText(this.pill, this.statusText(s));
    this.pill.title = s.reason;
    this.progress.value = s.progress ?? 0;
    setText(this.position, describeProgress(s));
    setText(this.note, this.noteText(s));
    this.attach.hidden = !this.isGone || !this.source.attach;
    this.error.draw(s.error);
  }

  /** The kernel no longer reports on the job, and the job had not ended when it last did. */
  private get isGone(): boolean {
    return this.phase === 'gone' && !this.hasEnded;
  }

  private statusText(s: ISnapshot): string {
    return this.isGone ? `last seen ${s.status}` : s.status;
  }

  private noteText(s: ISnapshot): string {
    if (this.isGone) {
      const seen = s.updated_at ? ` at ${format.timeOfDay(s.updated_at)}` : '';
      const lines = `%load_ext etrain_jupyter, then %etrain attach ${s.job_id} -o job`;
      const remedy = this.source.attach ? '' : ` To attach: ${lines}`;
      return `Last seen${seen}. This kernel is not attached to the job.${remedy}`;
    }
    if (s.reason && !s.error) {
      return s.reason;
    }
    const passed = s.elapsed_s === null ? '' : `${format.clock(s.elapsed_s)} elapsed`;
    return s.eta_s === null ? passed : `${passed} · ${format.clock(s.eta_s)} left`;
  }

  /** Announce changes of the status to a screen reader, and nothing else. */
  private announce(): void {
    const { snapshot } = this.data;
    const status = this.statusText(snapshot);
    const now = Date.now();
    if (
      snapshot.job_id &&
      status !== this.announcedStatus &&
      now - this.announcedAt >= ANNOUNCE_EVERY_MS
    ) {
      this.announcedStatus = status;
      this.announcedAt = now;
      const reason = snapshot.reason ? `: ${snapshot.reason}` : '';
      setText(
        this.announcement,
        `Job ${snapshot.name} ${status}${reason}, ${describeProgress(snapshot)}`
      );
    }
  }

  private build(): void {
    this.root.setAttribute('aria-label', 'training job');
    this.announcement.setAttribute('role', 'status');
    this.announcement.setAttribute('aria-live', 'polite');
    this.progress.max = 1;
    this.progress.setAttribute('aria-label', 'training progress');
    this.attach.type = 'button';
    this.attach.textContent = 'Attach';
    this.attach.title =
      'Add and run a cell that attaches this kernel to the job, as the variable job';
    this.attach.onclick = () => this.source.attach?.();
    const header = make('header');
    header.append(this.name, this.pill, this.announcement, this.controls.element);
    const facts = make('div', 'etrain-facts');
    facts.append(this.position, this.note, this.attach);
    const lower = make('div', 'etrain-lower');
    lower.append(...(this.isCompact ? [] : [this.workers.element]), this.events.element);
    this.root.classList.toggle('etrain-compact', this.isCompact);
    this.root.append(
      header,
      this.progress,
      facts,
      this.error.element,
      this.startup.element,
      this.tiles.element,
      this.charts.element,
      ...(this.isCompact ? [] : [this.exhibits.element]),
      lower
    );
  }
}

function describeProgress(s: ISnapshot): string {
  const steps = s.total_steps === null ? '' : ` of ${format.count(s.total_steps)}`;
  const percent = s.progress === null ? '' : ` · ${Math.floor(s.progress * 100)} %`;
  const epochs =
    s.epochs === null
      ? ''
      : ` · epoch ${format.count(s.epoch + 1)} of ${format.count(Math.ceil(s.epochs))}`;
  return `step ${format.count(s.step)}${steps}${percent}${epochs}`;
}
