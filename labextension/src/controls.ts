// The buttons. What a person asks for is answered right below them; what cannot be undone is asked about first.
import { find, make, setText } from './dom';
import * as format from './format';
import { asSnapshot, ISnapshot } from './protocol';

export type Send = (request: string, args: Record<string, unknown>) => void;

interface IAction {
  label: string;
  busy: string;
  about: string;
}
const ACTIONS: Record<string, IAction> = {
  pause: {
    label: 'Pause',
    busy: 'Pausing …',
    about: 'Let the workers wait after this step, with their state'
  },
  resume: { label: 'Resume', busy: 'Resuming …', about: 'Let it go on' },
  checkpoint: {
    label: 'Checkpoint',
    busy: 'Saving …',
    about: 'Save a checkpoint after this step; training goes on'
  },
  scale: { label: 'Scale', busy: 'Scaling …', about: 'Change how many workers train' },
  preempt: { label: 'Preempt', busy: 'Preempting …', about: 'Take a worker away with a notice' },
  stop: { label: 'Stop', busy: 'Stopping …', about: 'End the job' }
};
const ANSWER_WITHIN_MS = 35000;
const SHOW_ANSWER_MS = 9000;

/** The row of buttons and the box below it. */
export class Controls {
  readonly element = make('div', 'etrain-actions');
  private readonly buttons = new Map<string, HTMLButtonElement>();
  private readonly box = make('div', 'etrain-box');
  private readonly answer = make('p', 'etrain-answer');
  private readonly form = make('div', 'etrain-form');
  private readonly pending = new Map<string, number>();
  private snapshot = asSnapshot({});
  private isLive = false;
  private isStopping = false;
  private opener: HTMLElement | null = null;
  private answerTimer = 0;

  constructor(private readonly send: Send) {
    const row = make('div', 'etrain-buttons');
    row.setAttribute('role', 'group');
    row.setAttribute('aria-label', 'requests');
    for (const name of ['pause', 'checkpoint', 'scale', 'stop']) {
      const button = make('button', `etrain-button etrain-${name}`);
      button.type = 'button';
      button.onclick = () => this.press(button.dataset.request ?? name, button);
      this.buttons.set(name, button);
      row.append(button);
    }
    this.box.hidden = true;
    this.answer.setAttribute('role', 'alert');
    this.box.append(this.answer, this.form);
    this.box.onkeydown = event => {
      if (event.key === 'Escape') {
        this.close();
        event.stopPropagation();
      }
    };
    this.element.append(row, this.box);
  }

  destroy(): void {
    window.clearTimeout(this.answerTimer);
  }

  draw(snapshot: ISnapshot, isLive: boolean): void {
    this.snapshot = snapshot;
    this.isLive = isLive;
    this.isStopping &&= !isOver(snapshot);
    for (const [name, button] of this.buttons) {
      const request = name === 'pause' && canResume(snapshot) ? 'resume' : name;
      const { label, busy, about } = ACTIONS[request];
      const reason = this.whyNot(request);
      const isBusy = this.isBusy(request) || (name === 'stop' && this.isStopping);
      button.dataset.request = request;
      button.setAttribute('aria-disabled', String(!!reason || isBusy));
      button.title = reason || about;
      setText(button, isBusy ? busy : label);
    }
  }

  /** Why a request cannot be made now; empty where it can. */
  whyNot(request: string): string {
    if (!this.isLive && !isOver(this.snapshot)) {
      return 'This kernel does not follow the job.';
    }
    if (!this.isLive) {
      return 'The job is over.';
    }
    return this.snapshot.controls[request] ?? '';
  }

  /** A button was pressed: say why not, ask for what is missing, or ask the kernel. */
  press(request: string, opener: HTMLElement, worker = ''): void {
    const reason = this.whyNot(request);
    this.opener = opener;
    if (reason) {
      this.say('info', reason);
    } else if (this.isBusy(request) || (request === 'stop' && this.isStopping)) {
      return;
    } else if (request === 'stop') {
      this.askToStop();
    } else if (request === 'resume' && isOver(this.snapshot)) {
      this.askToResume();
    } else if (request === 'preempt') {
      this.askToPreempt(worker);
    } else if (request === 'scale') {
      this.askForBounds();
    } else {
      this.close();
      this.ask(request, {});
    }
  }

  /** The kernel answered a request. */
  hear(request: string, level: string, text: string): void {
    this.pending.delete(request);
    const isError = level === 'error';
    this.isStopping &&= !(isError && request === 'stop');
    this.say(
      level,
      isError ? `Error: ${text}` : text || `${ACTIONS[request]?.label ?? request} was asked for.`
    );
  }

  private isBusy(request: string): boolean {
    return Date.now() - (this.pending.get(request) ?? 0) < ANSWER_WITHIN_MS;
  }

