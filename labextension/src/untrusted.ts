// Checked access to untrusted values: messages of a kernel and saved notebooks. Every function
// accepts anything and returns a value of its type, with limits on size.

export type Raw = Record<string, unknown>;
const MAX_ITEMS = 2000;
const MAX_TEXT = 20000;
const MAX_KEYS = 50;
/** Above any real step, time or size, and far below the limits of floating-point arithmetic. */
const MAX_NUMBER = 1e15;

/** Return an object; empty for anything else. */
export const object = (value: unknown): Raw =>
  value && typeof value === 'object' && !Array.isArray(value) ? (value as Raw) : {};
/** Return a list of objects. */
export const list = (value: unknown): Raw[] =>
  Array.isArray(value) ? value.slice(0, MAX_ITEMS).map(object) : [];
/** Return text; a number becomes text, anything else is empty. */
export const text = (value: unknown): string =>
  (typeof value === 'string' ? value : typeof value === 'number' ? String(value) : '').slice(
    0,
    MAX_TEXT
  );

/** Above any page that a kernel renders, and far below the memory of a tab. */
const MAX_PAGE = 20_000_000;
/** Return HTML for an isolated frame; empty for anything else. */
export const page = (value: unknown): string =>
  typeof value === 'string' ? value.slice(0, MAX_PAGE) : '';

/**
 * Pattern of a job ID: one word that is safe in a cell and in a path. The same as in untrusted.py.
 */
const JOB_ID = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$/;
/** Return a valid job ID; empty for anything else. Cells and messages use no unchecked ID. */
export const jobId = (value: unknown): string =>
  typeof value === 'string' && JOB_ID.test(value) ? value : '';

const MAX_LINE = 200;
/** Control characters, line separators and marks that change the direction of text. */
const NOT_IN_A_LINE =
  // eslint-disable-next-line no-control-regex -- it removes them
  /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]+/g;
/** Return text of one line, for a title or a name. */
export const line = (value: unknown): string =>
  text(value).slice(0, MAX_LINE).replace(NOT_IN_A_LINE, ' ');

/** Return a list of texts. */
export const textList = (value: unknown): string[] =>
  Array.isArray(value) ? value.slice(0, MAX_ITEMS).map(text) : [];

/** Return a number, or null. JSON has no NaN and no infinity: the kernel sends them as strings. */
export function numberOrNull(value: unknown): number | null {
  if (typeof value === 'number') {
    return value;
  }
  return value === 'NaN' || value === 'Infinity' || value === '-Infinity' ? Number(value) : null;
}
/** Return a finite number; null for anything else. */
export const finiteOrNull = (value: unknown): number | null => {
  const n = numberOrNull(value);
  return n !== null && Number.isFinite(n) ? Math.min(MAX_NUMBER, Math.max(-MAX_NUMBER, n)) : null;
};
/** Return a finite number; 0 for anything else. */
export const finite = (value: unknown): number => finiteOrNull(value) ?? 0;

/**
 * Return the numbers of an object. It has no prototype, so that a key such as __proto__ is
 * harmless.
 */
export function numbers(value: unknown): Record<string, number> {
  const out = Object.create(null) as Record<string, number>;
  for (const [key, item] of Object.entries(object(value)).slice(0, MAX_KEYS)) {
    const n = numberOrNull(item);
    if (n !== null) {
      out[key] = n;
    }
  }
  return out;
}

/** Return the texts of an object. */
export function texts(value: unknown): Record<string, string> {
  return Object.fromEntries(
    Object.entries(object(value))
      .slice(0, MAX_KEYS)
      .map(([key, item]) => [key, text(item)])
  );
}
