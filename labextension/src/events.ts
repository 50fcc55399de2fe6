// The list of events, newest first, with filters by text and level.
import { make, reconcile, scrolling, setText } from './dom';
import * as format from './format';
import { IEventLine } from './snapshot';

const LEVELS: [string, string][] = [
  ['all', 'all levels'],
  ['warning', 'warnings and errors'],
  ['error', 'errors']
];
const SEVERITY: Record<string, number> = { warning: 1, error: 2 };
const WORDS: Record<string, string> = { warning: 'warning', error: 'error' };
const MAX_LISTED = 300;

export class Events {
  readonly element = make('section', 'etrain-panel');
  private readonly list = make('ol', 'etrain-events');
  private readonly text = make('input', 'etrain-filter');
  private readonly level = make('select', 'etrain-level');
  private readonly count = make('span', 'etrain-count');
  private readonly none = make('p', 'etrain-more');
  private events: IEventLine[] = [];

  constructor() {
    const title = make('h4');
    title.textContent = 'events';
    this.text.type = 'search';
    this.text.placeholder = 'filter';
    this.text.setAttribute('aria-label', 'show events that contain');
    this.text.oninput = () => this.fill();
    this.level.setAttribute('aria-label', 'show events of level');
    for (const [value, word] of LEVELS) {
      const option = make('option');
      option.value = value;
      option.textContent = word;
      this.level.append(option);
    }
    this.level.onchange = () => this.fill();
    const bar = make('div', 'etrain-bar');
    bar.append(title, this.count, this.text, this.level);
    const box = scrolling('etrain-log', 'events', this.list);
    box.append(this.none);
    this.element.append(bar, box);
  }

  draw(events: IEventLine[]): void {
    if (events !== this.events) {
      this.events = events;
      this.fill();
    }
  }

  private fill(): void {
    const words = this.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const least = SEVERITY[this.level.value] ?? 0;
    const shown = this.events
      .filter(event => (SEVERITY[event.level] ?? 0) >= least)
      .filter(event =>
        words.every(word =>
          `${event.level} ${event.kind} ${event.text}`.toLowerCase().includes(word)
        )
      )
      .slice(-MAX_LISTED)
      .reverse();
    reconcile(
      this.list,
      shown,
      event => `${event.seq} ${event.time} ${event.text}`,
      makeEvent,
      () => undefined
    );
    const isFiltered = least > 0 || words.length > 0;
    setText(
      this.count,
      isFiltered ? `${shown.length} of ${this.events.length}` : String(this.events.length)
    );
    this.none.hidden = shown.length > 0;
    setText(this.none, this.events.length ? 'No events match.' : 'No events yet.');
  }
}

function makeEvent(event: IEventLine): HTMLElement {
  const item = make('li');
  item.dataset.level = event.level;
  const time = make('time');
  time.textContent = format.timeOfDay(event.time);
  const level = make('b');
  level.textContent = WORDS[event.level] ?? '';
  const text = make('span');
  text.textContent = event.text;
  item.append(time, level, text);
  return item;
}
