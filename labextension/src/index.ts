// The plugins of the JupyterLab extension. Each stands alone; another one is another entry of the list at the end.
import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { EditorExtensionRegistry, IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { linkOf } from './link';
import { magicLanguage } from './magic';
import { JobOutput, MIME, RANK } from './mime';

const PYTHON = new Set(['text/x-ipython', 'text/x-python']);

const highlight: JupyterFrontEndPlugin<void> = {
  id: 'etrain-jupyter:highlight',
  description: 'Highlights the YAML of %%etrain cells.',
  autoStart: true,
  requires: [IEditorExtensionRegistry],
  activate: (_app: JupyterFrontEnd, registry: IEditorExtensionRegistry) => {
    registry.addExtension({
      name: 'etrain-jupyter:magic',
      factory: ({ inline, model }) =>
        inline || PYTHON.has(model.mimeType)
          ? EditorExtensionRegistry.createImmutableExtension(magicLanguage(model.sharedModel.getSource()))
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

const plugins: JupyterFrontEndPlugin<void>[] = [highlight, output];
export default plugins;
