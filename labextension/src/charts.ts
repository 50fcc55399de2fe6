// The charts: loss, each metric, world size and throughput over the same steps, with what happened marked on them.
import uPlot from 'uplot';
import { Curve, Points, roomFor, thin } from './columns';
import * as format from './format';
import { IMarker, ISnapshot, JobData } from './protocol';

const HEIGHT = 150;
const AXIS_WIDTH = 46;
const MARKER_REACH = 6;
const STEPS = [1, 2, 5].flatMap(m => [0, 1, 2, 3, 4, 5, 6, 7, 8].map(e => m * 10 ** e)).sort((a, b) => a - b);
const SYMBOLS: Record<string, string> = { lost: '×', failed: '■', notice: '!', join: '+', left: '−', restored: '↶', checkpoint: '▾' };
/** Where two fall on one spot, the one that stands first here is drawn. */
const WEIGHTIEST = ['failed', 'lost', 'restored', 'notice', 'waiting', 'paused', 'join', 'left', 'checkpoint'];
const weight = (marker: IMarker) => WEIGHTIEST.indexOf(marker.kind);
const MARKED_EVERYWHERE = new Set(['lost', 'failed', 'restored', 'notice', 'join']);

interface ILine {
  /** The name of its curve. */
  curve: string;
  label: string;
  /** The CSS variable of its colour. */
  colour: string;
  isSparse?: boolean;
  isStairs?: boolean;
}
interface IChartSpec {
  title: string;
  lines: ILine[];
  fromZero?: boolean;
  isCount?: boolean;
  isWorld?: boolean;
}

const TRAIN = '--etrain-train';
const EVAL = '--etrain-eval';

/** Which charts a job has; known from its configuration, so that none appears late. */
function specs(snapshot: ISnapshot): IChartSpec[] {
  const pair = (title: string, train: string, evaluation: string): IChartSpec => ({
    title,
    lines: [
      { curve: train, label: 'train', colour: TRAIN },
      ...(snapshot.charts.has_eval ? [{ curve: evaluation, label: 'eval', colour: EVAL, isSparse: true }] : [])
    ]
  });
  return [
    pair('loss', 'loss', 'eval.loss'),
    ...snapshot.charts.metrics.map(name => pair(name, `metrics.${name}`, `eval.${name}`)),
    {
      title: 'workers',
      lines: [{ curve: 'world_size', label: '', colour: TRAIN, isStairs: true }],
      fromZero: true,
      isCount: true,
      isWorld: true
    },
    { title: 'samples/s', lines: [{ curve: 'samples_per_s', label: '', colour: TRAIN }], fromZero: true }
  ];
}

/** All charts of one view: one range of steps, one cursor. */
export class Charts {
  private charts: Chart[] = [];
  private signature = '';
  private zoom: [number, number] | null = null;
  private readonly sync = uPlot.sync(`etrain-${Math.random().toString(36).slice(2)}`);

  constructor(private readonly host: HTMLElement, private readonly data: JobData) {}

  /** Draw what the data hold now. */
  draw(): void {
    if (!this.host.clientWidth) {
      return; // JupyterLab renders outputs before it attaches them; the resize observer draws then
    }
    this.arrange();
    const [min, max] = this.range();
    for (const chart of this.charts) {
      chart.draw(min, max);
    }
  }

  resize(): void {
    this.charts.forEach(chart => chart.resize());
    this.draw();
  }

  destroy(): void {
    this.charts.forEach(chart => chart.destroy());
    this.charts = [];
  }

  setZoom(range: [number, number] | null): void {
    this.zoom = range;
    this.draw();
  }

  private range(): [number, number] {
    const { step, total_steps, status } = this.data.snapshot;
    const isOver = ['finished', 'stopped', 'failed'].includes(status);
    return this.zoom ?? [0, isOver ? Math.max(1, step) : roomFor(step, total_steps)];
  }

  private arrange(): void {
    const wanted = specs(this.data.snapshot);
    const signature = JSON.stringify(wanted);
    if (signature === this.signature) {
      return;
    }
    this.signature = signature;
    this.destroy();
    this.host.replaceChildren();
    this.charts = wanted.map(spec => new Chart(this.host, spec, this.data, this.sync, range => this.setZoom(range)));
    this.charts.forEach(chart => chart.resize()); // the first ones took the width that others share now
  }
}

class Chart {
  private readonly figure = document.createElement('figure');
  private readonly legend = document.createElement('span');
  private readonly tip = document.createElement('div');
  private readonly body = document.createElement('div');
  private readonly plot: uPlot;
  private x: [number, number] = [0, 1];
  private y: [number, number] = [0, 1];

