// Plugins of the JupyterLab extension. To add one, append it to the list at the end. They also run
// in Notebook 7, where some pages have no status bar or palette: those dependencies are optional.
import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { EditorExtensionRegistry, IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { actionsIn, reported, showInNotebook } from './cells';
import { addCommands, attach, COMMANDS } from './commands';
import { compareJobs } from './compare';
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
  description: 'Reads the settings of etrain.',
  autoStart: true,
  provides: ISettings,
  optional: [ISettingRegistry],
  activate: (_app: JupyterFrontEnd, registry: ISettingRegistry | null) => {
    const chosen = new Settings();
    // Do not wait for the settings: draw with the defaults, and redraw when settings that differ
    // have loaded.
    if (registry) {
      chosen.follow(registry).catch((reason: unknown) => {
        console.error('etrain: cannot read the settings, using the defaults', reason);
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
    const isEnabled = () => chosen.choices.highlight;
    const onChange = (listener: () => void) => {
      chosen.changed.connect(listener);
      return () => chosen.changed.disconnect(listener);
    };
    registry.addExtension({
      name: 'etrain-jupyter:magic',
      factory: ({ inline, model }) =>
        inline || PYTHON.has(model.mimeType)
          ? EditorExtensionRegistry.createImmutableExtension(
              magicLanguage(model.sharedModel.getSource(), isEnabled, onChange)
            )
          : null
    });
  }
};

const output: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:output',
  description: 'Renders the jobs of a notebook, live or as saved.',
  autoStart: true,
  requires: [INotebookTracker],
  activate: (_app: JupyterFrontEnd, tracker: INotebookTracker) => {
    const extend = (panel: NotebookPanel) => {
      const link = linkOf(panel.sessionContext);
      panel.content.rendermime.addFactory(
        {
          safe: true,
          mimeTypes: [MIME],
          createRenderer: () => new JobOutput(link, id => actionsIn(panel, id))
        },
        RANK
      );
    };
    tracker.forEach(extend);
    tracker.widgetAdded.connect((_, panel) => extend(panel));
  }
};

const session: JupyterFrontEndPlugin<Session> = {
  id: 'etrain-jupyter:session',
  description: 'Collects the training jobs of all open notebooks.',
  autoStart: true,
  provides: ISession,
  requires: [INotebookTracker],
  activate: (_app: JupyterFrontEnd, tracker: INotebookTracker) => new Session(tracker)
};

const panel: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:panel',
  description: 'Adds the side panel with all training jobs, and their commands.',
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
      attach: jobId => attach(app, jobs, jobId),
      compare: jobIds => reported(() => compareJobs(app, jobs, jobIds))
    });
    app.shell.add(widget, 'right', { rank: 900, type: 'etrain' });
    restorer?.add(widget, widget.id);
    addCommands(app, jobs, palette, widget.id);
    openWithFirst(app, jobs, chosen, widget);
  }
};

/**
 * Open the panel when the first job starts, if the settings say so. The keyboard focus stays where
 * it is.
 */
function openWithFirst(
  app: JupyterFrontEnd,
  jobs: Session,
  chosen: ISettings,
  widget: JobsPanel
): void {
  let isDone = false;
  const openOnce = () => {
    const { entries, studies } = jobs.merged;
    const isSearching = studies.some(entry => entry.study.status === 'running');
    if (!isDone && (isSearching || entries.some(isActive))) {
      isDone = true;
      if (chosen.choices.openPanel && !widget.isVisible) {
        const focused = document.activeElement as HTMLElement | null;
        app.shell.activateById(widget.id);
        focused?.focus();
      }
    }
  };
  void app.restored.then(() => jobs.changed.connect(openOnce));
}

const status: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:status',
  description: 'Shows the number of running jobs and workers in the status bar.',
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
