// One chart: its lines, its axes, its legend, and what happened marked on it.
import uPlot from 'uplot';
import { Axis } from './axis';
import { average, Curve, lowerBound, Points, smooth, thin } from './columns';
import { make, setText } from './dom';
import { drawing } from './drawing';
import * as format from './format';
import { colourOf, drawShape, icon, IPlace, isDashed, isMajor, MarkButtons, namesOf, placesOf } from './marks';
import { JobData } from './protocol';
import * as scale from './scale';

const HEIGHT = 172;
const AXIS_WIDTH = 48;
/** Above the plot, where the marks stand. */
const LANE = 14;
const FEW_POINTS = 80;
/** Points of a smoothed line: it needs no more. */
const MOST_MEANS = 1000;
const BREAKS = new Set(['restored', 'paused', 'waiting']);

export interface IChartSpec {
  title: string;
  /** The curve of the training line, and that of the evaluation, if there is one. */
  train: string;
  evaluation: string;
  isCount?: boolean;
  fromZero?: boolean;
  /** A staircase: it holds until it changes. */
  isWorld?: boolean;
  canLog?: boolean;
}

/** What all charts of a view share. */
export interface IShared {
  data: JobData;
  axis: Axis;
  sync: uPlot.SyncPubSub;
  /** 0 for none, up to 0.99. */
  weight: number;
  /** What a person has chosen, by title of the chart. */
  isLog: Map<string, boolean>;
  onLog(): void;
  onZoom(range: [number, number] | null): void;
  /** A place on the axis under the cursor; null when there is none. */
  onCursor(value: number | null): void;
}

interface ILine {
  label: string;
  colour: string;
  points: Points;
  /** Where the exact value at a step is; else that of the drawn line. */
  curve?: string;
}

const NOTHING: Points = [[], []];

export class Chart {
  private readonly figure = make('figure', 'etrain-chart');
  private readonly legend = make('span', 'etrain-legend');
  private readonly tip = make('div', 'etrain-tip');
  private readonly body = make('div', 'etrain-plot');
  private readonly logButton = make('button', 'etrain-log-scale');
  private readonly buttons: MarkButtons | null = null;
  private readonly plot: uPlot;
  private lines: ILine[] = [];
  private places: IPlace[] = [];
  private pinned: IPlace | null = null;
  private x: [number, number] = [0, 1];
  private y: [number, number] = [0, 1];
  private palette = new Map<string, string>();

  constructor(host: HTMLElement, private readonly spec: IChartSpec, private readonly shared: IShared) {
    this.buildCaption();
    this.body.tabIndex = 0;
    this.body.setAttribute('role', 'group');
    this.body.setAttribute('aria-roledescription', 'chart');
    this.body.onkeydown = event => this.onKey(event);
    this.tip.hidden = true;
    this.figure.append(this.body);
    host.append(this.figure);
    this.plot = new uPlot(this.options(), [[]], this.body);
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener('dblclick', () => shared.onZoom(null));
    if (spec.isWorld) {
      this.buttons = new MarkButtons(place => this.pin(place));
      this.plot.over.append(this.buttons.element);
    }
  }

  private get isLog(): boolean {
    return !!this.spec.canLog && (this.shared.isLog.get(this.spec.title) ?? drawing.logScale);
  }

