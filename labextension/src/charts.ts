// All charts of one view. They share a range and a cursor; the bar above them sets axis, smoothing
// and zoom.
import uPlot from 'uplot';
import { Axis, Unit, UNITS } from './axis';
import { Chart } from './chart';
import { keepChoices, readChoices } from './choices';
import { make, setText } from './dom';
import { drawing, onDrawing } from './drawing';
import { JobData } from './job_data';
import { key } from './marks';
import { ISnapshot } from './snapshot';
import { IChartSpec, IShared } from './spec';

const REQUEST_AFTER_MS = 120;

/** List the charts of a job. They follow from its configuration, so that no chart appears late. */
function specs({ charts }: ISnapshot, isCompact: boolean): IChartSpec[] {
  const evaluated = (name: string) => (charts.has_eval ? name : '');
  const all: IChartSpec[] = [
    { title: 'loss', train: 'loss', evaluation: evaluated('eval.loss'), canLog: true },
    ...charts.metrics.map(name => ({
      title: name,
      train: `metrics.${name}`,
      evaluation: evaluated(`eval.${name}`),
      canLog: true
    })),
    { title: 'samples/s', train: 'samples_per_s', evaluation: '', fromZero: true },
    {
      title: 'workers',
      train: 'world_size',
      evaluation: '',
      fromZero: true,
      isCount: true,
      isWorld: true
    }
  ];
  return isCompact ? [all[0], ...all.slice(1, -2).slice(0, 1), all[all.length - 1]] : all;
}

export class Charts {
  readonly element = make('div', 'etrain-curves');
  private readonly grid = make('div', 'etrain-charts');
  private readonly place = make('span', 'etrain-place');
  private readonly reset = make('button', 'etrain-reset');
  private readonly units = new Map<Unit, HTMLInputElement>();
  private readonly axis: Axis;
  private readonly shared: IShared;
  private readonly choices = readChoices();
  private charts: Chart[] = [];
  private signature = '';
  private requested = '';
  private drawnIn = '';
  private timer = 0;
  private readonly slider = make('input');
  private readonly smoothing = make('output');
  private readonly stopListening: () => void;

  /** `onZoom` receives a range of steps whose points should be requested from the kernel. */
  constructor(
    private readonly data: JobData,
    private readonly onZoom: (first: number, last: number) => void,
    private readonly isCompact = false
  ) {
    const group = Math.random().toString(36).slice(2);
    this.axis = new Axis(data);
    this.shared = {
      data,
      axis: this.axis,
      sync: uPlot.sync(`etrain-${group}`),
      weight: this.choices.weight ?? drawing.smoothing,
      isLog: this.choices.isLog,
      onLog: () => keepChoices(this.choices),
      onZoom: range => this.zoom(range),
      onCursor: value => setText(this.place, value === null ? '' : this.axis.describe(value))
    };
    this.element.append(this.buildBar(group), this.grid, key());
    this.stopListening = onDrawing(() => this.draw());
  }

  /** Draw the current data. */
  draw(): void {
    if (!this.grid.clientWidth) {
      return; // JupyterLab renders outputs before it attaches them. The resize observer draws them later.
    }
    this.arrange();
    this.drawSmoothing();
    this.drawnIn = this.colours();
    this.useUnit();
    this.reset.disabled = !this.axis.zoom;
    this.charts.forEach(chart => chart.draw());
    this.requestDetail();
  }

  /**
   * Redraw if the theme's colours have changed. A canvas does not notice, and a theme may load in
   * several parts.
   */
  recolour(): void {
    if (this.grid.clientWidth && this.colours() !== this.drawnIn) {
      this.draw();
    }
  }

  resize(): void {
    this.charts.forEach(chart => chart.resize());
    this.draw();
  }

  /** Forget the pending detail request: the kernel that received it will not answer. */
  forgetRequest(): void {
    this.requested = '';
  }

