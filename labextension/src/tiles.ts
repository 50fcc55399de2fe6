// The figures of a job at a glance.
import { make, setText } from './dom';
import * as format from './format';
import { checkpointTrouble, ISnapshot } from './protocol';

/** A name, its figure, what goes with it, and whether something is wrong. */
type Tile = [name: string, figure: string, more: string, alarm?: string];

export class Tiles {
  readonly element = make('div', 'etrain-tiles');

  /** `now` is in seconds; null where nobody brings the picture up to date: it is judged by its own time. */
  draw(s: ISnapshot, now: number | null): void {
    const tiles = tilesOf(s, now);
    while (this.element.children.length > tiles.length) {
      this.element.lastChild?.remove();
    }
    tiles.forEach((tile, i) => fill(this.tile(i), tile, s.checkpoint_due.failed));
  }

  private tile(i: number): HTMLElement {
    const present = this.element.children.item(i);
    if (present) {
      return present as HTMLElement;
    }
    const tile = make('div');
    tile.append(make('span', 'etrain-label'), make('strong'), make('span', 'etrain-sub'));
    this.element.append(tile);
    return tile;
  }
}

function fill(tile: HTMLElement, [name, figure, more, alarm]: Tile, failure: string): void {
  [name, figure, more].forEach((text, i) => setText(tile.children[i] as HTMLElement, text));
  tile.dataset.tile = name;
  tile.dataset.alarm = alarm ?? '';
  tile.title = [name, figure, more, alarm === 'failed' ? failure : ''].filter(Boolean).join(' · ');
}

function tilesOf(s: ISnapshot, now: number | null): Tile[] {
  const trouble = checkpointTrouble(s, now ?? s.updated_at);
  return [
    ['loss', format.number(s.loss), s.eval ? `eval ${format.number(s.eval.loss)}` : ''],
    ...s.charts.metrics.slice(0, 2).map((name): Tile => {
      const evaluated = s.eval?.metrics[name];
      return [
        name,
        format.number(s.metrics[name]),
        evaluated === undefined ? '' : `eval ${format.number(evaluated)}`
      ];
    }),
    ['samples/s', format.count(s.samples_per_s), ''],
    ['batch', format.count(s.global_batch_size), s.lr === null ? '' : `lr ${format.brief(s.lr)}`],
    [
      'workers',
      String(s.world_size) + (s.max_workers === null ? '' : ` of ${s.max_workers}`),
      `generation ${s.generation}`
    ],
    [
      'checkpoint',
      s.checkpoint ? `step ${format.count(s.checkpoint.step)}` : format.NONE,
      age(s, now, trouble),
      trouble
    ],
    ...(s.cost ? [['cost', format.money(s.cost.spent_usd), apart(s.cost)] as Tile] : []),
    ['faults', String(s.num_lost + s.num_preempted), faults(s)]
  ];
}

function age(s: ISnapshot, now: number | null, trouble: string): string {
  const parts = trouble ? [trouble] : [];
  if (!s.checkpoint) {
    return [...parts, 'none yet'].join(' · ');
  }
  if (now !== null) {
    parts.push(format.age(now - s.checkpoint.time) + (trouble ? '' : ' ago'));
  }
  if (!trouble) {
    parts.push(format.size(s.checkpoint.size_bytes));
  }
  return parts.join(' · ');
}

/** What was saved against on-demand prices, and what preemptions wasted. */
function apart(cost: NonNullable<ISnapshot['cost']>): string {
  const told = (usd: number, word: string): string[] =>
    usd > 0 ? [`${format.money(usd)} ${word}`] : [];
  return [...told(cost.saved_usd, 'saved'), ...told(cost.wasted_usd, 'wasted')].join(' · ');
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
