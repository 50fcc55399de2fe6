// Apply changes to the lists of a snapshot, row by row. The counterpart of feed.py.

export type Row = Record<string, unknown>;

/** The lists, each with the field that identifies its rows. */
export const LISTS = [
  ['events', 'id'],
  ['markers', 'id'],
  ['workers', 'worker']
] as const;

export interface IPatch {
  /** New rows with all fields; changed rows with their key and the changed fields. */
  rows: Row[];
  /** Keys of removed rows. */
  gone: string[];
  /** All keys in order; empty if the order is unchanged and new rows are at the end. */
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
