// JupyterLab's settings of etrain. The defaults apply until they are loaded, or if they cannot be.
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Token } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { changeDrawing, IDrawing } from './drawing';

/** Plugin ID; it determines the name of schema/settings.json. */
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
  'The settings of etrain.'
);

export class Settings implements ISettings {
  choices: IChoices = { highlight: true, statusBar: true, openPanel: false };
  private readonly changes = new Signal<this, void>(this);

  get changed(): ISignal<this, void> {
    return this.changes;
  }

  /** Load the settings, and follow their changes. */
  async follow(registry: ISettingRegistry): Promise<void> {
    const settings = await registry.load(SETTINGS_ID);
    settings.changed.connect(() => this.apply(settings.composite));
    this.apply(settings.composite);
  }

  private apply(values: unknown): void {
    // JupyterLab has validated them against schema/settings.json, which gives a default for each.
    const { highlight, statusBar, openPanel, ...drawn } = values as IChoices & IDrawing;
    const { smoothing, logScale, redrawsPerS } = drawn;
    this.choices = { highlight, statusBar, openPanel };
    changeDrawing({ smoothing, logScale, redrawsPerS });
    this.changes.emit();
  }
}
