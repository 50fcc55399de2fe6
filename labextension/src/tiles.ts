// The key figures of a job.
import { make, setText } from './dom';
import * as format from './format';
import { checkpointTrouble } from './protocol';
import { ICostSummary, ISnapshot } from './snapshot';

interface ITile {
  name: string;
  figure: string;
  /** Small text below the figure. */
  detail?: string;
  /** Problem that the tile warns of. */
  alarm?: string;
}

const MAX_METRICS = 2;

export class Tiles {
  readonly element = make('div', 'etrain-tiles');

  /** `now` is in seconds; null if the snapshot receives no updates: then its own time counts. */
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

function fill(
  tile: HTMLElement,
  { name, figure, detail = '', alarm = '' }: ITile,
  failure: string
): void {
  [name, figure, detail].forEach((text, i) => setText(tile.children[i] as HTMLElement, text));
  tile.dataset.tile = name;
  tile.dataset.alarm = alarm;
  tile.title = [name, figure, detail, alarm === 'failed' ? failure : '']
    .filter(Boolean)
    .join(' · ');
}

function parameterTile(s: ISnapshot, total: number): ITile {
  const trained = s.num_trained_parameters ?? total;
  const detail = trained === total ? 'all trained' : `of ${format.count(total)} trained`;
  return { name: 'parameters', figure: format.count(trained), detail };
}

function tilesOf(s: ISnapshot, now: number | null): ITile[] {
  const trouble = checkpointTrouble(s, now ?? s.updated_at);
  const tiles: ITile[] = [
    {
      name: 'loss',
      figure: format.number(s.loss),
      detail: s.eval ? `eval ${format.number(s.eval.loss)}` : ''
    },
    ...s.charts.metrics.slice(0, MAX_METRICS).map(name => metricTile(s, name)),
    { name: 'samples/s', figure: format.count(s.samples_per_s) },
    {
      name: 'batch',
      figure: format.count(s.global_batch_size),
      detail: s.lr === null ? '' : `lr ${format.brief(s.lr)}`
    },
    ...(s.num_parameters ? [parameterTile(s, s.num_parameters)] : []),
    {
      name: 'workers',
      figure: String(s.world_size) + (s.max_workers === null ? '' : ` of ${s.max_workers}`),
      detail: `generation ${s.generation}`
    },
    {
      name: 'checkpoint',
      figure: s.checkpoint ? `step ${format.count(s.checkpoint.step)}` : format.NONE,
      detail: checkpointAge(s, now, trouble),
      alarm: trouble
    }
  ];
  if (s.cost) {
    tiles.push({
      name: 'cost',
      figure: format.money(s.cost.spent_usd),
      detail: costDetail(s.cost)
    });
  }
  tiles.push({ name: 'faults', figure: String(s.num_lost + s.num_preempted), detail: faults(s) });
  return tiles;
}

function metricTile(s: ISnapshot, name: string): ITile {
  const evaluated = s.eval?.metrics[name];
  const detail = evaluated === undefined ? '' : `eval ${format.number(evaluated)}`;
  return { name, figure: format.number(s.metrics[name]), detail };
}

function checkpointAge(s: ISnapshot, now: number | null, trouble: string): string {
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

/** Describe what spot machines saved against on-demand prices, and what preemptions wasted. */
function costDetail(cost: ICostSummary): string {
  const part = (usd: number, word: string): string[] =>
    usd > 0 ? [`${format.money(usd)} ${word}`] : [];
  return [...part(cost.saved_usd, 'saved'), ...part(cost.wasted_usd, 'wasted')].join(' · ');
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
