// Options of the uPlot instance behind a chart: scales, ticks, and how each line is drawn.
import uPlot from 'uplot';
import * as format from './format';
import { Role } from './lines';
import * as scale from './scale';
import { IChartSpec, IShared, Range } from './spec';

export const HEIGHT = 172;
/** Width of the labels of the vertical axis. */
export const AXIS_WIDTH = 48;
/** Height of the lane above the plot that holds the markers. */
export const LANE = 14;
/** Below this number of visible points, each point of a raw line gets a dot. */
const FEW_POINTS = 80;
/** Minimum space of an evaluation's dot, in pixels. */
const DOT_SPACE = 5;

/** State of the chart, read by uPlot whenever it draws. */
export interface IPlotSource {
  readonly spec: IChartSpec;
  readonly shared: IShared;
  readonly x: Range;
  readonly y: Range;
  readonly isLog: boolean;
  /** Number of drawn evaluations. */
  readonly numEvaluations: number;
  /** Resolve a CSS variable. */
  colour(name: string): string;
}

export function plotOptions(
  source: IPlotSource,
  width: number,
  hooks: uPlot.Hooks.Arrays
): uPlot.Options {
  const { spec, shared } = source;
  const axis = {
    stroke: () => source.colour('--etrain-faint'),
    font: '11px system-ui, sans-serif',
    grid: { stroke: () => source.colour('--etrain-grid'), width: 1 },
    ticks: { show: false }
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    padding: [LANE, 18, 0, 0],
    scales: { x: { time: false, range: () => source.x }, y: { range: () => source.y } },
    axes: [
      {
        ...axis,
        size: 27,
        gap: 6,
        space: 50,
        incrs: () => shared.axis.incrs,
        values: (_u, values) => values.map(value => shared.axis.tick(value))
      },
      {
        ...axis,
        size: AXIS_WIDTH,
        gap: 4,
        space: 26,
        splits: () =>
          source.isLog ? scale.logSplits(source.y) : scale.splits(source.y, !!spec.isCount),
        values: (_u, values) => values.map(value => format.tick(source.isLog ? 10 ** value : value))
      }
    ],
    // The first series is the x axis.
    series: [{}, ...rolesOf(spec).map(role => seriesOf(role, source))],
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false },
      sync: { key: shared.sync.key, setSeries: false },
      bind: { dblclick: () => null },
      points: { size: 6 }
    },
    hooks
  };
}

/** The same roles in the same order as `readLines` in lines.ts. */
function rolesOf(spec: IChartSpec): Role[] {
  if (spec.isWorld) {
    return ['world'];
  }
  return ['train', 'smoothed', ...(spec.evaluation ? ['evaluation' as const] : []), 'undone'];
}

function seriesOf(role: Role, source: IPlotSource): uPlot.Series {
  const { shared } = source;
  switch (role) {
    case 'world':
      return {
        stroke: () => source.colour('--etrain-train'),
        fill: () => source.colour('--etrain-fill'),
        width: 1.75,
        points: { show: false },
        paths: uPlot.paths.stepped?.({ align: 1 })
      };
    case 'train':
      return {
        stroke: () => source.colour(shared.weight ? '--etrain-raw' : '--etrain-train'),
        width: 1.25,
        points: {
          show: (_u: uPlot, _series: number, from: number, to: number) =>
            to - from < FEW_POINTS && !shared.weight,
          size: 3
        }
      };
    case 'smoothed':
      return {
        stroke: () => source.colour('--etrain-train'),
        width: 1.75,
        points: { show: false }
      };
    case 'evaluation':
      return {
        stroke: () => source.colour('--etrain-eval'),
        width: 1.5,
        dash: [5, 3],
        points: {
          show: (u: uPlot) => source.numEvaluations * DOT_SPACE < u.width,
          size: 6,
          fill: () => source.colour('--etrain-eval')
        }
      };
    case 'undone':
      return {
        stroke: () => source.colour('--etrain-undone'),
        width: 1.25,
        dash: [2, 3],
        points: { show: false }
      };
  }
}
