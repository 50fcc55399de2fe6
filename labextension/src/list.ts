// The list of jobs in the side panel: one row of fixed height per job.
import { find, make, reconcile, setText } from './dom';
import * as format from './format';
import { IEntry, IFollower, IMerged, IOffer, isActive, ENDED } from './jobs';
import { checkpointTrouble } from './protocol';
import { ISnapshot } from './snapshot';
import { isTrialOf } from './studies';
import { StudyList } from './study_list';

const CURVE_WIDTH = 72;
const CURVE_HEIGHT = 22;
export const SVG = 'http://www.w3.org/2000/svg';

/** A notebook that may be attached to jobs. */
export interface INamed extends IFollower {
  readonly name: string;
}

export interface IListActions {
  open(jobId: string): void;
  select(jobId: string): void;
  show(jobId: string): void;
  attach(jobId: string): void;
  /** Open the job of a trial; attach to it first if necessary. */
  openTrial(jobId: string): void;
  /** Select a job for a comparison, or remove it from the selection. */
  choose(jobId: string, isChosen: boolean): void;
}

/** Facts about all rows, of the last drawing. */
interface IContext {
  selected: string;
  now: number;
  chosen: ReadonlySet<string>;
}

/** Workers as `4 of 8`; a dash for a job that has ended. */
function workersOf(s: ISnapshot): string {
  const most = s.max_workers === null ? '' : ` of ${s.max_workers}`;
  return ENDED.has(s.status) ? format.NONE : `${s.world_size}${most}`;
}

export function statusOf(entry: IEntry<unknown>): string {
  const { status } = entry.row.snapshot;
  return entry.isGone && !ENDED.has(status) ? `last seen ${status}` : status;
}

export class List<F extends INamed> {
  readonly element = make('div', 'etrain-list');
  private readonly studies: StudyList<F>;
  private readonly rows = make('ul', 'etrain-rows');
  private readonly offers = make('section', 'etrain-offers');
  private readonly offered = make('ul', 'etrain-rows');
  private readonly empty = make('div', 'etrain-empty');
  private context: IContext = { selected: '', now: 0, chosen: new Set() };

  constructor(private readonly actions: IListActions) {
    this.rows.setAttribute('aria-label', 'jobs');
    this.studies = new StudyList<F>({
      openTrial: id => this.actions.openTrial(id),
      row: id => this.row(id),
      fillRow: (element, entry) => this.fillRow(element, entry, this.context)
    });
    this.element.onkeydown = event => this.onKey(event);
    const title = make('h3');
    title.textContent = 'Running elsewhere';
    title.title = 'Running jobs in the run store that no open notebook is attached to';
    this.offered.setAttribute('aria-label', 'jobs running elsewhere');
    this.offers.append(title, this.offered);
    this.element.append(this.empty, this.studies.element, this.rows, this.offers);
  }

  /** `selected` is the job that the palette's commands apply to, `chosen` those to compare. */
  draw(
    { entries, offers, studies }: IMerged<F>,
    isUp: boolean,
    selected: string,
    now: number,
    chosen: ReadonlySet<string>
  ): void {
    this.context = { selected, now, chosen };
    const isTrial = (id: string) => studies.some(({ study }) => isTrialOf(study, id));
    const jobs = entries.filter(entry => !isTrial(entry.id));
    const others = offers.filter(offer => !isTrial(offer.other.job_id));
    const isEmpty = !entries.length && !offers.length && !studies.length;
    this.empty.hidden = !isEmpty;
    if (isEmpty) {
      this.explain(isUp);
    }
    this.studies.draw(studies, entries);
    this.rows.hidden = !jobs.length;
    reconcile(
      this.rows,
      jobs,
      e => e.id,
      e => this.row(e.id),
      (element, e) => this.fillRow(element, e, this.context)
    );
    this.offers.hidden = !others.length;
    reconcile(
      this.offered,
      others,
      o => o.other.job_id,
      o => this.offer(o.other.job_id),
      (element, o) => this.fillOffer(element, o)
    );
  }

  /** Focus a job; without it, the first one. */
  focus(jobId = ''): void {
    const all = [...this.element.querySelectorAll<HTMLElement>('.etrain-open')];
    const chosen = all.find(open => open.closest('li')?.dataset.key === jobId);
    (chosen ?? all[0])?.focus();
  }

