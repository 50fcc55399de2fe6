// The view of one job, free of any framework: it draws what a source brings and sends what a person asks for.
// Texts enter the page as text only, never as markup: names and messages are the user's, or a stranger's.
import { Charts } from './charts';
import { make, reconcile, scrolling, setText } from './dom';
import * as format from './format';
import { Buffer, IEventLine, ISnapshot, IWorker, JobData } from './protocol';

/** What a transport (anywidget model, JupyterLab comm) provides. */
export interface IJobSource {
  /** What the notebook keeps of the job; drawn until the kernel answers, and if it never does. */
  saved(): unknown;
  /** Hear the kernel's messages, and whether there is a way to it. Returns how to stop. */
  listen(onMessage: (content: unknown, buffers: readonly Buffer[]) => void, onLink: (isUp: boolean) => void): () => void;
  /** Send to the kernel; without one, nothing happens. */
  send(content: Record<string, unknown>): void;
}

export interface IMountedJob {
  /** The notebook keeps something newer now. */
  refresh(): void;
  unmount(): void;
}

const DRAW_EVERY_MS = 80;
const ANSWER_WITHIN_MS = 3000;
const SPEAK_EVERY_MS = 10000;
const SHOW_NOTICE_MS = 6000;
const OVER = new Set(['finished', 'stopped', 'failed']);
const STATE_SIGNS: Record<string, string> = {
  starting: '◔',
  warm: '◑',
  training: '●',
  leaving: '!',
  left: '–',
  lost: '×',
  done: '✓'
};

type Phase = 'asking' | 'live' | 'gone';

export function mountJob(host: HTMLElement, source: IJobSource): IMountedJob {
  const view = new JobElement(host, source);
  return { refresh: () => view.refresh(), unmount: () => view.unmount() };
}

class JobElement {
  private readonly data = new JobData(Math.random().toString(36).slice(2));
  private readonly root = make('section', 'etrain-job');
  private readonly name = make('strong', 'etrain-name');
  private readonly pill = make('span', 'etrain-status');
  private readonly spoken = make('span', 'etrain-spoken');
  private readonly stop = make('button', 'etrain-stop');
  private readonly progress = make('progress', 'etrain-progress');
  private readonly where = make('span', 'etrain-where');
  private readonly note = make('span', 'etrain-note');
  private readonly tiles = make('div', 'etrain-tiles');
  private readonly charts: Charts;
  private readonly workers = make('tbody');
  private readonly events = make('ol', 'etrain-events');
  private readonly error = make('pre', 'etrain-error');
  private readonly cleanups: (() => void)[] = [];
  private phase: Phase = 'asking';
  private askedAt = 0;
  private drawnAt = 0;
  private timer = 0;
  private spokenAt = 0;
  private spokenStatus = '';
  private notice = '';
  private noticeUntil = 0;
  private isStopping = false;

