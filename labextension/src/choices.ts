// How a person likes the charts: kept by the browser for the next view, where it may keep anything.
import { Unit, UNITS } from './axis';

const KEY = 'etrain-jupyter:charts';
const MOST_TITLES = 100;

/** Null, or a missing title, where nobody has chosen. */
export interface IChoices {
  unit: Unit | null;
  /** Of the smoothing: 0 for none, up to 0.99. */
  weight: number | null;
  /** Whether the scale is logarithmic, by title of the chart. */
  isLog: Map<string, boolean>;
}

type Store = Pick<Storage, 'getItem' | 'setItem'>;

/** Browsers that forbid it throw at the very name: in frames without an origin, or with cookies blocked. */
function storeOfBrowser(): Store | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

/** Read them; whatever else may be written there counts for nothing. */
export function readChoices(store: Store | null = storeOfBrowser()): IChoices {
  let kept: Partial<Record<keyof IChoices, unknown>> = {};
  try {
    kept = Object(JSON.parse(store?.getItem(KEY) ?? '{}')) as typeof kept;
  } catch {
    // Not ours, or not allowed: as if there was nothing.
  }
  const { unit, weight, isLog } = kept;
  const isPair = (pair: unknown): pair is [string, unknown] =>
    Array.isArray(pair) && typeof pair[0] === 'string';
  const pairs = Array.isArray(isLog) ? isLog.filter(isPair) : [];
  return {
    unit: UNITS.find(one => one === unit) ?? null,
    weight: typeof weight === 'number' && weight >= 0 && weight <= 0.99 ? weight : null,
    isLog: new Map(pairs.slice(-MOST_TITLES).map(([title, value]) => [title, value === true]))
  };
}

export function keepChoices(choices: IChoices, store: Store | null = storeOfBrowser()): void {
  try {
    store?.setItem(
      KEY,
      JSON.stringify({ ...choices, isLog: [...choices.isLog].slice(-MOST_TITLES) })
    );
  } catch {
    // Full or forbidden: they hold as long as this view does.
  }
}
