// Format numbers, durations, sizes and amounts for display.

const GROUPED = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat('en-US', { notation: 'compact', maximumFractionDigits: 1 });
export const NONE = '–';

/** Four significant digits; `–` for a missing value. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return NONE;
  }
  if (!Number.isFinite(value)) {
    return Number.isNaN(value) ? 'NaN' : value > 0 ? '∞' : '−∞';
  }
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e9)) {
    return value.toExponential(2).replace('-', '−');
  }
  return size >= 1000 ? GROUPED.format(value) : String(Number(value.toPrecision(4)));
}

/** Three significant digits without trailing zeros: `3e−4`, `0.05`. */
export function brief(value: number): string {
  const size = Math.abs(value);
  const text =
    size && size < 1e-3
      ? Number(value.toPrecision(3)).toExponential()
      : String(Number(value.toPrecision(3)));
  return text.replace(/-/g, '−');
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : GROUPED.format(value);
}

/** The shortest label of a tick. */
export function tick(value: number): string {
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e12)) {
    return value.toExponential(0);
  }
  return size >= 10000
    ? COMPACT.format(value)
    : size >= 1000
      ? GROUPED.format(value)
      : String(Number(value.toPrecision(4)));
}

/** `0:42`, `12:05`, `3:04:09`. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const two = (n: number) => String(n).padStart(2, '0');
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** An age: `3 s`, `4 min`, `2 h`, `5 d`. */
export function age(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 60) {
    return `${Math.floor(s)} s`;
  }
  if (s < 3600) {
    return `${Math.floor(s / 60)} min`;
  }
  return s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}

/** `no jobs`, `1 job`, `3 jobs`. */
export function plural(value: number, noun: string): string {
  return `${value ? count(value) : 'no'} ${noun}${value === 1 ? '' : 's'}`;
}

/** `812 B`, `1.5 MB`. */
export function size(bytes: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let value = bytes;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

/** `$0.43`, `$1,204`. */
export function money(usd: number): string {
  if (usd >= 100) {
    return `$${GROUPED.format(usd)}`;
  }
  // A minute of a machine costs cents: show fractions of a cent.
  return `$${Math.max(0, usd).toFixed(usd > 0 && usd < 0.1 ? 4 : 2)}`;
}

/** Local time of day; `seconds` counts from the epoch. */
export function timeOfDay(seconds: number): string {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? '' : date.toTimeString().slice(0, 8);
}