  private explain(isUp: boolean): void {
    const lines = isUp
      ? [
          'No jobs yet.',
          'Start a cell with',
          '%%etrain distributed',
          'or choose “Insert a Training Cell” in the command palette.'
        ]
      : [
          'No open notebook has loaded etrain.',
          'Run this in one of them:',
          '%load_ext etrain_jupyter'
        ];
    const kinds = ['strong', 'p', 'code', 'p'] as const;
    const signature = lines.join('\n');
    if (this.empty.dataset.lines !== signature) {
      this.empty.dataset.lines = signature;
      this.empty.replaceChildren(
        ...lines.map((line, i) => {
          const element = make(kinds[i]);
          element.textContent = line;
          return element;
        })
      );
    }
  }

  private row(id: string): HTMLElement {
    const row = make('li', 'etrain-row');
    const head = make('div', 'etrain-row-head');
    const open = make('button', 'etrain-open');
    open.type = 'button';
    open.onclick = () => this.actions.open(id);
    open.onfocus = () => this.actions.select(id);
    const choose = make('input', 'etrain-choose');
    choose.type = 'checkbox';
    choose.title = 'Select for a comparison';
    choose.onchange = () => this.actions.choose(id, choose.checked);
    head.append(choose, open, make('span', 'etrain-status'));
    const progress = make('progress', 'etrain-progress');
    progress.max = 1;
    progress.setAttribute('aria-hidden', 'true'); // the line below has the same information
    const where = make('div', 'etrain-row-line');
    where.append(make('span', 'etrain-where'), make('span', 'etrain-left'));
    const facts = make('div', 'etrain-row-facts');
    facts.append(fact('loss'), fact('workers'), fact('checkpoint'), curve());
    const foot = make('div', 'etrain-row-line etrain-row-foot');
    const show = make('button', 'etrain-link');
    show.type = 'button';
    show.onclick = () => this.actions.show(id);
    const attach = make('button', 'etrain-link etrain-attach');
    attach.type = 'button';
    attach.textContent = 'Attach';
    attach.title = 'Add and run a cell in its notebook that attaches the kernel to this job';
    attach.onclick = () => this.actions.attach(id);
    foot.append(show, attach);
    row.append(head, progress, where, facts, foot);
    return row;
  }

  private fillRow(row: HTMLElement, entry: IEntry<F>, { selected, now, chosen }: IContext): void {
    const s = entry.row.snapshot;
    const part = (selector: string) => find(row, selector);
    (part('.etrain-choose') as HTMLInputElement).checked = chosen.has(entry.id);
    part('.etrain-open').setAttribute('aria-current', String(entry.id === selected));
    const status = statusOf(entry);
    row.dataset.status = entry.isGone ? 'gone' : s.status;
    setText(part('.etrain-open'), s.name || entry.id);
    part('.etrain-open').title = entry.id;
    part('.etrain-choose').setAttribute('aria-label', `Compare ${s.name || entry.id}`);
    const pill = part('.etrain-status');
    pill.dataset.status = status === s.status ? s.status : 'gone';
    pill.title = s.reason;
    setText(pill, status);
    (part('.etrain-progress') as HTMLProgressElement).value = s.progress ?? 0;
    const steps = s.total_steps === null ? '' : ` of ${format.count(s.total_steps)}`;
    const percent = s.progress === null ? '' : ` · ${Math.floor(s.progress * 100)} %`;
    setText(part('.etrain-where'), `step ${format.count(s.step)}${steps}${percent}`);
    setText(
      part('.etrain-left'),
      isActive(entry) && s.eta_s !== null ? `${format.clock(s.eta_s)} left` : ''
    );
    const trouble = checkpointTrouble(s, isActive(entry) ? now : s.updated_at);
    setFact(
      part('[data-fact=loss]'),
      s.loss !== null && Number.isFinite(s.loss) ? format.brief(s.loss) : format.number(s.loss)
    );
    setFact(part('[data-fact=workers]'), workersOf(s));
    setFact(
      part('[data-fact=checkpoint]'),
      checkpointOf(s, isActive(entry) ? now : null, trouble),
      trouble
    );
    drawCurve(part('.etrain-spark'), entry.row.curve);
    const names = [...new Set(entry.followers.map(follower => follower.name))];
    const show = part('.etrain-link');
    setText(show, `Show in ${names[0]}${names.length > 1 ? ` and ${names.length - 1} more` : ''}`);
    show.title = names.join(', ');
    show.setAttribute('aria-label', `Show ${s.name} in ${names[0]}`);
    const attach = part('.etrain-attach');
    attach.hidden = !entry.isGone || ENDED.has(s.status);
    attach.setAttribute('aria-label', `Attach to ${s.name}`);
    const workers = ENDED.has(s.status) ? '' : `, ${workersOf(s)} workers`;
    const about = `${s.name || entry.id}, ${status}, ${part('.etrain-where').textContent}${workers}. Open`;
    if (part('.etrain-open').getAttribute('aria-label') !== about) {
      part('.etrain-open').setAttribute('aria-label', about);
    }
  }

