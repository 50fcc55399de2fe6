// The status bar item: running jobs, their workers, and a warning of idle pools.
import { ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { make, setText } from './dom';
import * as format from './format';
import { countsOf } from './jobs';
import { describeIdle } from './panel';
import { Session } from './session';
import { ISettings } from './settings';

export class JobsStatus extends Widget {
  private readonly button = make('button', 'etrain-statusbar');
  private wasActive = false;
  private readonly toggled = new Signal<this, void>(this);

  constructor(
    private readonly session: Session,
    private readonly settings: ISettings,
    onClick: () => void
  ) {
    super();
    this.button.type = 'button';
    this.button.onclick = onClick;
    this.node.append(this.button);
    session.changed.connect(() => this.draw(), this);
    settings.changed.connect(() => this.draw(), this);
    this.draw();
  }

  /** Whether there is something to show and the settings allow it. */
  get isActive(): boolean {
    const { entries } = this.session.merged;
    return this.settings.choices.statusBar && (entries.length > 0 || this.session.idle.length > 0);
  }

  get activeChanged(): ISignal<this, void> {
    return this.toggled;
  }

  private draw(): void {
    const { active, workers } = countsOf(this.session.merged.entries);
    const { idle } = this.session;
    const running = active
      ? `${format.plural(active, 'job')}, ${format.plural(workers, 'worker')}`
      : 'no running jobs';
    const warning = idle.map(pool => ` · ⚠ pool ${pool.pool} idle`).join('');
    setText(this.button, `etrain: ${running}${warning}`);
    const now = Date.now() / 1000;
    this.button.title = [...idle.map(pool => describeIdle(pool, now)), 'Show the etrain jobs'].join(
      '\n'
    );
    this.button.classList.toggle('etrain-warns', idle.length > 0);
    if (this.isActive !== this.wasActive) {
      this.wasActive = this.isActive;
      this.toggled.emit();
    }
  }
}
