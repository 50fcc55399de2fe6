// The legend of one chart: each line with its value under the cursor, or its newest value.
import { lowerBound } from './columns';
import { make, setText } from './dom';
import * as format from './format';
import { ILine, isListed } from './lines';
import { IChartSpec, IShared } from './spec';

interface IItem {
  label: string;
  figure: string;
  /** CSS variable. */
  colour: string;
}

export class Legend {
  readonly element = make('span', 'etrain-legend');

  constructor(
    private readonly spec: IChartSpec,
    private readonly shared: IShared
  ) {}

  /**
   * Show the values at `at`, a value of the axis; Infinity for the newest. Return them as one text.
   */
  draw(lines: ILine[], at: number): string {
    const items = lines.filter(isListed).map(line => this.itemOf(line, at));
    if (this.element.children.length !== items.length) {
      this.element.replaceChildren(...items.map(() => make('span', 'etrain-value')));
    }
    const texts = items.map(({ label, figure }) => `${label} ${figure}`.trim());
    items.forEach(({ label, colour }, i) => {
      const element = this.element.children[i] as HTMLElement;
      element.style.setProperty('--etrain-key', `var(${colour})`);
      element.classList.toggle('etrain-keyed', !!label);
      element.dataset.line = label;
      setText(element, texts[i]);
    });
    return texts.join(', ');
  }

  private itemOf(line: ILine, at: number): IItem {
    const show = this.spec.isCount ? format.count : format.number;
    const value = line.curve ? this.exactValue(line.curve, at) : drawnValue(line, at);
    return { label: line.label, figure: show(value), colour: line.colour };
  }

  /** The drawn points are thinned. The curve has the value of every step that the view knows. */
  private exactValue(name: string, at: number): number | undefined {
    const { axis, data } = this.shared;
    const step = at === Infinity ? Infinity : Math.round(axis.stepAt(at));
    return data.curveIn(name, ...axis.steps())?.at(step);
  }
}

/** Return the value of the last drawn point up to `at`; null in a gap. */
function drawnValue({ points: [x, y] }: ILine, at: number): number | null | undefined {
  return y[at === Infinity ? x.length - 1 : lowerBound(x, at + 1e-9) - 1];
}
