// Check and convert exhibits: figures, texts and tables of an evaluation. They are untrusted, like
// snapshots. A picture is shown only through an <img> with a data: URL, which runs no script.
import { Buffer } from './job_data';
import { finite, list, numberOrNull, object, text, textList } from './untrusted';

/** The same limits as in log/exhibits.py. */
const MAX_BYTES = 1_000_000;
const MAX_PIXELS = 16_000_000;
const MAX_ROWS = 200;
const MAX_COLUMNS = 20;
/** Maximum number of exhibits in a saved notebook, as in saved_exhibits.py. */
const MAX_SAVED = 50;

export type Cell = string | number | boolean | null;

export interface ITable {
  columns: string[];
  rows: Cell[][];
}

/** The content of an exhibit. Exactly one of the last four is not null. */
export interface IExhibit {
  name: string;
  step: number;
  /** A data: URL. */
  picture: string | null;
  text: string | null;
  table: ITable | null;
  /** Why the content cannot be shown. */
  error: string | null;
}

/** Convert a message of the kernel. Invalid content becomes an error. */
export function asExhibit(value: unknown, buffers: readonly (Buffer | undefined)[]): IExhibit {
  const raw = object(value);
  const exhibit: IExhibit = {
    name: text(raw.name),
    step: finite(raw.step),
    picture: null,
    text: null,
    table: null,
    error: null
  };
  const error = text(raw.error);
  if (error) {
    return { ...exhibit, error };
  }
  if (raw.format === 'png') {
    const picture = pictureUrl(buffers[0]);
    return picture === null
      ? { ...exhibit, error: 'The picture is not a valid PNG.' }
      : { ...exhibit, picture };
  }
  if (raw.format === 'text') {
    return { ...exhibit, text: text(raw.text) };
  }
  if (raw.format === 'table') {
    return { ...exhibit, table: asTable(raw.table) };
  }
  return { ...exhibit, error: 'This version cannot show this kind of exhibit.' };
}

/** Convert the exhibits that a notebook has saved. Invalid ones are left out. */
export function savedExhibits(saved: unknown): IExhibit[] {
  return list(object(saved).exhibits)
    .slice(0, MAX_SAVED)
    .map(raw => asExhibit(raw, [bytesOf(raw.data)]))
    .filter(exhibit => exhibit.error === null);
}

/** Decode base64; undefined for anything else. */
function bytesOf(data: unknown): Uint8Array | undefined {
  if (typeof data !== 'string' || data.length > 2 * MAX_BYTES) {
    return undefined;
  }
  try {
    return Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
  } catch {
    return undefined;
  }
}

const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
/** Length (13) and type (IHDR) of the first chunk. */
const HEADER = [0, 0, 0, 13, 0x49, 0x48, 0x44, 0x52];
const HEADER_BYTES = 24;

/** Return the data: URL of a PNG; null for anything else, and for a picture that is too large. */
export function pictureUrl(buffer: Buffer | undefined): string | null {
  if (!buffer || buffer.byteLength < HEADER_BYTES || buffer.byteLength > MAX_BYTES) {
    return null;
  }
  const view =
    buffer instanceof ArrayBuffer
      ? new DataView(buffer)
      : new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  const isPng = [...SIGNATURE, ...HEADER].every((byte, i) => view.getUint8(i) === byte);
  const numPixels = view.getUint32(16) * view.getUint32(20);
  if (!isPng || numPixels === 0 || numPixels > MAX_PIXELS) {
    return null;
  }
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const parts: string[] = [];
  // In parts, since a call has a limited number of arguments.
  for (let start = 0; start < bytes.length; start += 8192) {
    parts.push(String.fromCharCode(...bytes.subarray(start, start + 8192)));
  }
  return `data:image/png;base64,${btoa(parts.join(''))}`;
}

function asTable(value: unknown): ITable {
  const raw = object(value);
  const columns = textList(raw.columns).slice(0, MAX_COLUMNS);
  const rows = Array.isArray(raw.rows) ? raw.rows.slice(0, MAX_ROWS) : [];
  return {
    columns,
    rows: rows.map((row: unknown) => {
      const cells: unknown[] = Array.isArray(row) ? row : [];
      return columns.map((_, i) => asCell(cells[i]));
    })
  };
}

/** Return a cell; null for anything that is not a scalar. */
function asCell(value: unknown): Cell {
  if (typeof value === 'boolean') {
    return value;
  }
  return numberOrNull(value) ?? (typeof value === 'string' ? text(value) : null);
}

/**
 * Return the index of the step to show: the newest one, or the last one that is not after the step
 * that the user has chosen.
 */
export function indexOfStep(steps: readonly number[], chosen: number | null): number {
  const last = steps.length - 1;
  if (chosen === null) {
    return last;
  }
  const after = steps.findIndex(step => step > chosen);
  return after < 0 ? last : Math.max(0, after - 1);
}
