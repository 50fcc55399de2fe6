// The table of workers: who they are, what they do, where their time goes, what they wait for.
import { find, make, reconcile, scrolling, setText } from './dom';
import * as format from './format';
import { ISnapshot, IWorker } from './protocol';

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

  /** `onPreempt` hears of the button of a row. */
  constructor(private readonly onPreempt: (worker: string, opener: HTMLElement) => void) {
    const table = make('table');
    const caption = make('caption', 'etrain-spoken');
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
    this.more.hidden = workers.length <= MAX_ROWS;
    setText(this.more, `and ${format.count(workers.length - MAX_ROWS)} more`);
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

function fill(row: HTMLElement, worker: IWorker, whyNoPreemption: string): void {
  row.dataset.state = worker.state;
  row.dataset.worker = worker.worker;
  const state = `${SIGNS[worker.state] ?? '·'} ${worker.state}${worker.note ? `: ${worker.note}` : ''}`;
  const isThere = !['left', 'lost'].includes(worker.state);
  const isStepping = worker.state === 'training' || worker.state === 'leaving';
  const texts: Record<number, string> = {
    0: worker.rank === null ? '' : String(worker.rank),
    1: worker.worker,
    2: state,
    3: machineOf(worker),
    4: worker.split && isStepping ? format.count(worker.split.samples_per_s) : format.NONE,
    6: worker.waits_for || (isThere ? format.NONE : ''),
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
      worker.usd_per_h === null ? '' : `, ${format.money(worker.usd_per_h)} an hour when it joined`;
    (row.children[3] as HTMLElement).title =
      `${worker.device} of ${worker.machine} in ${worker.zone}, ${worker.lifecycle}${price}`;
  }
  fillSplit(row.children[5].firstElementChild as HTMLElement, worker, isThere);
  const button = row.children[8].firstElementChild as HTMLElement;
  button.hidden = worker.state !== 'training';
  button.setAttribute('aria-disabled', String(!!whyNoPreemption));
  button.setAttribute('aria-label', `Preempt ${worker.worker}`);
  button.title = whyNoPreemption || `Take ${worker.worker} away with a notice`;
}

/** The type and the price of the worker's machine where its pool knows them, else its device. */
function machineOf(worker: IWorker): string {
  const price = worker.usd_per_h === null ? '' : ` ${format.money(worker.usd_per_h)}/h`;
  return worker.machine ? `${worker.machine}${price}` : worker.device;
}

function fillSplit(bar: HTMLElement, worker: IWorker, isThere: boolean): void {
  const split = isThere ? worker.split : null;
  bar.dataset.empty = String(!split);
  const words = PARTS.map(([name, word]) => {
    const told = split?.shares[name] ?? 0;
    const share = Number.isNaN(told) ? 0 : Math.min(1, Math.max(0, told));
    find(bar, `[data-part='${name}']`).style.flexGrow = String(share);
    return `${word} ${Math.round(share * 100)} %`;
  });
  const told = split
    ? `${words.join(', ')} of ${format.count(split.num_steps)} steps up to ${format.count(split.step)}`
    : 'not told yet: a worker tells now and then';
  bar.title = told;
  bar.setAttribute('aria-label', told);
}
