// Chart preferences of the user, kept in the browser's local storage for the next view.
import { Unit, UNITS } from './axis';

const KEY = 'etrain-jupyter:charts';
const MOST_TITLES = 100;

/** Preferences; null, or a missing title, means the default. */
export interface IChoices {
  unit: Unit | null;
  /** Weight of the smoothing: 0 for none, up to 0.99. */
  weight: number | null;
  /** Whether the scale is logarithmic, by chart title. */
  isLog: Map<string, boolean>;
}

type Store = Pick<Storage, 'getItem' | 'setItem'>;

/**
 * Return the local storage; null if the browser forbids it (opaque origin, blocked cookies): then
 * even its name throws.
 */
function storeOfBrowser(): Store | null {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

/** Read the preferences. Ignore anything that is invalid. */
export function readChoices(store: Store | null = storeOfBrowser()): IChoices {
  let kept: Partial<Record<keyof IChoices, unknown>> = {};
  try {
    kept = Object(JSON.parse(store?.getItem(KEY) ?? '{}')) as typeof kept;
  } catch {
    // Invalid JSON, or storage that may not be read: use the defaults.
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
    // The storage is full or forbidden: the preferences last as long as this view.
  }
}
