// The stages of a job's start-up, with their seconds, and the error of a job that failed: what a
// view shows before there is a curve.
import { make, reconcile, setText } from './dom';
import * as format from './format';
import { IErrorSummary, ISnapshot, IStartupStage } from './snapshot';

const ABOUT: Record<string, string> = {
  scheduler: "the pool's scheduler responds",
  workers: 'the first worker joins the job',
  torch: 'a worker imports torch',
  'code and data': 'it builds the model, the optimizer and the data sets',
  'trial pass': 'it runs one forward and backward pass, which is undone',
  compile: 'it compiles the model (compile: true)',
  'first step': 'the workers connect and train one step'
};

/** Whether the job waits for its first step, and no worker was lost meanwhile. */
export const isStarting = (s: ISnapshot): boolean => s.startup.length > 0 && s.num_lost === 0;

export class StartupList {
  readonly element = make('ol', 'etrain-startup');

  constructor() {
    this.element.setAttribute('aria-label', 'start of the job');
  }

  /** `now` is in seconds; null if the snapshot receives no updates. */
  draw(s: ISnapshot, now: number | null): void {
    this.element.hidden = !s.startup.length;
    reconcile(
      this.element,
      s.startup,
      stage => stage.name,
      () => {
        const item = make('li');
        item.append(make('strong'), make('span', 'etrain-figure'), make('span', 'etrain-about'));
        return item;
      },
      (item, stage) => {
        item.dataset.state = stage.since === null ? 'next' : stage.took_s === null ? 'now' : 'done';
        const texts = [stage.name, secondsOf(stage, now ?? s.updated_at), ABOUT[stage.name] ?? ''];
        texts.forEach((text, i) => setText(item.children[i] as HTMLElement, text));
      }
    );
  }
}

function secondsOf({ since, took_s }: IStartupStage, now: number): string {
  if (since === null) {
    return '';
  }
  return took_s === null
    ? `${Math.max(0, Math.floor(now - since))} s …`
    : `${took_s.toFixed(took_s < 10 ? 1 : 0)} s`;
}

/** Show the code of a line of a traceback: the number of a cell and of the line in it. */
export type OpenCell = (cell: number, line: number, code: string) => void;

const FRAME = /^(\s*)(Cell In\[(\d+)\](?:, line (\d+))?|File ".*", line \d+)(.*)$/;
const EXCEPTION = /^[A-Za-z_][\w.]*(?=:|$)/;

/** The error of a failed job, once: its traceback in colours, with links to the cells. */
export class ErrorBox {
  readonly element = make('section', 'etrain-error');
  private readonly text = make('pre');
  private readonly place = make('span', 'etrain-count');
  private readonly copy = make('button', 'etrain-button');
  private drawn: IErrorSummary | null = null;

  constructor(private readonly openCell: OpenCell | undefined) {
    const title = make('h4');
    title.textContent = 'error';
    this.copy.type = 'button';
    this.copy.textContent = 'Copy';
    this.copy.title = 'Copy the traceback';
    this.copy.onclick = () => void this.copyText();
    const bar = make('div', 'etrain-bar');
    bar.append(title, this.place, this.copy);
    this.text.tabIndex = 0;
    this.text.setAttribute('aria-label', 'error of the job');
    this.element.append(bar, this.text);
  }

  draw(error: IErrorSummary | null): void {
    this.element.hidden = !error;
    if (!error || error === this.drawn) {
      return;
    }
    this.drawn = error;
    const workers = error.workers.length ? `on ${error.workers.join(', ')}, ` : '';
    setText(this.place, `${workers}after step ${format.count(error.step)}`);
    const lines = (error.traceback || error.error).split('\n');
    this.text.replaceChildren(...lines.map((line, i) => this.line(line, lines[i + 1] ?? '')));
  }

  private line(text: string, next: string): HTMLElement {
    const row = make('div');
    const [, indent, place, cell, line, rest] = FRAME.exec(text) ?? [];
    const name = EXCEPTION.exec(text)?.[0] ?? '';
    if (place !== undefined) {
      row.append(indent, this.frame(place, Number(cell), Number(line), next.trim()));
      row.append(part('etrain-function', rest));
    } else if (name && !text.startsWith('Traceback ')) {
      row.append(part('etrain-exception', name), text.slice(name.length));
    } else {
      row.append(text || ' '); // an empty line keeps its height
    }
    return row;
  }

  private frame(text: string, cell: number, line: number, code: string): HTMLElement {
    const { openCell } = this;
    if (!openCell || !cell) {
      return part('etrain-frame', text);
    }
    const link = make('button', 'etrain-frame etrain-link');
    link.type = 'button';
    link.textContent = text;
    link.title = 'Show this line in the notebook';
    link.onclick = () => openCell(cell, line, code);
    return link;
  }

  private async copyText(): Promise<void> {
    const { drawn } = this;
    // A page that is not served over HTTPS has no clipboard: then the text is selected.
    const clipboard = navigator.clipboard as Clipboard | undefined;
    if (clipboard && drawn) {
      await clipboard.writeText(drawn.traceback || drawn.error);
      setText(this.copy, 'Copied');
    } else {
      window.getSelection()?.selectAllChildren(this.text);
      setText(this.copy, 'Selected');
    }
    window.setTimeout(() => setText(this.copy, 'Copy'), 2000);
  }
}

function part(className: string, text: string): HTMLElement {
  const element = make('span', className);
  element.textContent = text;
  return element;
}
