// Range and ticks of the vertical axis, linear or logarithmic. Logarithms are computed here, not by
// uPlot.
import { Points } from './columns';

const MAX_TICKS = 5;
/** Minimum height of a logarithmic range, in decades. */
const MIN_DECADES = 0.1;

/** Return a range around the values with a margin; it starts at 0 if `isFromZero`. */
export function range(values: number[], isFromZero: boolean): [number, number] {
  let low = isFromZero ? 0 : Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!(high > -Infinity) || low === Infinity) {
    return [0, 1];
  }
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [isFromZero ? low : low - margin, high + margin];
}

/** Return a range around the logarithms of positive values. */
export function logRange(values: number[]): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, Math.log10(value));
    high = Math.max(high, Math.log10(value));
  }
  if (!(high > -Infinity)) {
    return [0, 1];
  }
  const margin = Math.max((high - low) * 0.06, MIN_DECADES / 2);
  return [low - margin, high + margin];
}

/** Return the logarithms of points. A value that is not positive becomes a gap. */
export function logged([x, y]: Points): Points {
  return [x, y.map(value => (value !== null && value > 0 ? Math.log10(value) : null))];
}

/** Return a few round numbers in a range. */
export function splits([low, high]: [number, number], isCount: boolean): number[] {
  const step = roundStep((high - low) / MAX_TICKS, isCount);
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step);
  return Array.from({ length: Math.min(20, Math.max(0, last - first + 1)) }, (_, i) =>
    Number(((first + i) * step).toPrecision(12))
  );
}

/** Return the logarithms of round numbers, for a range of logarithms. */
export function logSplits([low, high]: [number, number]): number[] {
  if (high - low < 0.7) {
    const straight = splits([10 ** low, 10 ** high], false);
    return straight.filter(value => value > 0).map(Math.log10);
  }
  const stride = Math.max(1, Math.ceil((high - low) / MAX_TICKS));
  const factors = high - low < 2 ? [1, 2, 5] : high - low < 3.5 ? [1, 3] : [1];
  const out: number[] = [];
  for (let power = Math.floor(low); power <= high && out.length < 30; power++) {
    for (const factor of power % stride === 0 ? factors : []) {
      const at = power + Math.log10(factor);
      if (at >= low && at <= high) {
        out.push(at);
      }
    }
  }
  return out;
}

function roundStep(rough: number, isCount: boolean): number {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step =
    [1, 2, 5, 10].map(factor => factor * power).find(candidate => candidate >= rough * 0.8) ??
    rough;
  return isCount ? Math.max(1, Math.round(step)) : step;
}
