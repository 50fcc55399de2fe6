// What one chart shows, and the state that all charts of a view share.
import uPlot from 'uplot';
import { Axis } from './axis';
import { JobData } from './job_data';

export type Range = [number, number];

export interface IChartSpec {
  title: string;
  /** Name of the training curve. */
  train: string;
  /** Name of the evaluation curve; empty if there is none. */
  evaluation: string;
  /** Values are whole numbers. */
  isCount?: boolean;
  /** The vertical axis starts at zero. */
  fromZero?: boolean;
  /**
   * The chart of the world size: a staircase that fills the width and carries the marker buttons.
   */
  isWorld?: boolean;
  /** The chart offers a logarithmic scale. */
  canLog?: boolean;
}

export interface IShared {
  data: JobData;
  axis: Axis;
  sync: uPlot.SyncPubSub;
  /** Weight of the moving average: 0 for none, up to 0.99. */
  weight: number;
  /** The scale that the user chose, by chart title. */
  isLog: Map<string, boolean>;
  onLog(): void;
  /** Zoom all charts to a range of the axis; null shows everything. */
  onZoom(range: Range | null): void;
  /** Report the axis value under the cursor; null without a cursor. */
  onCursor(value: number | null): void;
}
