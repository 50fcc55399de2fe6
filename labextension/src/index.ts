// The plugins of the JupyterLab extension; another one is another entry of the list at the end. They run in Notebook 7,
// too, which has no status bar and no palette on some of its pages: such things are optional.
import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { EditorExtensionRegistry, IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { showInNotebook } from './cells';
import { addCommands, attach, COMMANDS } from './commands';
import { isActive } from './jobs';
import { linkOf } from './link';
import { magicLanguage } from './magic';
import { JobOutput, MIME, RANK } from './mime';
import { JobsPanel } from './panel';
import { ISession, Session } from './session';
import { ISettings, Settings, SETTINGS_ID } from './settings';
import { JobsStatus } from './status';

const PYTHON = new Set(['text/x-ipython', 'text/x-python']);

const settings: JupyterFrontEndPlugin<ISettings> = {
  id: SETTINGS_ID,
  description: 'Reads what a person chose for etrain.',
  autoStart: true,
  provides: ISettings,
  optional: [ISettingRegistry],
  activate: (_app: JupyterFrontEnd, registry: ISettingRegistry | null) => {
    const chosen = new Settings();
    // Nobody waits for them: cells and outputs are drawn at once, and again if the settings differ from the defaults.
    if (registry) {
      chosen.follow(registry).catch((reason: unknown) => {
        console.error('etrain: the defaults hold', reason);
      });
    }
    return chosen;
  }
};

const highlight: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:highlight',
  description: 'Highlights the YAML of %%etrain cells.',
  autoStart: true,
  requires: [IEditorExtensionRegistry, ISettings],
  activate: (_app: JupyterFrontEnd, registry: IEditorExtensionRegistry, chosen: ISettings) => {
    const isWanted = () => chosen.choices.highlight;
    const onChange = (hear: () => void) => {
      chosen.changed.connect(hear);
      return () => chosen.changed.disconnect(hear);
    };
    registry.addExtension({
      name: 'etrain-jupyter:magic',
      factory: ({ inline, model }) =>
        inline || PYTHON.has(model.mimeType)
          ? EditorExtensionRegistry.createImmutableExtension(
              magicLanguage(model.sharedModel.getSource(), isWanted, onChange)
            )
          : null
    });
  }
};

const output: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:output',
  description: 'Draws the jobs of a notebook, live or as they were saved.',
  autoStart: true,
  requires: [INotebookTracker],
  activate: (_app: JupyterFrontEnd, tracker: INotebookTracker) => {
    const extend = (panel: NotebookPanel) => {
      const link = linkOf(panel.sessionContext);
      panel.content.rendermime.addFactory(
        { safe: true, mimeTypes: [MIME], createRenderer: () => new JobOutput(link) },
        RANK
      );
    };
    tracker.forEach(extend);
    tracker.widgetAdded.connect((_, panel) => extend(panel));
  }
};

const session: JupyterFrontEndPlugin<Session> = {
  id: 'etrain-jupyter:session',
  description: 'Knows the training jobs of all open notebooks.',
  autoStart: true,
  provides: ISession,
  requires: [INotebookTracker],
  activate: (_app: JupyterFrontEnd, tracker: INotebookTracker) => new Session(tracker)
};

const panel: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:panel',
  description: 'The side panel with all training jobs, and the commands about them.',
  autoStart: true,
  requires: [ISession, ISettings],
  optional: [ICommandPalette, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    jobs: Session,
    chosen: ISettings,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null
  ) => {
    const widget = new JobsPanel(jobs, {
      show: entry => showInNotebook(app.shell, entry),
      attach: jobId => attach(jobs, jobId)
    });
    app.shell.add(widget, 'right', { rank: 900, type: 'etrain' });
    restorer?.add(widget, widget.id);
    addCommands(app, jobs, palette, widget.id);
    openWithFirst(app, jobs, chosen, widget);
  }
};

/** Open the panel when a first job begins, if that is wanted; the keyboard stays where it is. */
function openWithFirst(
  app: JupyterFrontEnd,
  jobs: Session,
  chosen: ISettings,
  widget: JobsPanel
): void {
  let isDone = false;
  const look = () => {
    if (!isDone && jobs.merged.entries.some(isActive)) {
      isDone = true;
      if (chosen.choices.openPanel && !widget.isVisible) {
        const focused = document.activeElement as HTMLElement | null;
        app.shell.activateById(widget.id);
        focused?.focus();
      }
    }
  };
  void app.restored.then(() => jobs.changed.connect(look));
}

const status: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:status',
  description: 'Tells in the status bar how many jobs and workers there are.',
  autoStart: true,
  requires: [ISession, ISettings],
  optional: [IStatusBar],
  activate: (app: JupyterFrontEnd, jobs: Session, chosen: ISettings, bar: IStatusBar | null) => {
    if (bar) {
      const item = new JobsStatus(jobs, chosen, () => void app.commands.execute(COMMANDS.show));
      bar.registerStatusItem('etrain-jupyter:status', {
        item,
        align: 'left',
        rank: 50,
        isActive: () => item.isActive,
        activeStateChanged: item.activeChanged
      });
    }
  }
};

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  settings,
  highlight,
  output,
  session,
  panel,
  status
];
export default plugins;
