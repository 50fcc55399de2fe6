// The view of one job, free of any framework: it draws what a source brings and sends what a person asks for.
// Texts enter the page as text only, never as markup: names and messages are the user's, or a stranger's.
import { Charts } from './charts';
import { Controls } from './controls';
import { make, setText } from './dom';
import { drawing } from './drawing';
import { Events } from './events';
import * as format from './format';
import { Buffer, ISnapshot, jobId, JobData, savedAt } from './protocol';
import { Tiles } from './tiles';
import { Workers } from './workers';

/** What a transport (anywidget model, JupyterLab comm) provides. */
export interface IJobSource {
  /** What the notebook keeps of the job; drawn until the kernel answers, and if it never does. */
  saved(): unknown;
  /** Hear the kernel's messages, and whether there is a way to it. Returns how to stop. */
  listen(
    onMessage: (content: unknown, buffers: readonly Buffer[]) => void,
    onLink: (isUp: boolean) => void
  ): () => void;
  /** Send to the kernel; without one, nothing happens. */
  send(content: Record<string, unknown>): void;
}

export interface IMountedJob {
  /** The notebook keeps something newer now. */
  refresh(): void;
  unmount(): void;
}

const ANSWER_WITHIN_MS = 3000;
/** A screen reader hears of no more than one change of status in this time. */
const SPEAK_EVERY_MS = 3000;
const OVER = new Set(['finished', 'stopped', 'failed']);

type Phase = 'asking' | 'live' | 'gone';

export interface IJobOptions {
  /** For a narrow place: few charts, and no table of the workers. */
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
  private readonly spoken = make('span', 'etrain-spoken');
  private readonly progress = make('progress', 'etrain-progress');
  private readonly where = make('span', 'etrain-where');
  private readonly note = make('span', 'etrain-note');
  private readonly error = make('pre', 'etrain-error');
  private readonly tiles = new Tiles();
  private readonly controls = new Controls((request, args) => this.request(request, args));
  private readonly charts: Charts;
  private readonly workers = new Workers((worker, opener) =>
    this.controls.press('preempt', opener, worker)
  );
  private readonly events = new Events();
  private readonly cleanups: (() => void)[] = [];
  private phase: Phase = 'asking';
  private askedAt = 0;
  /** When the newest event happened that the notebook keeps. */
  private savedAt = 0;
  private drawnAt = 0;
  private tookMs = 0;
  private timer = 0;
  private spokenAt = 0;
  private spokenStatus = '';

  constructor(
    host: HTMLElement,
    private readonly source: IJobSource,
    private readonly isCompact: boolean
  ) {
    this.charts = new Charts(this.data, (first, last) => this.askForDetail(first, last), isCompact);
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
    // A change of theme changes CSS variables only, which a canvas does not notice.
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
    if (this.phase === 'asking') {
      this.hello();
    }
  }

  refresh(): void {
    if (this.phase !== 'live') {
      this.data.load(this.source.saved());
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
    this.askedAt = Date.now();
    if (this.phase === 'gone') {
      this.setPhase('asking');
    }
    this.charts.forgetAsked();
    this.source.send({ kind: 'hello', view: this.data.view });
  }

  private request(request: string, args: Record<string, unknown>): void {
    this.source.send({ kind: 'request', request, args, view: this.data.view });
  }

  private askForDetail(first: number, last: number): void {
    if (this.phase === 'live') {
      this.source.send({ kind: 'detail', view: this.data.view, first, last });
    }
  }

  private onMessage(content: unknown, buffers: readonly Buffer[]): void {
    const message = (content ?? {}) as Record<string, unknown>;
    const { kind, to } = message;
    const taken = this.data.take(content, buffers);
    if (taken === 'gap') {
      this.hello();
    } else if (taken === 'news') {
      if (message.reset) {
        this.charts.forgetAsked(); // what was known in detail is not known any more
      }
      this.setPhase('live');
    } else if (kind === 'unknown' && to === this.data.view) {
      this.setPhase('gone');
    } else if (kind === 'notice' && to === this.data.view) {
      this.controls.hear(String(message.request), String(message.level), String(message.text));
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
    const isLate = Date.now() - this.askedAt > ANSWER_WITHIN_MS;
    if (this.phase === 'asking' && isLate) {
      this.setPhase('gone');
    }
    // What the kernel said last may have been lost on its way; then nothing that follows shows a gap.
    const isBehind = this.data.snapshot.updated_at < this.savedAt;
    if (this.phase === 'live' && isLate && (!this.data.isSynced || isBehind)) {
      this.hello();
    }
    if (this.phase === 'live' && !this.isOver) {
      this.drawFigures(); // ages grow without messages
    }
    this.charts.recolour();
    this.speak();
  }

  /** Draw soon, but not more often than an eye can follow, nor more than a third of the time. */
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
      this.workers.draw(snapshot, this.controls.whyNot('preempt'));
    }
    this.events.draw(snapshot.events);
    this.charts.draw();
    this.speak();
    this.drawnAt = Date.now();
    this.tookMs = this.drawnAt - startedAt;
  }

