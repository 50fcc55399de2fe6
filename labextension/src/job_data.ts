// The curves and the snapshot of one job, built from the messages of the kernel or from a saved
// notebook.
import { Curve } from './columns';
import { LISTS, patched } from './lists';
import { asSnapshot } from './protocol';
import { finite, list, object, Raw, text, textList } from './untrusted';

export type Buffer = ArrayBuffer | ArrayBufferView;

/** Copy the bytes of a buffer, which may be unaligned. */
function bytesOf(buffer: Buffer): ArrayBuffer {
  return buffer instanceof ArrayBuffer
    ? buffer
    : (buffer.buffer.slice(
        buffer.byteOffset,
        buffer.byteOffset + buffer.byteLength
      ) as ArrayBuffer);
}

const BYTES_PER_ROW = 12;
const MEAN = 'mean.';
export type Taken = 'update' | 'detail' | 'gap' | 'nothing';

/**
 * Whether a smoothed line is drawn for a curve, from its means. The same rule as `_is_noisy` in
 * feed.py.
 */
const isNoisy = (name: string) =>
  name === 'loss' || name === 'samples_per_s' || name.startsWith('metrics.');

/**
 * Curves by name. The kernel sends means only for a thinned curve; otherwise the points are their
 * own means.
 */
class Curves {
  private readonly byName = new Map<string, Curve>();

  get(name: string): Curve | undefined {
    return this.byName.get(name);
  }

  has(name: string): boolean {
    return this.byName.has(name);
  }

  append(name: string, x: ArrayLike<number>, y: ArrayLike<number>): void {
    let curve = this.byName.get(name);
    if (!curve) {
      curve = new Curve(name.startsWith(MEAN));
      this.byName.set(name, curve);
    }
    curve.append(x, y);
  }

  /** Append the blocks of a message. */
  take(blocks: Raw[], buffers: readonly (Buffer | undefined)[]): void {
    const names = new Set(blocks.map(block => text(block.name)));
    blocks.forEach((block, i) => {
      const name = text(block.name);
      const rows = finite(block.rows);
      const buffer = buffers[i];
      if (buffer?.byteLength !== rows * BYTES_PER_ROW) {
        return;
      }
      const bytes = bytesOf(buffer);
      this.add(
        name,
        new Float64Array(bytes, 0, rows),
        new Float32Array(bytes, rows * 8, rows),
        names
      );
    });
  }

  /** Load the curves of a saved notebook. Skip points whose x decreases. */
  load(series: Raw): void {
    const entries = Object.entries(series).slice(0, 50);
    const names = new Set(entries.map(([name]) => name));
    for (const [name, value] of entries) {
      const x = parseCurve(object(value).x).map(finite);
      const y = parseCurve(object(value).y);
      if (x.length === y.length) {
        const rising = risingRows(x);
        this.add(
          name,
          rising.map(i => x[i]),
          rising.map(i => y[i]),
          names
        );
      }
    }
  }

  private add(name: string, x: ArrayLike<number>, y: ArrayLike<number>, names: Set<string>): void {
    this.append(name, x, y);
    if (isNoisy(name) && !names.has(MEAN + name)) {
      this.append(MEAN + name, x, y);
    }
  }
}

const MAX_SAVED = 20000;

/** Parse a saved curve. It is one text, since JupyterLab saves a list with one line per number. */
const parseCurve = (value: unknown): number[] =>
  typeof value === 'string' && value ? value.split(' ', MAX_SAVED).map(Number) : [];

function risingRows(x: number[]): number[] {
  let highest = -Infinity;
  return x.flatMap((value, i) => {
    const isRising = value >= highest;
    highest = Math.max(highest, value);
    return isRising ? [i] : [];
  });
}

interface IDetail {
  first: number;
  last: number;
  curves: Curves;
}

/** The state of a job in one view: snapshot and curves. */
export class JobData {
  snapshot = asSnapshot({});
  curves = new Curves();
  /** Whether every message since the last reset has arrived. */
  isSynced = false;
  /** The curves of a zoomed range, at the kernel's resolution. */
  private detail: IDetail | null = null;
  private rawSnapshot: Raw = {};
  private seq = 0;

  constructor(readonly view: string) {}

  /** Load the state that a notebook has saved. */
  load(saved: unknown): void {
    const raw = object(saved);
    this.rawSnapshot = object(raw.snapshot);
    this.snapshot = asSnapshot(this.rawSnapshot);
    this.reset();
    this.curves.load(object(raw.series));
    this.isSynced = false;
  }

  /**
   * Apply a message of the kernel. `gap` means that messages were lost: send a hello to get a
   * reset.
   */
  take(content: unknown, buffers: readonly Buffer[]): Taken {
    const message = object(content);
    if (typeof message.seq !== 'number') {
      return 'nothing';
    }
    const isNext = message.seq === this.seq + 1;
    this.seq = message.seq;
    const isMine = !message.to || message.to === this.view;
    if (this.isSynced && !isNext && !(message.reset && isMine)) {
      this.isSynced = false;
      return 'gap';
    }
    if (message.kind === 'detail' && isMine && this.isSynced) {
      this.detail = {
        first: finite(message.first),
        last: finite(message.last),
        curves: new Curves()
      };
      this.detail.curves.take(list(message.blocks), buffers);
      return 'detail';
    }
    if (message.kind !== 'update' || !isMine || !(message.reset || this.isSynced)) {
      return 'nothing';
    }
    if (message.reset) {
      this.reset();
      this.rawSnapshot = {};
    }
    this.rawSnapshot = { ...this.rawSnapshot, ...object(message.snapshot) };
    for (const [name, key] of LISTS) {
      const { rows, gone, order } = object(object(message.lists)[name]);
      if (rows || gone || order) {
        const patch = { rows: list(rows), gone: textList(gone), order: textList(order) };
        this.rawSnapshot[name] = patched(list(this.rawSnapshot[name]), key, patch);
      }
    }
    this.snapshot = asSnapshot(this.rawSnapshot);
    this.curves.take(list(message.blocks), buffers);
    if (this.detail && this.detail.last >= this.snapshot.step) {
      this.detail.curves.take(list(message.blocks), buffers);
    }
    this.isSynced = true;
    return 'update';
  }

  /** Whether the kernel has sent the details between two steps. */
  hasDetail(first: number, last: number): boolean {
    return this.detailOf(first, last) !== null;
  }

  /** Return the curve with the highest resolution between two steps. */
  curveIn(name: string, first: number, last: number): Curve | undefined {
    return (this.detailOf(first, last) ?? this.curves).get(name);
  }

  private detailOf(first: number, last: number): Curves | null {
    const { detail } = this;
    return detail && detail.first <= first && detail.last >= last ? detail.curves : null;
  }

  /** Return the curve of means of another curve. */
  meansIn(name: string, first: number, last: number): Curve | undefined {
    return this.curveIn(MEAN + name, first, last);
  }

  private reset(): void {
    this.curves = new Curves();
    this.detail = null;
  }
}
