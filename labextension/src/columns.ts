// Growing columns of numbers, and thinning to the resolution of a screen. The counterpart of
// series.py.

/** A typed array that grows; appending costs amortised constant time. */
export class Column<T extends Float64Array | Float32Array> {
  length = 0;
  private data: T;

  constructor(private readonly make: new (length: number) => T) {
    this.data = new make(1024);
  }

  append(values: ArrayLike<number>): void {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const bigger = new this.make(Math.max(needed, this.data.length * 2));
      bigger.set(this.view());
      this.data = bigger;
    }
    this.data.set(values, this.length);
    this.length = needed;
  }

  replace(values: ArrayLike<number>): void {
    this.length = 0;
    this.append(values);
  }

  view(): T {
    return this.data.subarray(0, this.length) as T;
  }
}

/** Maximum points of a curve. The kernel keeps all of them and sends more for a zoomed range. */
export const CAPACITY = 1 << 15;

/**
 * One curve: y over a non-decreasing x.
 *
 * Above CAPACITY, a curve of means averages neighbouring points; any other curve keeps the
 * extremes.
 */
export class Curve {
  readonly x = new Column<Float64Array>(Float64Array);
  readonly y = new Column<Float32Array>(Float32Array);

  constructor(private readonly isMean = false) {}

  append(x: ArrayLike<number>, y: ArrayLike<number>): void {
    this.x.append(x);
    this.y.append(y);
    if (this.x.length > CAPACITY) {
      const [fewerX, fewerY] = this.isMean
        ? average(this, -Infinity, Infinity, CAPACITY / 2)
        : thin(this, -Infinity, Infinity, CAPACITY / 4);
      this.x.replace(fewerX);
      this.y.replace(fewerY.map(value => value ?? NaN));
    }
  }

  /** The value at `x`: that of the last point at or before it. */
  at(x: number): number | undefined {
    const i = x === Infinity ? this.x.length - 1 : lowerBound(this.x.view(), x + 0.5) - 1;
    return i >= 0 ? this.y.view()[i] : undefined;
  }
}

/**
 * Split the indices from `start` to `end` into at most `count` buckets of equal width along x; skip
 * empty buckets.
 *
 * Equal widths, not equal numbers of points: the old part of a curve has been thinned before and
 * has fewer points, but it covers the same share of the screen.
 */
function* splitEqually(
  x: Float64Array,
  start: number,
  end: number,
  count: number
): Generator<[number, number]> {
  const width = end > start ? (x[end - 1] - x[start]) / count : 0;
  let from = start;
  while (from < end) {
    const place = width > 0 ? Math.floor((x[from] - x[start]) / width) : 0;
    const limit = x[start] + (place + 1) * width;
    let to = from + 1;
    while (to < end && (x[to] < limit || !(width > 0) || place >= count - 1)) {
      to++;
    }
    yield [from, to];
    from = to;
  }
}

/** Return the first index whose value is at least `value`. */
export function lowerBound(sorted: ArrayLike<number>, value: number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

export type Points = [number[], (number | null)[]];

/**
 * Thin the points between `min` and `max` to the minimum and maximum of each bucket, so that every
 * peak is visible.
 *
 * Keep one point beyond each end, so that lines run to the edge. NaN becomes null, which draws a
 * gap. For a staircase, also keep the last point of each bucket: its value holds until the next
 * bucket.
 */
export function thin(
  curve: Curve,
  min: number,
  max: number,
  buckets: number,
  isStairs = false
): Points {
  const x = curve.x.view();
  const y = curve.y.view();
  const start = Math.max(0, lowerBound(x, min) - 1);
  const end = Math.min(x.length, lowerBound(x, max) + 1);
  const outX: number[] = [];
  const outY: (number | null)[] = [];
  const keep = (i: number) => {
    outX.push(x[i]);
    outY.push(Number.isFinite(y[i]) ? y[i] : null);
  };
  if (end - start <= 2 * buckets) {
    for (let i = start; i < end; i++) {
      keep(i);
    }
    return [outX, outY];
  }
  for (const [from, to] of splitEqually(x, start, end, buckets)) {
    let low = -1;
    let high = -1;
    for (let i = from; i < to; i++) {
      if (!Number.isNaN(y[i])) {
        low = low < 0 || y[i] < y[low] ? i : low;
        high = high < 0 || y[i] > y[high] ? i : high;
      }
    }
    const kept = low < 0 ? [from] : isStairs ? [low, high, to - 1] : [low, high];
    [...new Set(kept)].sort((a, b) => a - b).forEach(keep);
  }
  return [outX, outY];
}

/**
 * Return at most `count` means of the points between `min` and `max`, and of one point beyond each
 * end.
 */
export function average(curve: Curve, min: number, max: number, count: number): Points {
  const x = curve.x.view();
  const y = curve.y.view();
  const start = Math.max(0, lowerBound(x, min) - 1);
  const end = Math.min(x.length, lowerBound(x, max) + 1);
  const out: Points = [[], []];
  const isFew = end - start <= count;
  const each = Array.from({ length: isFew ? end - start : 0 }, (_, i) => [
    start + i,
    start + i + 1
  ]);
  for (const [from, to] of isFew ? each : splitEqually(x, start, end, count)) {
    const near = y.subarray(from, to).filter(Number.isFinite);
    out[0].push(x.subarray(from, to).reduce((sum, value) => sum + value, 0) / (to - from));
    out[1].push(near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null);
  }
  return out;
}

/**
 * Units per visible range for which a smoothing weight is defined, so that zoom and resolution do
 * not change it.
 */
const UNITS_PER_SPAN = 1000;

/**
 * Smooth `points` with an exponential moving average: a point's influence decays by `weight` per
 * thousandth of `span`.
 *
 * A gap stays a gap; the average continues after it. Weights are normalized by their sum, so that
 * the first values are not biased towards zero.
 */
export function smooth([x, y]: Points, weight: number, span: number): Points {
  let sum = 0;
  let weights = 0;
  let previous = NaN;
  const means = y.map((value, i) => {
    if (value === null) {
      return null;
    }
    const faded = Number.isNaN(previous)
      ? 0
      : Math.pow(weight, (Math.max(0, x[i] - previous) / span) * UNITS_PER_SPAN);
    previous = x[i];
    sum = sum * faded + value;
    weights = weights * faded + 1;
    return sum / weights;
  });
  return [x, means];
}

/**
 * Return the end of an axis: a little more than `step`, at most `total`, and stable while `step`
 * grows.
 */
export function roomFor(step: number, total: number | null): number {
  const needed = Math.max(10, step * 1.02);
  let room = Math.pow(10, Math.floor(Math.log10(needed)));
  while (room < needed) {
    room *= 1.25;
  }
  room = Math.ceil(room);
  return total && total >= step ? Math.min(room, total) : room;
}