  destroy(): void {
    this.stopListening();
    window.clearTimeout(this.timer);
    this.empty();
  }

  private empty(): void {
    this.charts.forEach(chart => chart.destroy());
    this.charts = [];
  }

  /** Use the chosen unit, or steps if the job does not report that unit. */
  private useUnit(): void {
    const unit = this.choices.unit && this.axis.has(this.choices.unit) ? this.choices.unit : 'step';
    if (unit !== this.axis.unit) {
      this.axis.use(unit);
    }
    this.units.forEach((input, one) => {
      input.disabled = !this.axis.has(one);
      input.checked = one === unit;
    });
  }

  private zoom(range: [number, number] | null): void {
    this.axis.zoom = range && range[1] > range[0] ? range : null;
    this.draw();
  }

  private requestDetail(): void {
    const [first, last] = this.axis.steps();
    const wanted = this.axis.zoom ? `${first} ${last}` : '';
    if (wanted && wanted !== this.requested && !this.data.hasDetail(first, last)) {
      this.requested = wanted;
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.onZoom(first, last), REQUEST_AFTER_MS);
    }
  }

  private colours(): string {
    const style = getComputedStyle(this.element);
    return ['--etrain-train', '--etrain-faint', '--etrain-grid']
      .map(name => style.getPropertyValue(name))
      .join();
  }

  private arrange(): void {
    const wanted = specs(this.data.snapshot, this.isCompact);
    const signature = JSON.stringify(wanted);
    if (signature === this.signature) {
      return;
    }
    this.signature = signature;
    window.clearTimeout(this.timer);
    this.empty();
    this.grid.replaceChildren();
    const most = wanted.length <= 4 ? wanted.length : wanted.length <= 6 ? 3 : 4;
    this.grid.style.setProperty('--etrain-columns', String(most));
    this.charts = wanted.map(spec => new Chart(this.grid, spec, this.shared));
    this.charts.forEach(chart => chart.resize()); // the first charts were created at the full width
  }

  private buildBar(group: string): HTMLElement {
    const bar = make('div', 'etrain-bar');
    bar.append(this.buildUnits(group), this.buildSmoothing(), this.place, this.buildReset());
    return bar;
  }

  private buildUnits(group: string): HTMLElement {
    const set = make('fieldset', 'etrain-units');
    const legend = make('legend');
    legend.textContent = 'x axis';
    set.append(legend);
    for (const unit of UNITS) {
      const label = make('label');
      const input = make('input');
      input.type = 'radio';
      input.name = `etrain-unit-${group}`;
      input.value = unit;
      input.checked = unit === 'step';
      input.onchange = () => {
        this.choices.unit = unit;
        keepChoices(this.choices);
        this.draw();
      };
      this.units.set(unit, input);
      const word = make('span');
      word.textContent = unit === 'step' ? 'steps' : unit;
      label.append(input, word);
      set.append(label);
    }
    return set;
  }

  private buildSmoothing(): HTMLElement {
    const label = make('label', 'etrain-smoothing');
    const { slider } = this;
    Object.assign(slider, { type: 'range', min: '0', max: '0.99', step: '0.01' });
    slider.oninput = () => {
      this.choices.weight = Number(slider.value);
      keepChoices(this.choices);
      this.draw();
    };
    this.drawSmoothing();
    label.append('smoothing', slider, this.smoothing);
    return label;
  }

  private drawSmoothing(): void {
    this.shared.weight = this.choices.weight ?? drawing.smoothing;
    this.slider.value = String(this.shared.weight);
    setText(this.smoothing, this.shared.weight ? this.shared.weight.toFixed(2) : 'off');
  }

  private buildReset(): HTMLElement {
    this.reset.type = 'button';
    this.reset.textContent = 'Show all';
    this.reset.title = 'Reset the zoom (or double-click a chart)';
    this.reset.onclick = () => this.zoom(null);
    return this.reset;
  }
}
