// Find the notebook cell that shows a job, and insert new cells.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { attachLines, showLine } from './jobs';
import { MIME } from './mime';
import { IJobSource } from './core';
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

/** What a view of a job can do with its notebook. */
export const actionsIn = (
  notebook: NotebookPanel,
  jobId: string
): Pick<IJobSource, 'attach' | 'openCell'> => ({
  attach: () => void reported(() => attachIn(notebook, jobId)),
  openCell: (cell, line, code) => void openCell(notebook, cell, line, code)
});

/** Add and run a cell that attaches the notebook's kernel to a job. */
export const attachIn = (notebook: NotebookPanel, jobId: string): Promise<void> =>
  addCell(notebook, attachLines(jobId), true);

/**
 * Show a line of a traceback: in the cell with that execution count or, if it has run again since,
 * in the cell that has the same code there.
 */
export async function openCell(
  { content }: NotebookPanel,
  count: number,
  line: number,
  code: string
): Promise<void> {
  const cells = content.widgets.filter(
    ({ model }) => !!code && model.sharedModel.getSource().split('\n')[line - 1]?.trim() === code
  );
  const cell = cells.find(({ model }) => model.toJSON().execution_count === count) ?? cells[0];
  if (!cells.length) {
    Notification.warning(
      `No cell has this code in line ${line} any more. It was in the cell that ran as In[${count}].`
    );
    return;
  }
  content.activeCellIndex = content.widgets.indexOf(cell);
  await content.scrollToCell(cell, 'smart');
  await NotebookActions.focusActiveCell(content, { waitUntilReady: true, preventScroll: true });
  content.mode = 'edit';
  cell.editor?.setCursorPosition({ line: line - 1, column: 0 });
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

/** Run `work` and show its error, if any. */
export async function reported(work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    Notification.error((error as Error).message, { autoClose: false });
  }
}
