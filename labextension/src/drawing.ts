// Drawing defaults of a view. JupyterLab's settings override them.

export interface IDrawing {
  /** Initial weight of the moving average; 0 for none. */
  smoothing: number;
  /** Whether charts that offer a logarithmic scale start with it. */
  logScale: boolean;
  /** Maximum redraws of a view per second. */
  redrawsPerS: number;
}

export const drawing: IDrawing = { smoothing: 0.8, logScale: false, redrawsPerS: 20 };

const listeners = new Set<() => void>();

export function changeDrawing(changes: Partial<IDrawing>): void {
  Object.assign(drawing, changes);
  listeners.forEach(listener => listener());
}

/** Call `listener` after each change. Return a function that removes it. */
export function onDrawing(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
