// How views are drawn at first. JupyterLab's settings change it; elsewhere it is what stands here.

export interface IDrawing {
  /** Weight of the moving average that charts begin with; 0 for none. */
  smoothing: number;
  /** Whether charts that can begin with a logarithmic scale. */
  logScale: boolean;
  /** A view is drawn anew at most that often. */
  redrawsPerS: number;
}

export const drawing: IDrawing = { smoothing: 0.8, logScale: false, redrawsPerS: 20 };

const hearers = new Set<() => void>();

export function changeDrawing(wanted: Partial<IDrawing>): void {
  Object.assign(drawing, wanted);
  hearers.forEach(hear => hear());
}

/** Hear of changes; returns how to stop. */
export function onDrawing(hear: () => void): () => void {
  hearers.add(hear);
  return () => hearers.delete(hear);
}