  private offer(id: string): HTMLElement {
    const row = make('li', 'etrain-row etrain-offer');
    const head = make('div', 'etrain-row-head');
    head.append(make('strong', 'etrain-offered'), make('span', 'etrain-status'));
    const line = make('div', 'etrain-row-line');
    const attach = make('button', 'etrain-link');
    attach.type = 'button';
    attach.textContent = 'Attach';
    attach.onclick = () => this.actions.attach(id);
    line.append(make('span', 'etrain-where'), attach);
    row.append(head, line);
    return row;
  }

  private fillOffer(row: HTMLElement, { other, offers }: IOffer<F>): void {
    const [name, pill] = [...row.querySelectorAll<HTMLElement>('.etrain-offered, .etrain-status')];
    setText(name, other.name || other.job_id);
    name.title = other.job_id;
    pill.dataset.status = other.status;
    setText(pill, other.status);
    const steps = other.total_steps ? ` of ${format.count(other.total_steps)}` : '';
    setText(find(row, '.etrain-where'), `step ${format.count(other.step)}${steps}`);
    const attach = find(row, '.etrain-link');
    attach.title = `Attach to this job from the kernel of ${offers[0].name}`;
    attach.setAttribute('aria-label', `Attach to ${other.name}`);
  }

  /** Move between studies and jobs with Up, Down, Home and End, in addition to Tab. */
  private onKey(event: KeyboardEvent): void {
    const all = [...this.element.querySelectorAll<HTMLElement>('.etrain-open')];
    const at = all.indexOf(document.activeElement as HTMLElement);
    const places: Record<string, number> = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      Home: 0,
      End: all.length - 1
    };
    const next = event.key in places ? all[places[event.key]] : null;
    if (at >= 0 && next) {
      next.focus();
      event.preventDefault();
    }
  }
}

function fact(name: string): HTMLElement {
  const element = make('span', 'etrain-fact');
  element.dataset.fact = name;
  const label = make('span', 'etrain-label');
  label.textContent = name;
  element.append(label, make('span', 'etrain-figure'));
  return element;
}

function setFact(element: HTMLElement, figure: string, alarm = ''): void {
  element.dataset.alarm = alarm;
  setText(element.lastElementChild as HTMLElement, figure);
  element.title = `${element.dataset.fact} ${figure}`;
}

/** Age of the newest durable checkpoint; its step once the job has ended. */
function checkpointOf(s: ISnapshot, now: number | null, trouble: string): string {
  if (!s.checkpoint) {
    return trouble ? `${trouble}, none` : 'none yet';
  }
  const age =
    now === null
      ? `step ${format.count(s.checkpoint.step)}`
      : `${format.age(now - s.checkpoint.time)} ago`;
  return trouble ? `${trouble}, ${age}` : age;
}

function curve(): SVGSVGElement {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('class', 'etrain-spark');
  svg.setAttribute('viewBox', `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('aria-hidden', 'true'); // the loss is next to it as text
  svg.append(document.createElementNS(SVG, 'path'));
  return svg;
}

function drawCurve(svg: Element, values: (number | null)[]): void {
  const path = curvePath(values, CURVE_WIDTH, CURVE_HEIGHT);
  const element = svg.firstElementChild;
  if (element && element.getAttribute('d') !== path) {
    element.setAttribute('d', path);
  }
}

/** Return a sparkline as an SVG path. Null values are gaps. */
export function curvePath(
  values: readonly (number | null)[],
  width: number,
  height: number
): string {
  const known = values.filter((value): value is number => value !== null);
  const least = Math.min(...known);
  const span = Math.max(...known) - least || 1;
  const step = width / Math.max(1, values.length - 1);
  let isDown = false;
  return values
    .map((value, i) => {
      if (value === null) {
        isDown = false;
        return '';
      }
      const y = 1 + (height - 2) * (1 - (value - least) / span);
      const command = `${isDown ? 'L' : 'M'}${(i * step).toFixed(1)} ${y.toFixed(1)}`;
      isDown = true;
      return command;
    })
    .join('');
}
