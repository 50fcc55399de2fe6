// The lines of one chart: read from the job's curves, placed on the axis, smoothed, and split at
// gaps.
import { average, Curve, lowerBound, Points, smooth, thin } from './columns';
import * as scale from './scale';
import { IChartSpec, IShared, Range } from './spec';

/** Maximum points of a smoothed line. More would not be visible. */
const MAX_MEANS = 1000;
const MAX_STAIRS = 2000;
/** Events after which training continues only after a pause. */
const BREAKS = new Set(['restored', 'paused', 'waiting']);
const NOTHING: Points = [[], []];

export type Role = 'world' | 'train' | 'smoothed' | 'evaluation' | 'undone';

export interface ILine {
  role: Role;
  /** Label in the legend; may be empty. */
  label: string;
  /** CSS variable. */
  colour: string;
  points: Points;
  /** Curve with the exact values; undefined if the drawn points are the only values. */
  curve?: string;
}

/** Return the lines of a chart in drawing order; `range` is the visible part of the axis. */
export function readLines(
  spec: IChartSpec,
  shared: IShared,
  range: Range,
  maxPoints: number
): ILine[] {
  if (spec.isWorld) {
    return [
      { role: 'world', label: 'training', colour: '--etrain-train', points: readStairs(shared) }
    ];
  }
  const { axis, data, weight } = shared;
  const [first, last] = axis.steps();
  const read = (name: string): Points => {
    const curve = data.curveIn(name, first, last);
    return curve ? thin(curve, first, last, maxPoints) : NOTHING;
  };
  const name = spec.evaluation ? 'train' : '';
  const lines: ILine[] = [
    {
      role: 'train',
      label: weight ? 'raw' : name,
      colour: '--etrain-train',
      points: placeOnAxis(splitAtBreaks(read(spec.train), shared), shared),
      curve: spec.train
    },
    {
      role: 'smoothed',
      label: name || 'smoothed',
      colour: '--etrain-train',
      points: weight ? readSmoothed(spec.train, shared, range) : NOTHING
    }
  ];
  if (spec.evaluation) {
    lines.push({
      role: 'evaluation',
      label: 'eval',
      colour: '--etrain-eval',
      points: placeOnAxis(read(spec.evaluation), shared),
      curve: spec.evaluation
    });
  }
  lines.push({
    role: 'undone',
    label: 'undone',
    colour: '--etrain-undone',
    points: readUndone(spec.train, shared, maxPoints)
  });
  return lines;
}

/** Whether a line has a place in the legend. */
export function isListed({ points, curve }: ILine): boolean {
  return points !== NOTHING || !!curve;
}

/** Return the range of the vertical axis that fits the visible points. */
export function verticalRange(
  spec: IChartSpec,
  shared: IShared,
  lines: ILine[],
  range: Range,
  isLog: boolean
): Range {
  const values: number[] = [];
  for (const { points } of lines) {
    const [x, y] = points;
    const start = Math.max(0, lowerBound(x, range[0]) - 1);
    const end = lowerBound(x, range[1]) + 1;
    for (const value of y.slice(start, end)) {
      if (value !== null && (!isLog || value > 0)) {
        values.push(value);
      }
    }
  }
  if (spec.isWorld) {
    values.push(shared.data.snapshot.max_workers ?? 1);
  }
  return isLog ? scale.logRange(values) : scale.range(values, !!spec.fromZero);
}

/**
 * Return the steps that a rewind discarded. They have no sample count or time, so only the step
 * axis shows them.
 */
function readUndone(name: string, { axis, data }: IShared, maxPoints: number): Points {
  const curve: Curve | undefined = data.curves.get(`undone.${name}`);
  return curve && axis.unit === 'step' ? thin(curve, ...axis.steps(), maxPoints) : NOTHING;
}

function readSmoothed(name: string, shared: IShared, range: Range): Points {
  const [first, last] = shared.axis.steps();
  const means = shared.data.meansIn(name, first, last);
  const points = means ? average(means, first, last, MAX_MEANS) : NOTHING;
  const placed = placeOnAxis(splitAtBreaks(points, shared), shared);
  return smooth(placed, shared.weight, range[1] - range[0]);
}

function readStairs({ axis, data }: IShared): Points {
  const curve = data.curves.get(axis.unit === 'time' ? 'time.world_size' : 'world_size');
  if (!curve?.x.length) {
    return NOTHING;
  }
  const [x, y] = thin(curve, -Infinity, Infinity, MAX_STAIRS, true);
  const at = axis.unit === 'samples' ? x.map(step => axis.ofStep(step)) : x;
  const { snapshot } = data;
  const now =
    axis.unit === 'time'
      ? snapshot.updated_at - (snapshot.started_at ?? 0)
      : axis.ofStep(snapshot.step);
  // The current world size lasts until now.
  return [
    [...at, Math.max(now, at[at.length - 1])],
    [...y, y[y.length - 1]]
  ];
}

/**
 * Convert points of steps to the unit of the axis.
 *
 * Two steps may map to the same value. The plot needs a rising x, so the second one moves up by a
 * billionth.
 */
function placeOnAxis([x, y]: Points, { axis }: IShared): Points {
  if (axis.unit === 'step') {
    return [x, y];
  }
  let previous = -Infinity;
  return [
    x.map(step => {
      const at = axis.ofStep(step);
      previous = at > previous ? at : previous + 1e-9 * Math.max(1, Math.abs(previous));
      return previous;
    }),
    y
  ];
}

/**
 * On the time axis, insert a gap where the job was paused or restored, so that no line crosses that
 * time.
 */
function splitAtBreaks([x, y]: Points, { axis, data }: IShared): Points {
  if (axis.unit !== 'time') {
    return [x, y];
  }
  const breaks = data.snapshot.markers.filter(marker => BREAKS.has(marker.kind));
  const out: Points = [[...x], [...y]];
  for (const step of new Set(breaks.map(marker => marker.step))) {
    const i = lowerBound(out[0], step + 0.5);
    if (i > 0 && i < out[0].length) {
      out[0].splice(i, 0, (out[0][i - 1] + out[0][i]) / 2);
      out[1].splice(i, 0, null);
    }
  }
  return out;
}
