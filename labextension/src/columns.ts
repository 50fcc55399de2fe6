// Columns that grow, and their thinning to what a screen can show. The twin of dashboard/series.py.

/** A typed array that grows; appending costs amortised constant time. */
export class Column<T extends Float64Array | Float32Array> {
  length = 0;
  private data: T;

  constructor(private readonly make: new (length: number) => T) {
    this.data = new make(1024);
  }

  append(values: T): void {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const bigger = new this.make(Math.max(needed, this.data.length * 2));
      bigger.set(this.view());
      this.data = bigger;
    }
    this.data.set(values, this.length);
    this.length = needed;
  }

  view(): T {
    return this.data.subarray(0, this.length) as T;
  }
}

/** One curve: y over a never falling x. */
export class Curve {
  readonly x = new Column<Float64Array>(Float64Array);
  readonly y = new Column<Float32Array>(Float32Array);

  append(x: Float64Array, y: Float32Array): void {
    this.x.append(x);
    this.y.append(y);
  }

  /** The value at `x`: that of the last point up to there. */
  at(x: number): number | undefined {
    const i = x === Infinity ? this.x.length - 1 : lowerBound(this.x.view(), x + 0.5) - 1;
    return i >= 0 ? this.y.view()[i] : undefined;
  }
}

/** The first index whose x is at least `value`. */
export function lowerBound(x: Float64Array, value: number): number {
  let low = 0;
  let high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

export type Points = [number[], (number | null)[]];

/**
 * The points between `min` and `max`, at most two for each of `buckets`, so that every peak still shows.
 *
 * One point beyond each end is kept too, so that lines run to the edge. NaN becomes null, which draws a gap.
 */
export function thin(curve: Curve, min: number, max: number, buckets: number): Points {
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
  const count = end - start;
  const size = Math.max(1, Math.ceil(count / Math.max(1, buckets)));
  if (size <= 2) {
    for (let i = start; i < end; i++) {
      keep(i);
    }
    return [outX, outY];
  }
  for (let from = start; from < end; from += size) {
    const to = Math.min(from + size, end);
    let low = -1;
    let high = -1;
    for (let i = from; i < to; i++) {
      if (!Number.isNaN(y[i])) {
        low = low < 0 || y[i] < y[low] ? i : low;
        high = high < 0 || y[i] > y[high] ? i : high;
      }
    }
    if (low < 0) {
      keep(from);
    } else {
      keep(Math.min(low, high));
      if (low !== high) {
        keep(Math.max(low, high));
      }
    }
  }
  return [outX, outY];
}

/** The smallest round number that leaves a little room after `step`, but never beyond `total`. */
export function roomFor(step: number, total: number | null): number {
  const needed = Math.max(10, step * 1.02);
  let room = Math.pow(10, Math.floor(Math.log10(needed)));
  while (room < needed) {
    room *= 1.25;
  }
  room = Math.ceil(room);
  return total && total >= step ? Math.min(room, total) : room;
}