  private get isOver(): boolean {
    return OVER.has(this.data.snapshot.status);
  }

  private drawFigures(): void {
    const { snapshot } = this.data;
    this.drawHeader(snapshot);
    this.controls.draw(snapshot, this.phase === 'live');
    this.tiles.draw(snapshot, this.phase === 'live' && !this.isOver ? Date.now() / 1000 : null);
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
    this.pill.dataset.status = this.isGone ? 'gone' : s.status;
    setText(this.pill, this.statusText(s));
    this.pill.title = s.reason;
    this.progress.value = s.progress ?? 0;
    setText(this.where, whereabouts(s));
    const note = this.noteText(s);
    setText(this.note, note);
    this.note.title = note;
    this.error.hidden = !s.error;
    setText(this.error, s.error ? s.error.traceback || s.error.error : '');
  }

  /** Nobody tells what becomes of the job, and when it was seen last it was not over. */
  private get isGone(): boolean {
    return this.phase === 'gone' && !this.isOver;
  }

  private statusText(s: ISnapshot): string {
    return this.isGone ? `last seen ${s.status}` : s.status;
  }

  private noteText(s: ISnapshot): string {
    if (this.isGone) {
      const seen = s.updated_at ? ` at ${format.timeOfDay(s.updated_at)}` : '';
      const lines = `%load_ext etrain_jupyter, then %etrain attach ${jobId(s.name) || s.job_id}`;
      return `Seen last${seen}; this kernel does not follow it. To follow it: ${lines}`;
    }
    if (s.reason) {
      return s.reason;
    }
    const passed = s.elapsed_s === null ? '' : `${format.clock(s.elapsed_s)} elapsed`;
    return s.eta_s === null ? passed : `${passed} · ${format.clock(s.eta_s)} left`;
  }

  /** Tell a screen reader when the status is another one, and nothing else. */
  private speak(): void {
    const { snapshot } = this.data;
    const status = this.statusText(snapshot);
    const now = Date.now();
    if (snapshot.job_id && status !== this.spokenStatus && now - this.spokenAt >= SPEAK_EVERY_MS) {
      this.spokenStatus = status;
      this.spokenAt = now;
      const reason = snapshot.reason ? `: ${snapshot.reason}` : '';
      setText(this.spoken, `Job ${snapshot.name} ${status}${reason}, ${whereabouts(snapshot)}`);
    }
  }

  private build(): void {
    this.root.setAttribute('aria-label', 'training job');
    this.spoken.setAttribute('role', 'status');
    this.spoken.setAttribute('aria-live', 'polite');
    this.progress.max = 1;
    this.progress.setAttribute('aria-label', 'progress of training');
    this.error.tabIndex = 0;
    this.error.setAttribute('aria-label', 'what made the job fail');
    const header = make('header');
    header.append(this.name, this.pill, this.spoken, this.controls.element);
    const facts = make('div', 'etrain-facts');
    facts.append(this.where, this.note);
    const lower = make('div', 'etrain-lower');
    lower.append(...(this.isCompact ? [] : [this.workers.element]), this.events.element);
    this.root.classList.toggle('etrain-compact', this.isCompact);
    this.root.append(
      header,
      this.progress,
      facts,
      this.error,
      this.tiles.element,
      this.charts.element,
      lower
    );
  }
}

function whereabouts(s: ISnapshot): string {
  const steps = s.total_steps === null ? '' : ` of ${format.count(s.total_steps)}`;
  const percent = s.progress === null ? '' : ` · ${Math.floor(s.progress * 100)} %`;
  const epochs =
    s.epochs === null
      ? ''
      : ` · epoch ${format.count(s.epoch + 1)} of ${format.count(Math.ceil(s.epochs))}`;
  return `step ${format.count(s.step)}${steps}${percent}${epochs}`;
}
