// What a person chose in JupyterLab's settings. Until they are read, and where there are none, the defaults hold.
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Token } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { changeDrawing, IDrawing } from './drawing';

/** Plugin id, and so the name of schema/settings.json. */
export const SETTINGS_ID = 'etrain-jupyter:settings';

export interface IChoices {
  highlight: boolean;
  statusBar: boolean;
  openPanel: boolean;
}

export interface ISettings {
  readonly choices: IChoices;
  readonly changed: ISignal<ISettings, void>;
}

export const ISettings = new Token<ISettings>(
  'etrain-jupyter:ISettings',
  'What a person chose for etrain.'
);

export class Settings implements ISettings {
  choices: IChoices = { highlight: true, statusBar: true, openPanel: false };
  private readonly changes = new Signal<this, void>(this);

  get changed(): ISignal<this, void> {
    return this.changes;
  }

  /** Read them, now and whenever they change. */
  async follow(registry: ISettingRegistry): Promise<void> {
    const settings = await registry.load(SETTINGS_ID);
    settings.changed.connect(() => this.take(settings.composite));
    this.take(settings.composite);
  }

  private take(values: unknown): void {
    // JupyterLab has validated them against schema/settings.json, which gives a default for each.
    const { highlight, statusBar, openPanel, ...drawn } = values as IChoices & IDrawing;
    const { smoothing, logScale, redrawsPerS } = drawn;
    this.choices = { highlight, statusBar, openPanel };
    changeDrawing({ smoothing, logScale, redrawsPerS });
    this.changes.emit();
  }
}
