// The horizontal axis of the charts, in steps, samples, or time since the start.
import { lowerBound, roomFor } from './columns';
import * as format from './format';
import { JobData } from './job_data';
import { ISnapshot } from './snapshot';

export type Unit = 'step' | 'samples' | 'time';
export const UNITS: Unit[] = ['step', 'samples', 'time'];
/** The curve that converts steps to this unit. */
const CURVES = { samples: 'samples', time: 'elapsed_s' };
/** A value above every step. */
export const NEWEST = 1e15;
const ENDED = ['finished', 'stopped', 'failed'];

const ROUND = [1, 2, 5]
  .flatMap(m => Array.from({ length: 15 }, (_, e) => m * 10 ** e))
  .sort((a, b) => a - b);
const ROUND_SECONDS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200
].concat([1, 2, 5, 10, 20, 50, 100, 1000].map(days => days * 86400));

export class Axis {
  /** The zoomed range in the current unit; null shows everything. */
  zoom: [number, number] | null = null;
  private unitNow: Unit = 'step';

  constructor(private readonly data: JobData) {}

  get unit(): Unit {
    return this.unitNow;
  }

  /** Whether the job reports what it takes to convert steps to this unit. */
  has(unit: Unit): boolean {
    return unit === 'step' || !!this.data.curves.get(CURVES[unit])?.x.length;
  }

  /** Change the unit and keep the zoom on the same steps. */
  use(unit: Unit): void {
    const steps = this.zoom && this.steps();
    this.unitNow = unit;
    if (steps) {
      const end = steps[1] === NEWEST ? this.end() : this.ofStep(steps[1]);
      this.zoom = [this.ofStep(steps[0]), end];
      this.zoom = this.zoom[1] > this.zoom[0] ? this.zoom : null;
    }
  }

  /** The visible range. */
  range(): [number, number] {
    return this.zoom ?? [0, this.end()];
  }

  /** The visible range in steps, rounded outward. */
  steps(): [number, number] {
    const [min, max] = this.range();
    return [Math.floor(this.stepAt(min)), Math.ceil(this.stepAt(max))];
  }

  /** Convert a step to the current unit, by linear interpolation. */
  ofStep(step: number): number {
    if (this.unit === 'step') {
      return step;
    }
    const [x, y] = this.table();
    const i = lowerBound(x, step);
    if (i >= x.length) {
      return x.length ? y[x.length - 1] : 0;
    }
    const x0 = i ? x[i - 1] : 0;
    const y0 = i ? y[i - 1] : 0;
    return x[i] > x0 ? y0 + ((y[i] - y0) * Math.max(0, step - x0)) / (x[i] - x0) : y[i];
  }

  /** Convert a value of the axis to a step; NEWEST beyond the last known one. */
  stepAt(value: number): number {
    if (this.unit === 'step') {
      return value;
    }
    const [x, y] = this.table();
    const i = lowerBound(y, value);
    if (i >= x.length) {
      return NEWEST;
    }
    const x0 = i ? x[i - 1] : 0;
    const y0 = i ? y[i - 1] : 0;
    return y[i] > y0 ? x0 + ((x[i] - x0) * Math.max(0, value - y0)) / (y[i] - y0) : x[i];
  }

  /**
   * The position of a marker. On the time axis it is the marker's own time, not that of its step.
   */
  ofMarker(marker: { step: number; time: number }): number {
    const startedAt = this.data.snapshot.started_at;
    return this.unit === 'time' && startedAt !== null
      ? Math.max(0, marker.time - startedAt)
      : this.ofStep(marker.step);
  }

  /** Allowed distances of ticks. */
  get incrs(): number[] {
    return this.unit === 'time' ? ROUND_SECONDS : ROUND;
  }

  tick(value: number): string {
    return this.unit === 'time' ? format.clock(value) : format.tick(value);
  }

  /** Describe a position of the axis, as in `step 920 · 58,880 samples · 0:31`. */
  describe(value: number): string {
    const step = Math.min(Math.round(this.stepAt(value)), this.data.snapshot.step);
    const samples = this.data.curves.get(CURVES.samples)?.at(step);
    const elapsed = this.data.curves.get(CURVES.time)?.at(step);
    const parts = [`step ${format.count(step)}`];
    if (samples !== undefined) {
      parts.push(`${format.count(samples)} samples`);
    }
    if (elapsed !== undefined) {
      parts.push(format.clock(elapsed));
    }
    return parts.join(' · ');
  }

  private end(): number {
    const s = this.data.snapshot;
    const hasEnded = ENDED.includes(s.status);
    if (this.unit === 'step') {
      return hasEnded ? Math.max(1, s.step) : roomFor(s.step, s.total_steps);
    }
    const [, y] = this.table();
    const reached = Math.max(
      y.length ? y[y.length - 1] : 0,
      this.unit === 'time' ? elapsedOf(s) : 0,
      1
    );
    return hasEnded ? reached : roomFor(reached, null);
  }

  /** Steps and their values in the current unit, at the resolution of the drawn curves. */
  private table(): [ArrayLike<number>, ArrayLike<number>] {
    const curve = this.data.curves.get(CURVES[this.unit as 'samples' | 'time']);
    return curve ? [curve.x.view(), curve.y.view()] : [[], []];
  }
}

function elapsedOf(s: ISnapshot): number {
  return s.started_at === null ? 0 : Math.max(0, s.updated_at - s.started_at);
}
