// The lists of a snapshot come in pieces: what changed in their rows. The twin of dashboard/changes.py.

export type Row = Record<string, unknown>;

/** The lists, and the field by which each knows its rows. */
export const LISTS = [
  ['events', 'id'],
  ['markers', 'id'],
  ['workers', 'worker']
] as const;

export interface IPatch {
  /** New ones whole; of those that changed, the key and the fields that did. */
  rows: Row[];
  /** Keys. */
  gone: string[];
  /** All keys, where the rows do not stand as before with the new ones at the end. */
  order: string[];
}

export function patched(rows: Row[], key: string, { rows: changed, gone, order }: IPatch): Row[] {
  const keyOf = (row: Row) => {
    const value = row[key];
    return typeof value === 'string' || typeof value === 'number' ? String(value) : '';
  };
  const byKey = new Map(rows.map(row => [keyOf(row), row]));
  changed.forEach(row => byKey.set(keyOf(row), { ...byKey.get(keyOf(row)), ...row }));
  gone.forEach(name => byKey.delete(name));
  return order.length
    ? order.map(name => byKey.get(name)).filter(row => row !== undefined)
    : [...byKey.values()];
}
