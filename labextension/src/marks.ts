// Event markers of the charts: a shape per kind, and buttons that make them accessible to the
// keyboard.
import { make, reconcile, setText } from './dom';
import * as format from './format';
import { IMarker } from './snapshot';

/**
 * SVG paths in a box from -5 to 5, stroked if `isLine` and filled otherwise; most important kind
 * first.
 */
const SHAPES: Record<string, { path: string; isLine?: boolean; word: string }> = {
  failed: { path: 'M-2-5H2L5-2V2L2 5H-2L-5 2V-2Z', word: 'error' },
  lost: { path: 'M-4-4L4 4M4-4L-4 4', isLine: true, word: 'lost' },
  restored: { path: 'M3 4H-1A3 3 0 0 1-1-2H4M1.5-5L4.5-2L1.5 1', isLine: true, word: 'rewound' },
  notice: { path: 'M0-5L5 4.5H-5Z', word: 'notice' },
  waiting: { path: 'M-4-4.5H4L-4 4.5H4Z', isLine: true, word: 'waiting' },
  paused: { path: 'M-4-4.5H-1V4.5H-4ZM1-4.5H4V4.5H1Z', word: 'paused' },
  resumed: { path: 'M-3.5-5L5 0L-3.5 5Z', word: 'resumed' },
  join: { path: 'M0-5V5M-5 0H5', isLine: true, word: 'joined' },
  left: { path: 'M-5 0H5', isLine: true, word: 'left' },
  checkpoint: { path: 'M0-4L4 0L0 4L-4 0Z', isLine: true, word: 'saved' }
};
const UNKNOWN = { path: 'M0-2A2 2 0 1 1-.01-2Z', word: '' };
/** Of several markers at one place, the most important kind is drawn. */
const BY_IMPORTANCE = Object.keys(SHAPES);
const shapeOf = (kind: string) =>
  Object.prototype.hasOwnProperty.call(SHAPES, kind) ? SHAPES[kind] : UNKNOWN;
const importance = (marker: IMarker) => (BY_IMPORTANCE.indexOf(marker.kind) + 99) % 99;
const NEAR_PX = 9;
const MAX_NAMED = 5;
const SVG = 'http://www.w3.org/2000/svg';

/** CSS variable with the colour of a kind; that of faint text for an unknown kind. */
export const colourOf = (kind: string) =>
  shapeOf(kind) === UNKNOWN ? '--etrain-faint' : `--etrain-${kind}`;
/**
 * Whether a marker gets a line through every chart. A checkpoint does not: it does not affect
 * training.
 */
export const isMajor = (marker: IMarker) => marker.kind !== 'checkpoint';
export const isDashed = (kind: string) => kind !== 'lost' && kind !== 'failed';

export interface IPlace {
  /** Distance from the left edge of the plot, in CSS pixels. */
  at: number;
  markers: IMarker[];
}

/** Group markers that would overlap. The first marker of a place is the most important one. */
export function placesOf(markers: IMarker[], position: (marker: IMarker) => number): IPlace[] {
  const places: IPlace[] = [];
  const sorted = markers
    .map(marker => ({ marker, at: position(marker) }))
    .sort((a, b) => a.at - b.at);
  for (const { marker, at } of sorted) {
    const last = places[places.length - 1];
    if (last && at - last.at < NEAR_PX) {
      last.markers.push(marker);
    } else {
      places.push({ at, markers: [marker] });
    }
  }
  for (const place of places) {
    place.markers.sort((a, b) => importance(a) - importance(b));
    place.at = position(place.markers[0]);
  }
  return places;
}

/** Describe the markers of a place, one line each, most important first. */
export function namesOf(markers: IMarker[]): string[] {
  const names = markers
    .slice(0, MAX_NAMED)
    .map(
      marker =>
        `step ${format.count(marker.step)}, ${format.timeOfDay(marker.time)}: ${marker.text}`
    );
  return markers.length > MAX_NAMED ? [...names, `and ${markers.length - MAX_NAMED} more`] : names;
}