  draw(): void {
    this.logButton.setAttribute('aria-pressed', String(this.isLog));
    this.palette.clear();
    this.x = this.shared.axis.range();
    this.lines = this.readLines();
    this.y = this.spread();
    const shown = this.isLog ? this.lines.map(line => scale.logged(line.points)) : this.lines.map(line => line.points);
    // One line needs no joining, and a staircase may have two points at one place.
    this.plot.setData((shown.length === 1 ? shown[0] : uPlot.join(shown)) as uPlot.AlignedData);
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

  private buildCaption(): void {
    this.figure.className = 'etrain-chart';
    const caption = make('figcaption');
    const row = make('div');
    const title = make('strong');
    setText(title, this.spec.title);
    title.title = this.spec.title;
    row.append(title);
    if (this.spec.canLog) {
      const button = this.logButton;
      button.type = 'button';
      button.textContent = 'log';
      button.title = 'Logarithmic scale';
      button.setAttribute('aria-label', `logarithmic scale of ${this.spec.title}`);
      button.setAttribute('aria-pressed', 'false');
      button.onclick = () => {
        this.shared.isLog.set(this.spec.title, !this.isLog);
        this.shared.onLog();
        this.draw();
      };
      row.append(button);
    }
    caption.append(row, this.legend);
    this.figure.append(caption);
  }

  // What is drawn.

  private readLines(): ILine[] {
    const { spec, shared } = this;
    if (spec.isWorld) {
      return [{ label: 'training', colour: '--etrain-train', points: this.stairs() }];
    }
    const [first, last] = shared.axis.steps();
    const curves = shared.data;
    const name = spec.evaluation ? 'train' : '';
    const raw = this.placed(this.broken(this.read(curves.curveIn(spec.train, first, last), first, last)));
    const lines: ILine[] = [
      { label: shared.weight ? 'raw' : name, colour: '--etrain-train', points: raw, curve: spec.train },
      { label: name || 'smoothed', colour: '--etrain-train', points: this.smoothed(first, last) }
    ];
    if (spec.evaluation) {
      const points = this.placed(this.read(curves.curveIn(spec.evaluation, first, last), first, last));
      lines.push({ label: 'eval', colour: '--etrain-eval', points, curve: spec.evaluation });
    }
    lines.push({ label: 'undone', colour: '--etrain-undone', points: this.undone(first, last) });
    return lines;
  }

  private read(curve: Curve | undefined, first: number, last: number): Points {
    return curve ? thin(curve, first, last, Math.max(50, this.plot.width - AXIS_WIDTH)) : NOTHING;
  }

  /** What a rewind cut off: of steps, since nobody knows when it would have been or of which samples. */
  private undone(first: number, last: number): Points {
    const curve = this.shared.data.curves.get(`undone.${this.spec.train}`);
    return curve && this.shared.axis.unit === 'step' ? this.read(curve, first, last) : NOTHING;
  }

  private smoothed(first: number, last: number): Points {
    if (!this.shared.weight) {
      return NOTHING;
    }
    const means = this.shared.data.meansIn(this.spec.train, first, last);
    const points = this.placed(this.broken(means ? average(means, first, last, MOST_MEANS) : NOTHING));
    return smooth(points, this.shared.weight, this.x[1] - this.x[0]);
  }

  /** Put points of steps where the axis has them; no two on one spot, which the plot could not tell apart. */
  private placed([x, y]: Points): Points {
    if (this.shared.axis.unit === 'step') {
      return [x, y];
    }
    let before = -Infinity;
    return [
      x.map(step => {
        const at = this.shared.axis.ofStep(step);
        before = at > before ? at : before + 1e-9 * Math.max(1, Math.abs(before));
        return before;
      }),
      y
    ];
  }

  /** On a clock, nothing was measured while the job stood still or went back: a gap, not a line across. */
  private broken([x, y]: Points): Points {
    if (this.shared.axis.unit !== 'time') {
      return [x, y];
    }
    const breaks = this.shared.data.snapshot.markers.filter(marker => BREAKS.has(marker.kind)).map(marker => marker.step);
    const out: Points = [[...x], [...y]];
    for (const step of new Set(breaks)) {
      const i = lowerBound(out[0], step + 0.5);
      if (i > 0 && i < out[0].length) {
        out[0].splice(i, 0, (out[0][i - 1] + out[0][i]) / 2);
        out[1].splice(i, 0, null);
      }
    }
    return out;
  }

  private stairs(): Points {
    const { axis, data } = this.shared;
    const curve = data.curves.get(axis.unit === 'time' ? 'time.world_size' : 'world_size');
    if (!curve || !curve.x.length) {
      return NOTHING;
    }
    const [x, y] = thin(curve, -Infinity, Infinity, 2000, true);
    const at = axis.unit === 'samples' ? x.map(step => axis.ofStep(step)) : x;
    const { snapshot } = data;
    const now = axis.unit === 'time' ? snapshot.updated_at - (snapshot.started_at ?? 0) : axis.ofStep(snapshot.step);
    return [
      [...at, Math.max(now, at[at.length - 1])],
      [...y, y[y.length - 1]]
    ];
  }

  private spread(): [number, number] {
    const { spec, shared } = this;
    const values: number[] = [];
    for (const { points } of this.lines) {
      const start = Math.max(0, lowerBound(points[0], this.x[0]) - 1);
      const end = lowerBound(points[0], this.x[1]) + 1;
      for (const value of points[1].slice(start, end)) {
        if (value !== null && (!this.isLog || value > 0)) {
          values.push(value);
        }
      }
    }
    if (spec.isWorld) {
      values.push(shared.data.snapshot.max_workers ?? 1);
    }
    return this.isLog ? scale.logRange(values) : scale.range(values, !!spec.fromZero);
  }

  // The legend, and what the cursor is at.

  /** The line above the chart: the values under the cursor, else the newest. */
  private describe(): void {
    const left = this.plot.cursor.left ?? -1;
    const value = left < 0 ? Infinity : this.plot.posToVal(left, 'x');
    const items = this.lines.filter(line => line.points !== NOTHING || line.curve).map(line => this.legendItem(line, value));
    if (this.legend.children.length !== items.length) {
      this.legend.replaceChildren(...items.map(() => make('span', 'etrain-value')));
    }
    items.forEach(([label, text, colour], i) => {
      const item = this.legend.children[i] as HTMLElement;
      item.style.setProperty('--etrain-key', `var(${colour})`);
      item.classList.toggle('etrain-keyed', !!label);
      item.dataset.line = label;
      setText(item, `${label} ${text}`.trim());
    });
    if (value === Infinity) {
      const texts = items.map(([label, text]) => `${label} ${text}`.trim()).join(', ');
      this.body.setAttribute('aria-label', `${this.spec.title}, ${texts}. Arrow keys move along it, plus and minus zoom.`);
    }
  }

  private legendItem(line: ILine, value: number): [string, string, string] {
    const show = this.spec.isCount ? format.count : format.number;
    const [x, y] = line.points;
    const i = value === Infinity ? x.length - 1 : lowerBound(x, value + 1e-9) - 1;
    const near = i >= 0 && i < x.length ? y[i] : undefined;
    const step = value === Infinity ? Infinity : Math.round(this.shared.axis.stepAt(value));
    const [first, last] = this.shared.axis.steps();
    const exact = line.curve ? this.shared.data.curveIn(line.curve, first, last)?.at(step) : near;
    return [line.label, show(exact), line.colour];
  }

  private onCursor(u: uPlot): void {
    const { left = -1 } = u.cursor;
    const isHere = left >= 0 && (u.over.matches(':hover') || this.body === document.activeElement);
    this.describe();
    if (!this.pinned) {
      this.showTip(isHere ? this.places.find(place => Math.abs(place.at - left) <= 6) ?? null : null);
    }
    if (isHere || left < 0) {
      this.shared.onCursor(left < 0 ? null : u.posToVal(left, 'x'));
    }
  }

  private pin(place: IPlace | null): void {
    this.pinned = place;
    this.showTip(place);
    this.moveCursor(place ? place.at : -10);
    this.shared.onCursor(place && this.plot.posToVal(place.at, 'x'));
  }

  /** Name the markers of a place. */
  private showTip(place: IPlace | null): void {
    this.tip.hidden = !place;
    if (!place) {
      return;
    }
    const rows = namesOf(place.markers).map((name, i) => {
      const row = make('div');
      const marker = place.markers[i];
      row.append(...(i < 5 && marker ? [icon(marker.kind)] : []), name);
      return row;
    });
    this.tip.replaceChildren(...rows);
    const width = this.plot.over.clientWidth;
    const isRight = place.at > width / 2;
    this.tip.style.left = isRight ? '' : `${place.at + 9}px`;
    this.tip.style.right = isRight ? `${width - place.at + 9}px` : '';
  }

  /** Move the cursor of all charts; a place left of the plot hides it. */
  private moveCursor(left: number): void {
    const plot = this.plot as unknown as { setCursor(at: object, isHeard: boolean, isShared: boolean): void };
    plot.setCursor({ left, top: left < 0 ? -10 : 40 }, true, true);
  }

  private onKey(event: KeyboardEvent): void {
    if (event.target !== this.body || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const width = this.plot.over.clientWidth;
    const { left = -1 } = this.plot.cursor;
    const here = left < 0 ? width : left;
    const go = (to: number) => this.moveCursor(Math.min(width - 1, Math.max(0, to)));
    const moves: Record<string, () => void> = {
      ArrowLeft: () => go(here - (event.shiftKey ? 20 : 2)),
      ArrowRight: () => go(here + (event.shiftKey ? 20 : 2)),
      Home: () => go(0),
      End: () => go(width),
      '+': () => this.zoomBy(0.5, here / width),
      '-': () => this.zoomBy(2, here / width),
      Escape: () => this.shared.onZoom(null)
    };
    if (event.key in moves) {
      moves[event.key]();
      event.preventDefault();
      event.stopPropagation();
    }
  }

  private zoomBy(factor: number, at: number): void {
    const [min, max] = this.x;
    const middle = min + (max - min) * at;
    const from = Math.max(0, middle - (middle - min) * factor);
    const isWhole = factor > 1 && from === 0 && (max - min) * factor >= max;
    this.shared.onZoom(isWhole && !this.shared.axis.zoom ? null : [from, middle + (max - middle) * factor]);
  }

  // What the plot asks for.

  private options(): uPlot.Options {
    const axis = {
      stroke: () => this.colour('--etrain-faint'),
      font: '11px system-ui, sans-serif',
      grid: { stroke: () => this.colour('--etrain-grid'), width: 1 },
      ticks: { show: false }
    };
    const along = this.shared.axis;
    return {
      width: this.body.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      padding: [LANE, 18, 0, 0],
      scales: { x: { time: false, range: () => this.x }, y: { range: () => this.y } },
      axes: [
        { ...axis, size: 27, gap: 6, space: 50, incrs: () => along.incrs, values: (_u, at) => at.map(v => along.tick(v)) },
        {
          ...axis,
          size: AXIS_WIDTH,
          gap: 4,
          space: 26,
          splits: () => (this.isLog ? scale.logSplits(this.y) : scale.splits(this.y, !!this.spec.isCount)),
          values: (_u, at) => at.map(value => format.tick(this.isLog ? 10 ** value : value))
        }
      ],
      series: this.series(),
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        sync: { key: this.shared.sync.key, setSeries: false },
        bind: { dblclick: () => null },
        points: { size: 6 }
      },
      hooks: {
        draw: [u => this.drawMarks(u)],
        setCursor: [u => this.onCursor(u)],
        setSelect: [u => this.select(u)]
      }
    };
  }

  private series(): uPlot.Series[] {
    const { spec, shared } = this;
    if (spec.isWorld) {
      return [
        {},
        {
          stroke: () => this.colour('--etrain-train'),
          fill: () => this.colour('--etrain-fill'),
          width: 1.75,
          points: { show: false },
          paths: uPlot.paths.stepped!({ align: 1 })
        }
      ];
    }
    const train: uPlot.Series = {
      stroke: () => this.colour(shared.weight ? '--etrain-raw' : '--etrain-train'),
      width: 1.25,
      points: { show: (_u: uPlot, _i: number, from: number, to: number) => to - from < FEW_POINTS && !shared.weight, size: 3 }
    };
    const smoothed: uPlot.Series = { stroke: () => this.colour('--etrain-train'), width: 1.75, points: { show: false } };
    const evaluation: uPlot.Series = {
      stroke: () => this.colour('--etrain-eval'),
      width: 1.5,
      dash: [5, 3],
      points: { show: (_u: uPlot, _i: number, from: number, to: number) => this.hasDots(from, to), size: 6, fill: () => this.colour('--etrain-eval') }
    };
    const undone: uPlot.Series = { stroke: () => this.colour('--etrain-undone'), width: 1.25, dash: [2, 3], points: { show: false } };
    return [{}, train, smoothed, ...(spec.evaluation ? [evaluation] : []), undone];
  }

  /** Evaluations are dots where there is room for them. */
  private hasDots(_from: number, _to: number): boolean {
    return (this.lines[2]?.points[0].length ?? 0) * 5 < this.plot.width;
  }

  private colour(name: string): string {
    let value = this.palette.get(name);
    if (!value) {
      value = getComputedStyle(this.figure).getPropertyValue(name).trim() || '#888';
      this.palette.set(name, value);
    }
    return value;
  }

  private select(u: uPlot): void {
    if (u.select.width > 4) {
      this.shared.onZoom([u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x')]);
    }
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  /** A shape above the plot for each place, and a line down from it. */
  private drawMarks(u: uPlot): void {
    const { ctx, bbox } = u;
    const pixel = devicePixelRatio;
    const { axis, data } = this.shared;
    const visible = data.snapshot.markers.filter(marker => {
      const at = axis.ofMarker(marker);
      return at >= this.x[0] && at <= this.x[1] && (this.spec.isWorld || isMajor(marker));
    });
    this.places = placesOf(visible, marker => u.valToPos(axis.ofMarker(marker), 'x'));
    this.buttons?.draw(this.places);
    ctx.save();
    for (const { at, markers } of this.places) {
      const { kind } = markers[0];
      const x = Math.round(bbox.left + at * pixel) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = this.colour(colourOf(kind));
      ctx.setLineDash([]);
      drawShape(ctx, kind, x, bbox.top - (LANE / 2) * pixel, 0.8 * pixel);
      if (isMajor(markers[0])) {
        ctx.lineWidth = pixel;
        ctx.globalAlpha = this.spec.isWorld ? 0.8 : 0.4;
        ctx.setLineDash(isDashed(kind) ? [3 * pixel, 3 * pixel] : []);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
    }
    ctx.restore();
  }
}