  constructor(host: HTMLElement, private readonly source: IJobSource) {
    this.charts = new Charts(this.build(), this.data);
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
    themes.observe(document.body, { attributes: true, attributeFilter: ['class', 'data-jp-theme-name', 'data-jp-theme-light'] });
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
    }
  }

  unmount(): void {
    this.cleanups.forEach(cleanup => cleanup());
    this.charts.destroy();
    this.root.remove();
  }

  private hello(): void {
    this.askedAt = Date.now();
    if (this.phase === 'gone') {
      this.setPhase('asking');
    }
    this.source.send({ kind: 'hello', view: this.data.view });
  }

  private onMessage(content: unknown, buffers: readonly Buffer[]): void {
    const { kind, to, level, text } = (content ?? {}) as Record<string, unknown>;
    const taken = this.data.take(content, buffers);
    if (taken === 'gap') {
      this.hello();
    } else if (taken === 'news') {
      this.setPhase('live');
    } else if (kind === 'unknown' && to === this.data.view) {
      this.setPhase('gone');
    } else if (kind === 'notice') {
      const isError = level === 'error';
      this.notice = `${isError ? 'Error: ' : ''}${String(text).slice(0, 500)}`;
      this.noticeUntil = isError ? Infinity : Date.now() + SHOW_NOTICE_MS;
      this.isStopping &&= !isError;
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
    if (this.phase === 'live' && isLate && !this.data.isSynced) {
      this.hello();
    }
    if (this.phase === 'live' && !OVER.has(this.data.snapshot.status)) {
      this.renderHeader();
      this.renderTiles(); // ages grow without messages
    }
  }

  /** Draw soon, but not more often than an eye can follow. */
  private schedule(): void {
    if (!this.timer) {
      const wait = Math.max(0, DRAW_EVERY_MS - (Date.now() - this.drawnAt));
      this.timer = window.setTimeout(() => requestAnimationFrame(() => this.draw()), wait);
    }
  }

  private draw(): void {
    this.timer = 0;
    this.drawnAt = Date.now();
    this.renderHeader();
    this.renderTiles();
    this.renderWorkers();
    this.renderEvents();
    this.charts.draw();
  }

  private get isOver(): boolean {
    return OVER.has(this.data.snapshot.status);
  }

  private renderHeader(): void {
    const s = this.data.snapshot;
    Object.assign(this.root.dataset, { jobId: s.job_id, status: s.status, step: String(s.step), phase: this.phase });
    setText(this.name, s.name);
    this.pill.dataset.status = this.phase === 'gone' && !this.isOver ? 'gone' : s.status;
    setText(this.pill, this.phase === 'gone' && !this.isOver ? `last seen ${s.status}` : s.status);
    this.pill.title = s.reason;
    if (s.progress === null) {
      this.progress.value = 0;
    } else {
      this.progress.value = s.progress;
    }
    setText(this.where, whereabouts(s));
    const note = this.noteText(s);
    setText(this.note, note);
    this.note.title = note;
    this.isStopping &&= !this.isOver;
    this.stop.disabled = this.isStopping || this.isOver || this.phase !== 'live';
    setText(this.stop, this.isStopping ? 'Stopping …' : 'Stop');
    this.error.hidden = !s.error;
    setText(this.error, s.error ? s.error.traceback || s.error.error : '');
    this.speak(s);
  }

  private noteText(s: ISnapshot): string {
    if (this.phase === 'gone' && !this.isOver) {
      const seen = s.updated_at ? ` at ${format.timeOfDay(s.updated_at)}` : '';
      const lines = `%load_ext etrain_jupyter, then %etrain attach ${s.name}`;
      return `Seen last${seen}; this kernel does not follow it. To follow it: ${lines}`;
    }
    if (this.notice && Date.now() < this.noticeUntil) {
      return this.notice;
    }
    if (s.reason) {
      return s.reason;
    }
    const passed = s.elapsed_s === null ? '' : `${format.clock(s.elapsed_s)} elapsed`;
    return s.eta_s === null ? passed : `${passed} · ${format.clock(s.eta_s)} left`;
  }

  /** Tell a screen reader: a change of status at once, else only now and then. */
  private speak(s: ISnapshot): void {
    const now = Date.now();
    if (s.status !== this.spokenStatus || now - this.spokenAt > SPEAK_EVERY_MS) {
      this.spokenStatus = s.status;
      this.spokenAt = now;
      setText(this.spoken, `${s.name} ${s.status}, ${whereabouts(s)}, loss ${format.number(s.loss)}`);
    }
  }

  private renderTiles(): void {
    const s = this.data.snapshot;
    const tiles: [string, string, string][] = [
      ['loss', format.number(s.loss), s.eval ? `eval ${format.number(s.eval.loss)}` : ''],
      ...s.charts.metrics.slice(0, 2).map((name): [string, string, string] => {
        const evaluated = s.eval?.metrics[name];
        return [name, format.number(s.metrics[name]), evaluated === undefined ? '' : `eval ${format.number(evaluated)}`];
      }),
      ['samples/s', format.count(s.samples_per_s), s.global_batch_size === null ? '' : `batch ${format.count(s.global_batch_size)}`],
      ['workers', String(s.world_size) + (s.max_workers === null ? '' : ` of ${s.max_workers}`), `generation ${s.generation}`],
      ['checkpoint', s.checkpoint ? `step ${format.count(s.checkpoint.step)}` : format.NONE, this.checkpointAge(s)],
      ['faults', String(s.num_lost + s.num_preempted), faults(s)]
    ];
    while (this.tiles.children.length > tiles.length) {
      this.tiles.lastChild!.remove();
    }
    tiles.forEach((texts, i) => {
      let tile = this.tiles.children[i];
      if (!tile) {
        tile = make('div');
        tile.append(make('span', 'etrain-label'), make('strong'), make('span', 'etrain-sub'));
        this.tiles.append(tile);
      }
      texts.forEach((text, j) => setText(tile.children[j] as HTMLElement, text));
      (tile as HTMLElement).title = texts.filter(Boolean).join(' · ');
    });
  }

  private checkpointAge(s: ISnapshot): string {
    if (!s.checkpoint) {
      return 'none yet';
    }
    const size = format.size(s.checkpoint.size_bytes);
    return this.isOver || this.phase !== 'live' ? size : `${format.age(Date.now() / 1000 - s.checkpoint.time)} ago · ${size}`;
  }

  private renderWorkers(): void {
    reconcile(this.workers, this.data.snapshot.workers, worker => worker.worker, makeRow, fillRow);
  }

  private renderEvents(): void {
    const newestFirst = [...this.data.snapshot.events].reverse();
    reconcile(this.events, newestFirst, event => `${event.seq} ${event.time} ${event.text}`, makeEvent, () => undefined);
  }

  private requestStop(): void {
    this.isStopping = true;
    this.notice = '';
    this.source.send({ kind: 'request', request: 'stop', args: {} });
    this.schedule();
  }

  private build(): HTMLElement {
    this.spoken.setAttribute('role', 'status');
    this.spoken.setAttribute('aria-live', 'polite');
    this.stop.type = 'button';
    this.stop.title = 'Stop after the present step and keep a checkpoint';
    this.stop.onclick = () => this.requestStop();
    this.progress.max = 1;
    this.progress.setAttribute('aria-label', 'progress of training');
    const header = make('header');
    header.append(this.name, this.pill, this.spoken, this.stop);
    const facts = make('div', 'etrain-facts');
    facts.append(this.where, this.note);
    const charts = make('div', 'etrain-charts');
    const lower = make('div', 'etrain-lower');
    lower.append(this.buildWorkers(), this.buildEvents());
    this.root.append(header, this.progress, facts, this.error, this.tiles, charts, lower);
    return charts;
  }

  private buildWorkers(): HTMLElement {
    const table = make('table');
    const head = make('thead');
    const row = make('tr');
    for (const title of ['rank', 'worker', 'state', 'device', 'pid', 'steps']) {
      const cell = make('th');
      cell.scope = 'col';
      cell.textContent = title;
      row.append(cell);
    }
    head.append(row);
    table.append(head, this.workers);
    return scrolling('etrain-workers', 'workers', table);
  }

  private buildEvents(): HTMLElement {
    return scrolling('etrain-log', 'events', this.events);
  }
}

