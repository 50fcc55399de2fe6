// The panel of exhibits: one figure, text or table of an evaluation, with a slider over steps. The
// kernel sends the content of an exhibit when it is displayed for the first time. Without a kernel,
// the newest ones come from the saved notebook.
import { make, reconcile, setText } from './dom';
import { asExhibit, Cell, IExhibit, indexOfStep, ITable, savedExhibits } from './exhibit_data';
import * as format from './format';
import { Buffer } from './job_data';
import { IExhibitSeries } from './snapshot';

const ANSWER_WITHIN_MS = 35000;
/** Interval of requests for a displayed exhibit that could not be read, for example not uploaded. */
const RETRY_EVERY_MS = 10000;
/** Maximum number of contents kept for the slider. */
const MAX_KEPT = 50;

const keyOf = (name: string, step: number) => `${step} ${name}`;

export class Exhibits {
  readonly element = make('section', 'etrain-panel etrain-exhibits');
  private readonly name = make('select');
  private readonly slider = make('input');
  private readonly position = make('output', 'etrain-position');
  private readonly box = make('div', 'etrain-exhibit');
  private readonly note = make('p', 'etrain-more');
  private series: readonly IExhibitSeries[] = [];
  private isLive = false;
  /** The step that the user has moved the slider to; null to follow the newest one. */
  private chosen: number | null = null;
  private readonly kept = new Map<string, IExhibit>();
  private requested = '';
  private requestedAt = 0;
  private failedAt = 0;
  private drawn = '';

  /** `onRequest` receives the name and the step of an exhibit to request from the kernel. */
  constructor(private readonly onRequest: (name: string, step: number) => void) {
    const title = make('h4');
    title.textContent = 'exhibits';
    this.name.setAttribute('aria-label', 'exhibit');
    this.name.onchange = () => this.show();
    this.slider.type = 'range';
    this.slider.min = '0';
    this.slider.step = '1';
    this.slider.setAttribute('aria-label', 'step of the exhibit');
    this.slider.oninput = () => this.choose(Number(this.slider.value));
    const bar = make('div', 'etrain-bar');
    bar.append(title, this.name, this.slider, this.position);
    this.box.tabIndex = 0;
    this.box.setAttribute('role', 'region');
    this.box.setAttribute('aria-label', 'content of the exhibit');
    this.element.append(bar, this.box, this.note);
    this.element.hidden = true;
  }

  /** Load the exhibits that the notebook has saved. */
  load(saved: unknown): void {
    for (const exhibit of savedExhibits(saved)) {
      this.keep(exhibit);
    }
  }

  /**
   * Draw the exhibits of a job. Without a kernel, only contents that have arrived, or that the
   * notebook has saved, are shown.
   */
  draw(series: readonly IExhibitSeries[], isLive: boolean): void {
    this.series = series.filter(one => one.steps.length > 0);
    this.isLive = isLive;
    this.element.hidden = this.series.length === 0;
    if (this.series.length > 0) {
      reconcile(
        this.name,
        [...this.series],
        one => one.name,
        makeOption,
        () => undefined
      );
      this.show();
    }
  }

  /** Take the kernel's answer to a request. */
  take(message: unknown, buffers: readonly Buffer[]): void {
    const exhibit = asExhibit(message, buffers);
    const key = keyOf(exhibit.name, exhibit.step);
    if (key === this.requested) {
      this.requested = '';
    }
    if (key === this.drawn) {
      this.drawn = '';
    }
    if (exhibit.error !== null) {
      this.failedAt = Date.now();
    }
    this.keep(exhibit);
    if (!this.element.hidden) {
      this.show();
    }
  }

  /** Forget the contents: the job went back to an older step, and may evaluate it again. */
  forget(): void {
    this.kept.clear();
    this.requested = this.drawn = '';
  }

  private keep(exhibit: IExhibit): void {
    const key = keyOf(exhibit.name, exhibit.step);
    this.kept.delete(key);
    this.kept.set(key, exhibit);
    while (this.kept.size > MAX_KEPT) {
      this.kept.delete(this.kept.keys().next().value ?? '');
    }
  }

  private get selected(): IExhibitSeries {
    return this.series.find(one => one.name === this.name.value) ?? this.series[0];
  }

  private choose(index: number): void {
    const { steps } = this.selected;
    this.chosen = index < steps.length - 1 ? steps[index] : null;
    this.show();
  }

  private show(): void {
    const { name, steps } = this.selected;
    const index = indexOfStep(steps, this.chosen);
    const step = steps[index];
    this.slider.max = String(steps.length - 1);
    this.slider.value = String(index);
    this.slider.disabled = steps.length < 2;
    const label = `step ${format.count(step)} (${index + 1} of ${steps.length})`;
    this.slider.setAttribute('aria-valuetext', label);
    setText(this.position, label);
    const key = keyOf(name, step);
    const exhibit = this.kept.get(key);
    if (exhibit) {
      this.fill(key, exhibit);
    }
    const isFailed = exhibit && exhibit.error !== null;
    if (!exhibit || (isFailed && Date.now() - this.failedAt > RETRY_EVERY_MS)) {
      this.request(key, name, step);
    }
    this.box.classList.toggle('etrain-stale', this.drawn !== key);
    this.box.hidden = !exhibit && !this.isLive;
    this.note.hidden = exhibit !== undefined || this.isLive;
    setText(
      this.note,
      'The notebook does not contain this exhibit. To load it, attach to the job with %etrain attach.'
    );
  }

  /** Request one exhibit at a time, so that dragging the slider does not queue requests. */
  private request(key: string, name: string, step: number): void {
    const isWaiting = this.requested && Date.now() - this.requestedAt < ANSWER_WITHIN_MS;
    if (this.isLive && !isWaiting) {
      this.requested = key;
      this.requestedAt = Date.now();
      this.onRequest(name, step);
    }
  }

  private fill(key: string, exhibit: IExhibit): void {
    if (this.drawn !== key) {
      this.drawn = key;
      this.box.replaceChildren(contentOf(exhibit));
    }
  }
}

function makeOption(series: IExhibitSeries): HTMLElement {
  const option = make('option');
  option.value = series.name;
  option.textContent = series.name;
  return option;
}

function contentOf(exhibit: IExhibit): HTMLElement {
  if (exhibit.picture !== null) {
    const picture = make('img');
    picture.src = exhibit.picture;
    picture.alt = `${exhibit.name} at step ${format.count(exhibit.step)}`;
    return picture;
  }
  if (exhibit.table !== null) {
    return tableOf(exhibit.table);
  }
  const lines = make('pre', exhibit.error === null ? '' : 'etrain-failure');
  lines.textContent = exhibit.error ?? exhibit.text;
  return lines;
}

function tableOf({ columns, rows }: ITable): HTMLElement {
  const table = make('table');
  const head = make('thead');
  const names = make('tr');
  for (const column of columns) {
    const cell = make('th');
    cell.scope = 'col';
    cell.textContent = column;
    names.append(cell);
  }
  head.append(names);
  const body = make('tbody');
  for (const row of rows) {
    const line = make('tr');
    line.append(...row.map(cellOf));
    body.append(line);
  }
  table.append(head, body);
  return table;
}

function cellOf(value: Cell): HTMLElement {
  const cell = make('td');
  const exact = value === null ? '' : String(value);
  const isNumber = typeof value === 'number';
  cell.textContent = isNumber && !Number.isInteger(value) ? format.number(value) : exact;
  cell.title = exact;
  cell.classList.toggle('etrain-number', isNumber);
  return cell;
}
