// Cells of notebooks: the one that shows a job, and new ones.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { showLine } from './jobs';
import { MIME } from './mime';
import { list, object, text } from './protocol';
import { Entry, Follower } from './session';

/** Go to the cell that shows a job; where there is none, one is made in the notebook that follows it. */
export async function showInNotebook(shell: JupyterFrontEnd.IShell, entry: Entry): Promise<void> {
  for (const { notebook } of entry.followers) {
    const index = cellOf(notebook.content, entry.id);
    if (index >= 0) {
      shell.activateById(notebook.id);
      notebook.content.activeCellIndex = index;
      await notebook.content.scrollToCell(notebook.content.widgets[index], 'smart');
      await NotebookActions.focusActiveCell(notebook.content);
      return;
    }
  }
  const [{ notebook }] = entry.followers;
  shell.activateById(notebook.id);
  await addCell(notebook, showLine(entry.id), true);
}

/** Add a cell below the active one, and run it if that is wanted. */
export async function addCell(
  notebook: NotebookPanel,
  source: string,
  isRun: boolean
): Promise<void> {
  const { content, sessionContext } = notebook;
  content.deselectAll(); // what is run is what is selected
  const active = content.activeCell?.model;
  // A notebook that was just made has one empty cell: that is the one to fill.
  if (active?.type !== 'code' || active.sharedModel.getSource().trim()) {
    NotebookActions.insertBelow(content);
  }
  const cell = content.activeCell;
  if (!cell) {
    return;
  }
  cell.model.sharedModel.setSource(source);
  await content.scrollToCell(cell, 'smart');
  if (isRun) {
    await NotebookActions.run(content, sessionContext);
  } else {
    await NotebookActions.focusActiveCell(content, { waitUntilReady: true, preventScroll: true });
    content.mode = 'edit';
  }
}

/** What makes our magics known to a kernel. */
export const LOAD = '%load_ext etrain_jupyter';

/** A commented cell to start from, from the package that the kernel has. */
export async function templateOf({ notebook, link }: Follower): Promise<string> {
  if (link.isUp) {
    return link.ask({ kind: 'session', ask: 'template' });
  }
  const kernel = notebook.sessionContext.session?.kernel;
  if (!kernel) {
    throw new Error(
      'This notebook has no kernel. Start one: the template comes from the package that it has.'
    );
  }
  // Evaluated, not run: it leaves no trace in the notebook's names or history.
  const source = "__import__('etrain_jupyter.config', fromlist=['template']).template()";
  const code = `__import__('IPython.display', fromlist=['JSON']).JSON({'text': ${source}})`;
  const future = kernel.requestExecute({
    code: '',
    silent: true,
    store_history: false,
    user_expressions: { code }
  });
  const { content } = await future.done;
  const found = object(content.status === 'ok' ? content.user_expressions.code : null);
  if (found.status !== 'ok') {
    const why = found.ename ? `${text(found.ename)}: ${text(found.evalue)}` : content.status;
    throw new Error(
      `The kernel has no template (${why}). pip install etrain-jupyter where it runs.`
    );
  }
  const template = object(object(found.data)['application/json']).text;
  return `%%etrain distributed\n${text(template)}`;
}

function cellOf(notebook: Notebook, jobId: string): number {
  return notebook.widgets.findIndex(({ model }) => {
    const outputs = list(object(model.toJSON()).outputs);
    return outputs.some(({ data }) => object(object(object(data)[MIME]).snapshot).job_id === jobId);
  });
}