function whereabouts(s: ISnapshot): string {
  const steps = s.total_steps === null ? '' : ` of ${format.count(s.total_steps)}`;
  const epochs = s.epochs === null ? '' : ` · epoch ${s.epoch + 1} of ${Math.ceil(s.epochs)}`;
  return `step ${format.count(s.step)}${steps}${epochs}`;
}

function faults(s: ISnapshot): string {
  const parts = [];
  if (s.num_lost) {
    parts.push(`${s.num_lost} lost`);
  }
  if (s.num_preempted) {
    parts.push(`${s.num_preempted} preempted`);
  }
  return parts.join(', ') || 'none';
}

function makeRow(): HTMLElement {
  const row = make('tr');
  for (let i = 0; i < 6; i++) {
    row.append(make('td'));
  }
  return row;
}

function fillRow(row: HTMLElement, worker: IWorker): void {
  row.dataset.state = worker.state;
  const state = `${STATE_SIGNS[worker.state] ?? ''} ${worker.state}${worker.note ? `: ${worker.note}` : ''}`.trim();
  const texts = [
    worker.rank === null ? '' : String(worker.rank),
    worker.worker,
    state,
    worker.device,
    worker.trainer_pid === null ? '' : String(worker.trainer_pid),
    format.count(worker.steps)
  ];
  texts.forEach((text, i) => setText(row.children[i] as HTMLElement, text));
  (row.children[2] as HTMLElement).title = state;
}

function makeEvent(event: IEventLine): HTMLElement {
  const item = make('li');
  item.dataset.level = event.level;
  const time = make('time');
  time.textContent = format.timeOfDay(event.time);
  const level = event.level === 'warning' || event.level === 'error' ? `${event.level}: ` : '';
  const text = make('span');
  text.textContent = level + event.text;
  item.append(time, text);
  return item;
}
