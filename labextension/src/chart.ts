// One chart: caption, plot, and the cursor, keyboard and zoom of its reader.
import uPlot from 'uplot';
import { make, setText } from './dom';
import { drawing } from './drawing';
import { Legend } from './legend';
import { ILine, readLines, verticalRange } from './lines';
import { IPlace } from './marks';
import { Overlay } from './overlay';
import { AXIS_WIDTH, HEIGHT, IPlotSource, plotOptions } from './plot';
import * as scale from './scale';
import { IChartSpec, IShared, Range } from './spec';

const MIN_POINTS = 50;
/** A narrower selection is a click. */
const MIN_SELECTION_PX = 4;
/** A cursor at this position is not visible. */
const HIDDEN = { left: -10, top: -10 };
const CURSOR_TOP = 40;
/** Pixels per press of an arrow key, without and with Shift. */
const STRIDE = 2;
const LONG_STRIDE = 20;

export class Chart implements IPlotSource {
  x: Range = [0, 1];
  y: Range = [0, 1];
  private readonly figure = make('figure', 'etrain-chart');
  private readonly body = make('div', 'etrain-plot');
  private readonly logButton = make('button', 'etrain-log-scale');
  private readonly legend: Legend;
  private readonly overlay: Overlay;
  private readonly plot: uPlot;
  private lines: ILine[] = [];
  /** Resolved CSS variables; emptied before each draw, since a theme may change them. */
  private readonly palette = new Map<string, string>();

  constructor(
    host: HTMLElement,
    readonly spec: IChartSpec,
    readonly shared: IShared
  ) {
    this.legend = new Legend(spec, shared);
    this.overlay = new Overlay(this, place => this.onPin(place));
    this.figure.append(this.buildCaption(), this.body);
    this.body.tabIndex = 0;
    this.body.setAttribute('role', 'group');
    this.body.setAttribute('aria-roledescription', 'chart');
    this.body.onkeydown = event => this.onKey(event);
    host.append(this.figure);
    const options = plotOptions(this, this.body.clientWidth || 300, {
      draw: [u => this.overlay.draw(u)],
      setCursor: [u => this.onCursor(u)],
      setSelect: [u => this.onSelect(u)]
    });
    this.plot = new uPlot(options, [[]], this.body);
    this.plot.over.addEventListener('dblclick', () => shared.onZoom(null));
    this.overlay.attach(this.plot);
  }

  get isLog(): boolean {
    return !!this.spec.canLog && (this.shared.isLog.get(this.spec.title) ?? drawing.logScale);
  }

  get numEvaluations(): number {
    return this.lines.find(line => line.role === 'evaluation')?.points[0].length ?? 0;
  }

  colour(name: string): string {
    let value = this.palette.get(name);
    if (!value) {
      value = getComputedStyle(this.figure).getPropertyValue(name).trim();
      value = value === '' ? '#888' : value;
      this.palette.set(name, value);
    }
    return value;
  }

  draw(): void {
    const { spec, shared } = this;
    this.logButton.setAttribute('aria-pressed', String(this.isLog));
    this.palette.clear();
    this.x = shared.axis.range();
    this.lines = readLines(
      spec,
      shared,
      this.x,
      Math.max(MIN_POINTS, this.plot.width - AXIS_WIDTH)
    );
    this.y = verticalRange(spec, shared, this.lines, this.x, this.isLog);
    const points = this.lines.map(line => (this.isLog ? scale.logged(line.points) : line.points));
    // A single line needs no joining. Joining would also merge two points of a staircase at one
    // place.
    this.plot.setData(points.length === 1 ? points[0] : uPlot.join(points));
    this.drawLegend();
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

  private buildCaption(): HTMLElement {
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
    caption.append(row, this.legend.element);
    return caption;
  }

  private drawLegend(): void {
    const left = this.plot.cursor.left ?? -1;
    const isNewest = left < 0;
    const text = this.legend.draw(this.lines, isNewest ? Infinity : this.plot.posToVal(left, 'x'));
    if (isNewest) {
      this.body.setAttribute(
        'aria-label',
        `${this.spec.title}, ${text}. Arrow keys move the cursor, plus and minus zoom.`
      );
    }
  }

  // Cursor and zoom. All charts of a view show the same cursor; only the chart that has the pointer
  // or the focus reports its position.

  private onCursor(u: uPlot): void {
    const { left = -1 } = u.cursor;
    const hasReader = u.over.matches(':hover') || this.body === document.activeElement;
    const isHere = left >= 0 && hasReader;
    this.drawLegend();
    this.overlay.hover(isHere ? left : null);
    if (isHere || left < 0) {
      this.shared.onCursor(left < 0 ? null : u.posToVal(left, 'x'));
    }
  }

  private onPin(place: IPlace | null): void {
    this.moveCursor(place?.at ?? null);
    this.shared.onCursor(place && this.plot.posToVal(place.at, 'x'));
  }

  /** Move the cursor of all charts to a position of this one, in pixels; null hides it. */
  private moveCursor(left: number | null): void {
    const value = left === null ? null : this.plot.posToVal(left, 'x');
    for (const plot of this.shared.sync.plots) {
      plot.setCursor(
        value === null ? HIDDEN : { left: plot.valToPos(value, 'x'), top: CURSOR_TOP }
      );
    }
  }

  private onKey(event: KeyboardEvent): void {
    if (event.target !== this.body || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const width = this.plot.over.clientWidth;
    const { left = -1 } = this.plot.cursor;
    const at = left < 0 ? width : left;
    const stride = event.shiftKey ? LONG_STRIDE : STRIDE;
    const go = (to: number) => this.moveCursor(Math.min(width - 1, Math.max(0, to)));
    const moves: Record<string, () => void> = {
      ArrowLeft: () => go(at - stride),
      ArrowRight: () => go(at + stride),
      Home: () => go(0),
      End: () => go(width),
      '+': () => this.zoomBy(0.5, at / width),
      '-': () => this.zoomBy(2, at / width),
      Escape: () => this.shared.onZoom(null)
    };
    if (event.key in moves) {
      moves[event.key]();
      event.preventDefault();
      event.stopPropagation();
    }
  }

  /** Scale the visible range around `share` of it: 0 is its left edge, 1 its right edge. */
  private zoomBy(factor: number, share: number): void {
    const [min, max] = this.x;
    const middle = min + (max - min) * share;
    const from = Math.max(0, middle - (middle - min) * factor);
    const isWhole = factor > 1 && from === 0 && (max - min) * factor >= max;
    this.shared.onZoom(
      isWhole && !this.shared.axis.zoom ? null : [from, middle + (max - middle) * factor]
    );
  }

  private onSelect(u: uPlot): void {
    const { left, width } = u.select;
    if (width > MIN_SELECTION_PX) {
      this.shared.onZoom([u.posToVal(left, 'x'), u.posToVal(left + width, 'x')]);
    }
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }
}
