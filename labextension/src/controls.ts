// The buttons of a job. Answers appear below them; requests that cannot be undone ask for
// confirmation.
import { find, make, setText } from './dom';
import * as format from './format';
import { asSnapshot } from './protocol';
import { ISnapshot } from './snapshot';

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
    about: 'Pause after the current step; workers keep their state'
  },
  resume: { label: 'Resume', busy: 'Resuming …', about: 'Resume training' },
  checkpoint: {
    label: 'Checkpoint',
    busy: 'Saving …',
    about: 'Save a checkpoint after the current step; training continues'
  },
  scale: { label: 'Scale', busy: 'Scaling …', about: 'Change the number of workers' },
  preempt: { label: 'Preempt', busy: 'Preempting …', about: 'Preempt a worker, with a notice' },
  stop: { label: 'Stop', busy: 'Stopping …', about: 'Stop the job' }
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

  /** Return why a request is not possible now; empty if it is. */
  whyNot(request: string): string {
    if (!this.isLive && !isOver(this.snapshot)) {
      return 'This kernel is not attached to the job.';
    }
    if (!this.isLive) {
      return 'The job has ended.';
    }
    return this.snapshot.controls[request] ?? '';
  }

  /**
   * Handle a button: explain why it is not possible, ask for missing input, or send the request.
   */
  press(request: string, opener: HTMLElement, worker = ''): void {
    const reason = this.whyNot(request);
    this.opener = opener;
    if (reason) {
      this.showAnswer('info', reason);
    } else if (this.isBusy(request) || (request === 'stop' && this.isStopping)) {
      return;
    } else if (request === 'stop') {
      this.confirmStop();
    } else if (request === 'resume' && isOver(this.snapshot)) {
      this.confirmResume();
    } else if (request === 'preempt') {
      this.confirmPreempt(worker);
    } else if (request === 'scale') {
      this.enterBounds();
    } else {
      this.close();
      this.submit(request, {});
    }
  }

  /** Show the kernel's answer to a request. */
  onAnswer(request: string, level: string, text: string): void {
    this.pending.delete(request);
    const isError = level === 'error';
    this.isStopping &&= !(isError && request === 'stop');
    this.showAnswer(
      level,
      isError ? `Error: ${text}` : text || `${ACTIONS[request]?.label ?? request} was requested.`
    );
  }

  private isBusy(request: string): boolean {
    return Date.now() - (this.pending.get(request) ?? 0) < ANSWER_WITHIN_MS;
  }

  private submit(request: string, args: Record<string, unknown>): void {
    this.pending.set(request, Date.now());
    this.isStopping ||= request === 'stop';
    this.send(request, args);
    this.draw(this.snapshot, this.isLive);
  }

  // The box below the buttons overlays the content, so that opening it causes no layout shift.

  private showAnswer(level: string, text: string): void {
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

  private confirmStop(): void {
    this.open(
      `Stop ${this.snapshot.name}?`,
      this.choice('Stop with a checkpoint', 'stop', {}),
      this.choice(`Stop now: ${stopLoss(this.snapshot)}`, 'stop', { now: true }, true)
    );
  }

  private confirmResume(): void {
    const { name, checkpoint } = this.snapshot;
    const source = checkpoint
      ? `from the checkpoint at step ${format.count(checkpoint.step)}`
      : 'from the beginning, since nothing was saved';
    this.open(
      `Resume ${name}? It continues ${source}; workers are started if none are running.`,
      this.choice('Resume', 'resume', {})
    );
  }

  private confirmPreempt(worker: string): void {
    this.open(
      `Preempt ${worker}, as a spot market does? It leaves after the current step; the others continue.`,
      this.choice(`Preempt ${worker}`, 'preempt', { worker }, true)
    );
  }

  private enterBounds(): void {
    const { min_workers, max_workers } = this.snapshot;
    const least = this.number('at least', min_workers ?? 1);
    const most = this.number('at most', max_workers ?? 1);
    const apply = this.button('Scale', () => {
      const min = Number(least.input.value);
      const max = Number(most.input.value);
      if (!(Number.isInteger(min) && Number.isInteger(max) && 1 <= min && min <= max)) {
        setText(
          note,
          `${least.input.value || 'nothing'} to ${most.input.value || 'nothing'} is not a range of workers: enter at least 1, and a maximum that is not less`
        );
        return;
      }
      this.close();
      this.submit('scale', { min, max });
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
      this.submit(request, args);
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

/** Describe what a stop without a checkpoint loses. */
export function stopLoss({ checkpoint }: ISnapshot): string {
  return checkpoint
    ? `all training after step ${format.count(checkpoint.step)} will be lost`
    : 'all training will be lost, since nothing has been saved yet';
}

/** Whether the job is paused, or has ended and the kernel can resume it. */
function canResume(snapshot: ISnapshot): boolean {
  return snapshot.status === 'paused' || (isOver(snapshot) && snapshot.controls.resume === '');
}

function isOver({ status }: ISnapshot): boolean {
  return ['finished', 'stopped', 'failed'].includes(status);
}
