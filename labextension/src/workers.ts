// The table of workers: rank, state, device, throughput, time split and what each waits for.
import { find, make, reconcile, scrolling, setText } from './dom';
import * as format from './format';
import { ISnapshot, IWorkerRow } from './snapshot';

/** The snapshot has at most 100 rows; a saved notebook of another user may have more. */
const MAX_ROWS = 200;
const TITLES = [
  'rank',
  'worker',
  'state',
  'device',
  'samples/s',
  'time goes into',
  'waits for',
  'steps',
  ''
];
const SIGNS: Record<string, string> = {
  starting: '◔',
  warm: '◑',
  training: '●',
  waiting: '‖',
  leaving: '!',
  left: '–',
  lost: '×',
  done: '✓'
};
const PARTS: [string, string][] = [
  ['data', 'data'],
  ['compute', 'forward and backward'],
  ['communication', 'other ranks'],
  ['optimizer', 'optimizer'],
  ['other', 'other']
];

export class Workers {
  readonly element: HTMLElement;
  private readonly body = make('tbody');
  private readonly more = make('p', 'etrain-more');

  /** `onPreempt` receives the worker whose Preempt button was pressed. */
  constructor(private readonly onPreempt: (worker: string, opener: HTMLElement) => void) {
    const table = make('table');
    const caption = make('caption', 'etrain-visually-hidden');
    caption.textContent = 'Workers';
    table.append(caption, this.head(), this.body);
    this.element = make('section', 'etrain-panel');
    const title = make('h4');
    title.textContent = 'workers';
    const bar = make('div', 'etrain-bar');
    bar.append(title, this.key());
    const box = scrolling('etrain-workers', 'workers', table);
    this.more.hidden = true;
    box.append(this.more);
    this.element.append(bar, box);
  }

  draw(snapshot: ISnapshot, whyNoPreemption: string): void {
    const { workers } = snapshot;
    this.element.classList.toggle(
      'etrain-with-machines',
      workers.some(worker => worker.machine)
    );
    reconcile(
      this.body,
      workers.slice(0, MAX_ROWS),
      worker => worker.worker,
      () => this.makeRow(),
      (row, worker) => fill(row, worker, whyNoPreemption)
    );
    const numMore = snapshot.num_more_workers + Math.max(0, workers.length - MAX_ROWS);
    this.more.hidden = numMore === 0;
    setText(this.more, `and ${format.count(numMore)} more`);
  }

  private head(): HTMLElement {
    const head = make('thead');
    const row = make('tr');
    for (const title of TITLES) {
      const cell = make('th');
      cell.scope = 'col';
      cell.textContent = title;
      row.append(cell);
    }
    row.lastElementChild?.setAttribute('aria-label', 'requests');
    head.append(row);
    return head;
  }

  private key(): HTMLElement {
    const element = make('span', 'etrain-key');
    for (const [name, word] of PARTS.slice(0, 4)) {
      const item = make('span');
      const patch = make('i', 'etrain-part');
      patch.dataset.part = name;
      item.append(patch, ` ${word}`);
      element.append(item);
    }
    return element;
  }

  private makeRow(): HTMLElement {
    const row = make('tr');
    row.append(...TITLES.map(() => make('td')));
    const bar = make('span', 'etrain-split');
    bar.setAttribute('role', 'img');
    bar.append(...PARTS.map(([name]) => part(name)));
    row.children[5].append(bar);
    const button = make('button', 'etrain-button etrain-preempt');
    button.type = 'button';
    button.textContent = 'Preempt';
    button.onclick = () => this.onPreempt(row.dataset.worker ?? '', button);
    row.children[8].append(button);
    return row;
  }
}

function part(name: string): HTMLElement {
  const element = make('i', 'etrain-part');
  element.dataset.part = name;
  return element;
}

function fill(row: HTMLElement, worker: IWorkerRow, whyNoPreemption: string): void {
  row.dataset.state = worker.state;
  row.dataset.worker = worker.worker;
  const state = `${SIGNS[worker.state] ?? '·'} ${worker.state}${worker.note ? `: ${worker.note}` : ''}`;
  const isPresent = !['left', 'lost'].includes(worker.state);
  const isStepping = worker.state === 'training' || worker.state === 'leaving';
  const texts: Record<number, string> = {
    0: worker.rank === null ? '' : String(worker.rank),
    1: worker.worker,
    2: state,
    3: machineOf(worker),
    4: worker.split && isStepping ? format.count(worker.split.samples_per_s) : format.NONE,
    6: worker.waits_for || (isPresent ? format.NONE : ''),
    7: format.count(worker.steps)
  };
  for (const [i, text] of Object.entries(texts)) {
    const cell = row.children[Number(i)] as HTMLElement;
    setText(cell, text);
    cell.title = text;
  }
  if (worker.trainer_pid !== null) {
    (row.children[1] as HTMLElement).title =
      `${worker.worker} on ${worker.device}, process ${worker.trainer_pid}`;
  }
  if (worker.machine) {
    const price =
      worker.usd_per_h === null
        ? ''
        : `, ${format.money(worker.usd_per_h)} per hour when it joined`;
    (row.children[3] as HTMLElement).title =
      `${worker.device} of ${worker.machine} in ${worker.zone}, ${worker.lifecycle}${price}`;
  }
  fillSplit(row.children[5].firstElementChild as HTMLElement, worker, isPresent);
  const button = row.children[8].firstElementChild as HTMLElement;
  button.hidden = worker.state !== 'training';
  button.setAttribute('aria-disabled', String(!!whyNoPreemption));
  button.setAttribute('aria-label', `Preempt ${worker.worker}`);
  button.title = whyNoPreemption || `Preempt ${worker.worker} with a notice`;
}

/** Type and price of the worker's machine if the pool reports them, else its device. */
function machineOf(worker: IWorkerRow): string {
  const price = worker.usd_per_h === null ? '' : ` ${format.money(worker.usd_per_h)}/h`;
  return worker.machine ? `${worker.machine}${price}` : worker.device;
}

function fillSplit(bar: HTMLElement, worker: IWorkerRow, isPresent: boolean): void {
  const split = isPresent ? worker.split : null;
  bar.dataset.empty = String(!split);
  const words = PARTS.map(([name, word]) => {
    const reported = split?.shares[name] ?? 0;
    const share = Number.isNaN(reported) ? 0 : Math.min(1, Math.max(0, reported));
    find(bar, `[data-part='${name}']`).style.flexGrow = String(share);
    return `${word} ${Math.round(share * 100)} %`;
  });
  const summary = split
    ? `${words.join(', ')} (${format.count(split.num_steps)} steps up to step ${format.count(split.step)})`
    : 'not reported yet';
  bar.title = summary;
  bar.setAttribute('aria-label', summary);
}