  private ask(request: string, args: Record<string, unknown>): void {
    this.pending.set(request, Date.now());
    this.isStopping ||= request === 'stop';
    this.send(request, args);
    this.draw(this.snapshot, this.isLive);
  }

  // The box below the buttons. It lies over what is below it, so that nothing moves.

  private say(level: string, text: string): void {
    window.clearTimeout(this.answerTimer);
    this.form.replaceChildren();
    this.answer.hidden = false;
    this.box.dataset.level = level;
    this.box.hidden = false;
    setText(this.answer, text.slice(0, 2000));
    if (level === 'error') {
      this.form.append(this.button('Dismiss', () => this.close()));
    } else {
      this.answerTimer = window.setTimeout(() => this.close(), SHOW_ANSWER_MS);
    }
  }

  private close(): void {
    window.clearTimeout(this.answerTimer);
    const hadFocus = this.box.contains(document.activeElement);
    this.box.hidden = true;
    if (hadFocus) {
      this.opener?.focus();
    }
  }

  private open(question: string, ...parts: HTMLElement[]): void {
    window.clearTimeout(this.answerTimer);
    this.answer.hidden = true;
    this.box.dataset.level = 'question';
    const text = make('p');
    text.textContent = question;
    const row = make('div', 'etrain-choices');
    row.append(
      ...parts,
      this.button('Cancel', () => this.close())
    );
    this.form.replaceChildren(text, row);
    this.box.hidden = false;
    find(row, 'input, button').focus();
  }

  private askToStop(): void {
    this.open(
      `Stop ${this.snapshot.name}?`,
      this.choice('Stop with a checkpoint', 'stop', {}),
      this.choice(`Stop now: ${stopLoss(this.snapshot)}`, 'stop', { now: true }, true)
    );
  }

  private askToResume(): void {
    const { name, checkpoint } = this.snapshot;
    const where = checkpoint
      ? `from its checkpoint of step ${format.count(checkpoint.step)}`
      : 'from its beginning: nothing was saved';
    this.open(
      `Resume ${name}? It goes on ${where}; workers are started if there are none.`,
      this.choice('Resume', 'resume', {})
    );
  }

  private askToPreempt(worker: string): void {
    this.open(
      `Take ${worker} away, as a spot market does? It leaves after this step; the others go on.`,
      this.choice(`Preempt ${worker}`, 'preempt', { worker }, true)
    );
  }

  private askForBounds(): void {
    const { min_workers, max_workers } = this.snapshot;
    const least = this.number('at least', min_workers ?? 1);
    const most = this.number('at most', max_workers ?? 1);
    const apply = this.button('Scale', () => {
      const min = Number(least.input.value);
      const max = Number(most.input.value);
      if (!(Number.isInteger(min) && Number.isInteger(max) && 1 <= min && min <= max)) {
        setText(
          note,
          `${least.input.value || 'nothing'} to ${most.input.value || 'nothing'}: write 1 or more, and at most as many`
        );
        return;
      }
      this.close();
      this.ask('scale', { min, max });
    });
    apply.classList.add('etrain-primary');
    const note = make('span', 'etrain-hint');
    note.setAttribute('role', 'alert');
    this.open('How many workers?', least.label, most.label, apply, note);
  }

  private choice(
    label: string,
    request: string,
    args: Record<string, unknown>,
    isHarsh = false
  ): HTMLElement {
    const button = this.button(label, () => {
      this.close();
      this.ask(request, args);
    });
    button.classList.add(isHarsh ? 'etrain-harsh' : 'etrain-primary');
    return button;
  }

  private button(label: string, action: () => void): HTMLButtonElement {
    const button = make('button', 'etrain-button');
    button.type = 'button';
    button.textContent = label;
    button.onclick = action;
    return button;
  }

  private number(name: string, value: number): { label: HTMLElement; input: HTMLInputElement } {
    const label = make('label');
    const input = make('input');
    Object.assign(input, {
      type: 'number',
      min: '1',
      max: '10000',
      step: '1',
      value: String(value)
    });
    label.append(`${name} `, input);
    return { label, input };
  }
}

/** What a stop without a checkpoint costs. */
export function stopLoss({ checkpoint }: ISnapshot): string {
  return checkpoint
    ? `all after step ${format.count(checkpoint.step)} is lost`
    : 'nothing has been saved yet';
}

/** Whether it stands still and the kernel says that it can go on. */
function canResume(snapshot: ISnapshot): boolean {
  return snapshot.status === 'paused' || (isOver(snapshot) && snapshot.controls.resume === '');
}

function isOver({ status }: ISnapshot): boolean {
  return ['finished', 'stopped', 'failed'].includes(status);
}