export function drawShape(
  ctx: CanvasRenderingContext2D,
  kind: string,
  x: number,
  y: number,
  scale: number
): void {
  const { path, isLine } = shapeOf(kind) as { path: string; isLine?: boolean };
  ctx.save();
  ctx.translate(x, y);
  ctx.scale(scale, scale);
  ctx.lineWidth = 1.6;
  const shape = new Path2D(path);
  if (isLine) {
    ctx.stroke(shape);
  } else {
    ctx.fill(shape);
  }
  ctx.restore();
}

export function icon(kind: string): SVGElement {
  const { path, isLine } = shapeOf(kind) as { path: string; isLine?: boolean };
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '-6 -6 12 12');
  svg.setAttribute('aria-hidden', 'true');
  svg.classList.add('etrain-icon');
  svg.style.color = `var(${colourOf(kind)})`;
  const shape = document.createElementNS(SVG, 'path');
  shape.setAttribute('d', path);
  shape.setAttribute(isLine ? 'stroke' : 'fill', 'currentColor');
  shape.setAttribute(isLine ? 'fill' : 'stroke', 'none');
  shape.setAttribute('stroke-width', '1.6');
  svg.append(shape);
  return svg;
}

/** Return the key of the shapes. */
export function key(): HTMLElement {
  const element = make('span', 'etrain-key');
  for (const kind of [
    'lost',
    'notice',
    'left',
    'join',
    'restored',
    'paused',
    'resumed',
    'failed',
    'checkpoint'
  ]) {
    const item = make('span');
    item.append(icon(kind), ` ${shapeOf(kind).word}`);
    element.append(item);
  }
  return element;
}

/**
 * Invisible buttons over the shapes of one chart, for the keyboard: one tab stop, arrow keys move
 * between them.
 */
export class MarkButtons {
  readonly element = make('div', 'etrain-marks');

  constructor(private readonly onShow: (place: IPlace | null) => void) {
    this.element.setAttribute('role', 'group');
    this.element.setAttribute('aria-label', 'events, in order');
    this.element.onkeydown = event => this.move(event);
  }

  draw(places: IPlace[]): void {
    const shown = places.slice(-80);
    const keyOf = (place: IPlace) => String(place.markers[0].seq);
    reconcile(
      this.element,
      shown,
      keyOf,
      () => this.create(),
      (element, place) => {
        element.style.transform = `translateX(${Math.round(place.at) - 7}px)`;
        setText(element.firstElementChild as HTMLElement, namesOf(place.markers).join('; '));
        const button = element as HTMLButtonElement & { etrainPlace?: IPlace };
        button.etrainPlace = place;
      }
    );
    if (!this.element.querySelector('[tabindex="0"]')) {
      (this.element.lastElementChild as HTMLElement | null)?.setAttribute('tabindex', '0');
    }
  }

  private create(): HTMLElement {
    const button = make('button') as HTMLButtonElement & { etrainPlace?: IPlace };
    button.type = 'button';
    button.tabIndex = -1;
    button.append(make('span', 'etrain-visually-hidden'));
    button.onfocus = () => this.onShow(button.etrainPlace ?? null);
    button.onblur = () => this.onShow(null);
    button.onmouseenter = () => this.onShow(button.etrainPlace ?? null);
    button.onmouseleave = () => this.onShow(null);
    return button;
  }

  private move(event: KeyboardEvent): void {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1 };
    const buttons = [...this.element.children] as HTMLElement[];
    const place = buttons.indexOf(document.activeElement as HTMLElement);
    const next = buttons[place + (steps[event.key] ?? 0)];
    if (event.key in steps && place >= 0 && next) {
      buttons.forEach(button => (button.tabIndex = -1));
      next.tabIndex = 0;
      next.focus();
      event.preventDefault();
      event.stopPropagation();
    }
  }
}
