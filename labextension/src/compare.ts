// Compare jobs that are selected in the panel: the kernel renders a page, which opens in a tab.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, MainAreaWidget, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';
import { make } from './dom';
import { bestFollower } from './jobs';
import { jobsIcon } from './panel';
import { Session } from './session';
import { page } from './untrusted';

/** A page in an isolated frame: it cannot run scripts, open windows or access JupyterLab. */
class PageView extends Widget {
  constructor(html: string) {
    super();
    this.addClass('etrain-page');
    const frame = make('iframe', 'etrain-page-frame');
    frame.setAttribute('sandbox', '');
    frame.title = 'Comparison of jobs';
    frame.srcdoc = html;
    this.node.append(frame);
  }
}

/** Request the comparison from the kernel that is attached to most of the jobs, and show it. */
export async function compareJobs(
  app: JupyterFrontEnd,
  session: Session,
  jobIds: readonly string[]
): Promise<void> {
  const entries = session.merged.entries.filter(entry => jobIds.includes(entry.id));
  const follower = bestFollower(entries, session.connected());
  if (!follower) {
    throw new Error(
      'No open kernel has loaded etrain. Run %load_ext etrain_jupyter in a notebook, then retry.'
    );
  }
  // The list has the newest job first; the table has the oldest one first.
  const ids = entries.map(entry => entry.id).reverse();
  const html = await follower.link.request({ kind: 'session', ask: 'compare', job_ids: ids }, page);
  const names = entries.map(entry => entry.row.snapshot.name || entry.id);
  await show(app, new PageView(html), [...new Set(names)].reverse().join(', '));
}

async function show(app: JupyterFrontEnd, view: PageView, names: string): Promise<void> {
  const tab = new MainAreaWidget({ content: view });
  tab.id = `etrain-comparison-${Math.random().toString(36).slice(2)}`;
  tab.title.label = 'Comparison';
  tab.title.caption = names;
  tab.title.icon = jobsIcon;
  tab.title.closable = true;
  app.shell.add(tab, 'main');
  if (tab.isAttached) {
    app.shell.activateById(tab.id);
    return;
  }
  // The main area of a Notebook 7 page holds one document only.
  view.parent = null;
  await showDialog({
    title: 'Comparison',
    body: view,
    buttons: [Dialog.okButton({ label: 'Close' })]
  });
}
