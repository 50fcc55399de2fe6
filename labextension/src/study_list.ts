// The studies in the side panel: one row each, which expands to the jobs of its trials.
import { find, make, reconcile, setText } from './dom';
import * as format from './format';
import { IEntry } from './jobs';
import { isTrialOf, IStudyEntry, ITrial } from './studies';

/** Colours of the states of trials: those of the statuses of jobs. */
const STATUS_OF: Record<string, string> = { complete: 'finished', pruned: 'stopped' };

/** The job of a trial; it has an entry if a notebook is attached to it. */
interface ITrialItem<F> {
  trial: ITrial;
  entry: IEntry<F> | undefined;
}

export interface IStudyActions<F> {
  /** Open the job of a trial; attach to it first if necessary. */
  openTrial(jobId: string): void;
  /** Create and fill the row of a job that a notebook is attached to. */
  row(id: string): HTMLElement;
  fillRow(element: HTMLElement, entry: IEntry<F>): void;
}

export class StudyList<F> {
  readonly element = make('ul', 'etrain-rows etrain-studies');
  private readonly expanded = new Set<string>();
  private drawn: { studies: readonly IStudyEntry<F>[]; entries: readonly IEntry<F>[] } = {
    studies: [],
    entries: []
  };

  constructor(private readonly actions: IStudyActions<F>) {
    this.element.setAttribute('aria-label', 'studies');
  }

  draw(studies: readonly IStudyEntry<F>[], entries: readonly IEntry<F>[]): void {
    this.drawn = { studies, entries };
    this.element.hidden = !studies.length;
    reconcile(
      this.element,
      [...studies],
      s => s.study.study_id,
      s => this.create(s.study.study_id),
      (element, s) => this.fill(element, s)
    );
  }

  private create(id: string): HTMLElement {
    const item = make('li', 'etrain-study');
    const row = make('div', 'etrain-row');
    const head = make('div', 'etrain-row-head');
    const toggle = make('button', 'etrain-open etrain-expand');
    toggle.type = 'button';
    toggle.onclick = () => this.toggle(id);
    head.append(toggle, make('span', 'etrain-status'));
    const facts = make('div', 'etrain-row-line');
    facts.append(make('span', 'etrain-where'), make('span', 'etrain-left'));
    row.append(head, facts);
    const trials = make('ul', 'etrain-rows etrain-trials');
    trials.id = `etrain-trials-${Math.random().toString(36).slice(2)}`;
    toggle.setAttribute('aria-controls', trials.id);
    item.append(row, trials, make('p', 'etrain-more'));
    return item;
  }

  private toggle(id: string): void {
    if (!this.expanded.delete(id)) {
      this.expanded.add(id);
    }
    this.draw(this.drawn.studies, this.drawn.entries);
  }

  private fill(item: HTMLElement, { study, isGone }: IStudyEntry<F>): void {
    const part = (selector: string) => find(item, selector);
    const isOpen = this.expanded.has(study.study_id);
    const isLost = study.status === 'lost' || (isGone && study.status === 'running');
    const status = isGone && isLost ? 'last seen running' : study.status;
    const toggle = part('.etrain-expand');
    setText(toggle, study.name || study.study_id);
    toggle.title = study.study_id;
    toggle.setAttribute('aria-expanded', String(isOpen));
    const pill = part('.etrain-status');
    pill.dataset.status = isLost ? 'gone' : study.status;
    pill.title = study.reason;
    setText(pill, status);
    const begun = `${format.count(study.num_begun)} of ${format.plural(study.num_trials, 'trial')}`;
    setText(part('.etrain-where'), begun);
    const best = study.best === null ? '' : `best ${study.metric} ${format.brief(study.best)}`;
    setText(part('.etrain-left'), best);
    const about = [`study ${study.name || study.study_id}`, status, begun, best];
    toggle.setAttribute('aria-label', about.filter(Boolean).join(', '));
    const trials = part('.etrain-trials');
    trials.hidden = !isOpen;
    trials.setAttribute('aria-label', `trials of ${study.name}`);
    this.fillTrials(trials, isOpen ? this.itemsOf(study.study_id) : []);
    const rest = study.num_begun - study.trials.length;
    const more = part('.etrain-more');
    more.hidden = !isOpen || rest <= 0;
    setText(more, `${format.plural(rest, 'more trial')} in study.trials`);
  }

  /** The reported trials, and then the attached jobs of trials that are not reported. */
  private itemsOf(id: string): ITrialItem<F>[] {
    const study = this.drawn.studies.find(s => s.study.study_id === id)?.study;
    if (!study) {
      return [];
    }
    const entries = new Map(
      this.drawn.entries.filter(e => isTrialOf(study, e.id)).map(e => [e.id, e])
    );
    const known = study.trials.map(trial => ({ trial, entry: entries.get(trial.job_id) }));
    study.trials.forEach(trial => entries.delete(trial.job_id));
    const unknown = [...entries.values()].map(entry => ({
      trial: { job_id: entry.id, number: 0, state: '', value: null, params: '' },
      entry
    }));
    return [...known, ...unknown];
  }

  private fillTrials(parent: HTMLElement, items: ITrialItem<F>[]): void {
    reconcile(
      parent,
      items,
      item => `${item.trial.job_id}${item.entry ? '' : ' '}`, // its element changes on attach
      item => (item.entry ? this.actions.row(item.trial.job_id) : this.line(item.trial)),
      (element, item) => {
        if (item.entry) {
          this.actions.fillRow(element, item.entry);
        } else {
          this.fillLine(element, item.trial);
        }
      }
    );
  }

  private line(trial: ITrial): HTMLElement {
    const element = make('li', 'etrain-row etrain-trial');
    const head = make('div', 'etrain-row-head');
    const open = make('button', 'etrain-open');
    open.type = 'button';
    open.onclick = () => this.actions.openTrial(trial.job_id);
    head.append(open, make('span', 'etrain-figure'), make('span', 'etrain-status'));
    element.append(head);
    return element;
  }

  private fillLine(element: HTMLElement, trial: ITrial): void {
    const value = trial.value === null ? '' : format.brief(trial.value);
    const open = find(element, '.etrain-open');
    setText(open, `trial ${trial.number}`);
    open.title = trial.params || trial.job_id;
    const about = [`trial ${trial.number}`, trial.state, value, trial.params]
      .filter(Boolean)
      .join(', ');
    open.setAttribute('aria-label', `${about}. Open`);
    setText(find(element, '.etrain-figure'), value);
    const pill = find(element, '.etrain-status');
    pill.dataset.status = STATUS_OF[trial.state] ?? trial.state;
    setText(pill, trial.state);
  }
}
