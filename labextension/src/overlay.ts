// The event markers of one chart: shapes above the plot, lines through it, and the tooltip that
// names them.
import uPlot from 'uplot';
import { make } from './dom';
import {
  colourOf,
  drawShape,
  icon,
  IPlace,
  isDashed,
  isMajor,
  MarkButtons,
  namesOf,
  placesOf
} from './marks';
import { HEIGHT, IPlotSource, LANE } from './plot';

/** Maximum distance of the cursor from a marker that it names, in pixels. */
const REACH_PX = 6;
/** Maximum icons in a tooltip. */
const MAX_ICONS = 5;
const TIP_GAP_PX = 9;

export class Overlay {
  private readonly tip = make('div', 'etrain-tip');
  private readonly buttons: MarkButtons | null;
  private places: IPlace[] = [];
  private pinned: IPlace | null = null;

  /** `onPin` receives the place whose button has the focus or the pointer; null after it. */
  constructor(
    private readonly source: IPlotSource,
    onPin: (place: IPlace | null) => void
  ) {
    this.tip.hidden = true;
    // One chart of the view has buttons: a keyboard user visits each event once.
    this.buttons = source.spec.isWorld
      ? new MarkButtons(place => {
          this.pinned = place;
          this.showTip(place);
          onPin(place);
        })
      : null;
  }

  /** Add the elements to the plot. */
  attach(plot: uPlot): void {
    plot.over.append(this.tip, ...(this.buttons ? [this.buttons.element] : []));
  }

  /** Name the marker next to the cursor, unless a button has pinned another one. */
  hover(left: number | null): void {
    if (!this.pinned) {
      const isNear = (place: IPlace) => left !== null && Math.abs(place.at - left) <= REACH_PX;
      this.showTip(this.places.find(isNear) ?? null);
    }
  }

  /** Draw a shape above the plot for each place, and a line down from it. */
  draw(u: uPlot): void {
    const { spec, shared, x: range } = this.source;
    const { axis, data } = shared;
    const visible = data.snapshot.markers.filter(marker => {
      const at = axis.ofMarker(marker);
      return at >= range[0] && at <= range[1] && (!!spec.isWorld || isMajor(marker));
    });
    this.places = placesOf(visible, marker => u.valToPos(axis.ofMarker(marker), 'x'));
    this.buttons?.draw(this.places);
    this.drawPlaces(u);
  }

  private drawPlaces({ ctx, bbox }: uPlot): void {
    const pixel = devicePixelRatio;
    ctx.save();
    for (const { at, markers } of this.places) {
      const { kind } = markers[0];
      const x = Math.round(bbox.left + at * pixel) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = this.source.colour(colourOf(kind));
      ctx.setLineDash([]);
      drawShape(ctx, kind, x, bbox.top - (LANE / 2) * pixel, 0.8 * pixel);
      if (isMajor(markers[0])) {
        ctx.lineWidth = pixel;
        ctx.globalAlpha = this.source.spec.isWorld ? 0.8 : 0.4;
        ctx.setLineDash(isDashed(kind) ? [3 * pixel, 3 * pixel] : []);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
    }
    ctx.restore();
  }

  private showTip(place: IPlace | null): void {
    this.tip.hidden = !place;
    if (!place) {
      return;
    }
    const rows = namesOf(place.markers).map((name, i) => {
      const row = make('div');
      const marker = place.markers[i];
      row.append(...(i < MAX_ICONS && marker ? [icon(marker.kind)] : []), name);
      return row;
    });
    this.tip.replaceChildren(...rows);
    const width = this.tip.parentElement?.clientWidth ?? HEIGHT;
    // The tooltip opens toward the middle of the chart, so that it never leaves it.
    const isRight = place.at > width / 2;
    this.tip.style.left = isRight ? '' : `${place.at + TIP_GAP_PX}px`;
    this.tip.style.right = isRight ? `${width - place.at + TIP_GAP_PX}px` : '';
  }
}
