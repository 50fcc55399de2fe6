// Find the notebook cell that shows a job, and insert new cells.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { showLine } from './jobs';
import { MIME } from './mime';
import { Entry, Follower } from './session';
import { list, object, text } from './untrusted';

/**
 * Scroll to the cell that shows a job. Without one, insert it into a notebook that is attached to
 * the job.
 */
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

/** Add a cell below the active one, and run it if `isRun`. */
export async function addCell(
  notebook: NotebookPanel,
  source: string,
  isRun: boolean
): Promise<void> {
  const { content, sessionContext } = notebook;
  content.deselectAll(); // NotebookActions.run runs every selected cell
  const active = content.activeCell?.model;
  // Fill an empty active cell, such as the only cell of a new notebook.
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

/** The line that loads our magics into a kernel. */
export const LOAD = '%load_ext etrain_jupyter';

/**
 * Return the commented template of a training cell, from the package that is installed in the
 * kernel.
 */
export async function templateOf({ notebook, link }: Follower): Promise<string> {
  if (link.isUp) {
    return link.request({ kind: 'session', ask: 'template' });
  }
  const kernel = notebook.sessionContext.session?.kernel;
  if (!kernel) {
    throw new Error(
      'This notebook has no kernel. Start one: the template comes from the package installed there.'
    );
  }
  // A user expression, not executed code: it changes neither the notebook's variables nor its
  // history.
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
      `The kernel cannot provide the template (${why}). Run pip install etrain-jupyter in its environment.`
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