  constructor(
    host: HTMLElement,
    private readonly spec: IChartSpec,
    private readonly data: JobData,
    sync: uPlot.SyncPubSub,
    private readonly onZoom: (range: [number, number] | null) => void
  ) {
    this.figure.className = 'etrain-chart';
    const caption = document.createElement('figcaption');
    const title = document.createElement('strong');
    title.textContent = spec.title;
    this.legend.className = 'etrain-legend';
    caption.append(title, ...(spec.isWorld ? [key()] : []), this.legend);
    this.body.className = 'etrain-plot';
    this.body.setAttribute('role', 'img');
    this.tip.className = 'etrain-tip';
    this.tip.hidden = true;
    this.figure.append(caption, this.body);
    host.append(this.figure);
    this.plot = new uPlot(this.options(sync), [[]], this.body);
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener('dblclick', () => this.onZoom(null));
  }

  draw(min: number, max: number): void {
    const width = Math.max(50, this.plot.width - AXIS_WIDTH);
    const lines = this.spec.lines.map(line => this.points(line, min, max, width));
    this.x = [min, max];
    this.y = this.spread(lines);
    // One line needs no joining, and a staircase may have two points at one step.
    const table = lines.length === 1 ? lines[0] : uPlot.join(lines);
    this.plot.setData(table as uPlot.AlignedData);
    this.describe();
  }

  resize(): void {
    if (this.body.clientWidth && this.body.clientWidth !== this.plot.width) {
      this.plot.setSize({ width: this.body.clientWidth, height: HEIGHT });
    }
  }

  destroy(): void {
    this.plot.destroy();
    this.figure.remove();
  }

  private points(line: ILine, min: number, max: number, width: number): Points {
    const curve = this.data.curves.get(line.curve) ?? new Curve();
    const points = thin(curve, min, max, width);
    if (line.isStairs && points[0].length) {
      const last = curve.y.length - 1;
      points[0].push(Math.max(this.data.snapshot.step, curve.x.view()[last]));
      points[1].push(curve.y.view()[last]);
    }
    return points;
  }

  private spread(lines: Points[]): [number, number] {
    let low = this.spec.fromZero ? 0 : Infinity;
    let high = this.spec.isWorld ? (this.data.snapshot.max_workers ?? 1) : -Infinity;
    for (const [, values] of lines) {
      for (const value of values) {
        if (value !== null) {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
    if (!(high > -Infinity) || low === Infinity) {
      return [0, 1];
    }
    const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [this.spec.fromZero ? low : low - margin, high + margin];
  }

  /** The line above the chart: the values under the cursor, else the newest. */
  private describe(): void {
    const left = this.plot.cursor.left ?? -1;
    const step = left < 0 ? Infinity : Math.round(this.plot.posToVal(left, 'x'));
    const show = this.spec.isCount ? format.count : format.number;
    const parts = this.spec.lines.map(line => {
      const value = this.data.curves.get(line.curve)?.at(step);
      const item = document.createElement('span');
      item.style.setProperty('--etrain-key', `var(${line.colour})`);
      item.className = line.label ? 'etrain-value etrain-keyed' : 'etrain-value';
      item.textContent = `${line.label} ${show(value)}`.trim();
      return item;
    });
    if (step < Infinity) {
      const place = document.createElement('span');
      place.textContent = `step ${format.count(step)}`;
      parts.unshift(place);
    } else {
      const values = parts.map(part => part.textContent).join(', ');
      this.body.setAttribute('aria-label', `${this.spec.title} over ${this.data.snapshot.step} steps: ${values}`);
    }
    this.legend.replaceChildren(...parts);
  }

  private options(sync: uPlot.SyncPubSub): uPlot.Options {
    const colour = (name: string) => () => this.colour(name);
    const axis = {
      stroke: colour('--etrain-faint'),
      font: '11px system-ui, sans-serif',
      grid: { stroke: colour('--etrain-grid'), width: 1 },
      ticks: { show: false }
    };
    return {
      width: this.body.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: {
        x: { time: false, range: () => this.x },
        y: { range: () => this.y }
      },
      axes: [
        { ...axis, size: 24, gap: 2, space: 60, incrs: STEPS, values: (_u, ticks) => ticks.map(format.tick) },
        {
          ...axis,
          size: AXIS_WIDTH,
          gap: 4,
          space: 28,
          ...(this.spec.isCount ? { incrs: STEPS } : {}),
          values: (_u, ticks) => ticks.map(format.tick)
        }
      ],
      series: [{}, ...this.spec.lines.map(line => this.series(line))],
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        sync: { key: sync.key, setSeries: false },
        bind: { dblclick: () => null },
        points: { size: 6 }
      },
      hooks: {
        draw: [u => this.drawMarkers(u)],
        setCursor: [
          u => {
            this.describe();
            this.explain(u);
          }
        ],
        setSelect: [u => this.select(u)]
      }
    };
  }

  private series(line: ILine): uPlot.Series {
    return {
      stroke: () => this.colour(line.colour),
      width: line.isSparse || line.isStairs ? 2 : 1.25,
      points: { show: !!line.isSparse, size: 6, fill: () => this.colour(line.colour) },
      ...(line.isStairs
        ? { paths: uPlot.paths.stepped!({ align: 1 }), fill: () => this.colour('--etrain-fill') }
        : {})
    };
  }

  private colour(name: string): string {
    return getComputedStyle(this.figure).getPropertyValue(name).trim() || '#888';
  }

  private select(u: uPlot): void {
    if (u.select.width > 4) {
      this.onZoom([u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x')]);
    }
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  private markers(): IMarker[] {
    return this.data.snapshot.markers.filter(
      m => m.step >= this.x[0] && m.step <= this.x[1] && (this.spec.isWorld || MARKED_EVERYWHERE.has(m.kind))
    );
  }

  /** Lines for all markers; symbols, on the chart of workers, where they do not cover each other. */
  private drawMarkers(u: uPlot): void {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    const scale = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top - 8 * scale, width + 6 * scale, height + 8 * scale);
    ctx.clip();
    ctx.textAlign = 'center';
    const weightiestFirst = this.markers().sort((a, b) => weight(a) - weight(b));
    const taken = new Set<number>();
    for (const marker of weightiestFirst) {
      const x = Math.round(u.valToPos(marker.step, 'x', true)) + 0.5;
      const isCheckpoint = marker.kind === 'checkpoint';
      const place = Math.round(x / (4 * scale));
      const isCovered = !isCheckpoint && [place - 1, place, place + 1].some(near => taken.has(near));
      ctx.strokeStyle = ctx.fillStyle = this.colour(`--etrain-${marker.kind}`);
      if (!isCheckpoint && !isCovered) {
        ctx.lineWidth = scale;
        ctx.globalAlpha = this.spec.isWorld ? 0.9 : 0.45;
        ctx.setLineDash(marker.kind === 'lost' || marker.kind === 'failed' ? [] : [3 * scale, 3 * scale]);
        ctx.beginPath();
        ctx.moveTo(x, top + (this.spec.isWorld ? 8 * scale : 0));
        ctx.lineTo(x, top + height);
        ctx.stroke();
      }
      if (this.spec.isWorld && !isCovered) {
        taken.add(isCheckpoint ? NaN : place);
        ctx.globalAlpha = 1;
        ctx.font = `${isCheckpoint ? 10 * scale : 13 * scale}px system-ui, sans-serif`;
        const y = isCheckpoint ? top + height - 1 * scale : top + 5 * scale;
        ctx.fillText(SYMBOLS[marker.kind] ?? '·', x, y);
      }
    }
    ctx.restore();
  }

  /** Name the markers near the cursor. */
  private explain(u: uPlot): void {
    const { left = -1 } = u.cursor;
    const isHere = left >= 0 && u.over.matches(':hover'); // the cursor shows on the other charts, too
    const near = isHere
      ? this.markers().filter(m => Math.abs(u.valToPos(m.step, 'x') - left) <= MARKER_REACH)
      : [];
    this.tip.hidden = !near.length;
    if (!near.length) {
      return;
    }
    const shown = near.slice(-5).map(marker => {
      const row = document.createElement('div');
      row.textContent = `${SYMBOLS[marker.kind] ?? '·'} step ${format.count(marker.step)}: ${marker.text}`;
      return row;
    });
    if (near.length > shown.length) {
      const more = document.createElement('div');
      more.textContent = `and ${near.length - shown.length} more`;
      shown.unshift(more);
    }
    this.tip.replaceChildren(...shown);
    const isRight = left > u.over.clientWidth / 2;
    this.tip.style.left = isRight ? '' : `${left + 8}px`;
    this.tip.style.right = isRight ? `${u.over.clientWidth - left + 8}px` : '';
  }
}

/** What the symbols on the chart of workers mean. */
function key(): HTMLElement {
  const element = document.createElement('span');
  element.className = 'etrain-key';
  for (const [kind, word] of [
    ['lost', 'lost'],
    ['failed', 'error'],
    ['notice', 'notice'],
    ['join', 'joined'],
    ['checkpoint', 'saved']
  ]) {
    const item = document.createElement('span');
    const symbol = document.createElement('b');
    symbol.textContent = SYMBOLS[kind];
    symbol.style.color = `var(--etrain-${kind})`;
    item.append(symbol, ` ${word}`);
    element.append(item);
  }
  return element;
}
