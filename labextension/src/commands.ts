// The commands of the palette. They are about the job that was looked at last in the panel, else about the only one
// that is active; what ends something asks first.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, Notification, showDialog } from '@jupyterlab/apputils';
import { addCell, LOAD, templateOf } from './cells';
import { stopLoss } from './controls';
import { whyNot } from './jobs';
import { Entry, Follower, Session } from './session';

const CATEGORY = 'etrain';
const SHOWN_MS = 6000;

export const COMMANDS = {
  show: 'etrain:show-jobs',
  insert: 'etrain:insert-training-cell',
  doctor: 'etrain:run-doctor',
  pause: 'etrain:pause-job',
  resume: 'etrain:resume-job',
  checkpoint: 'etrain:save-checkpoint',
  stop: 'etrain:stop-job'
};

/** Label without a job, and with one. */
const REQUESTS: Record<string, [command: string, label: string, about: (name: string) => string]> =
  {
    pause: [COMMANDS.pause, 'Pause the Job', name => `Pause ${name}`],
    resume: [COMMANDS.resume, 'Resume the Job', name => `Resume ${name}`],
    checkpoint: [COMMANDS.checkpoint, 'Save a Checkpoint', name => `Save a Checkpoint of ${name}`],
    stop: [COMMANDS.stop, 'Stop the Job…', name => `Stop ${name}…`]
  };

export function addCommands(
  app: JupyterFrontEnd,
  session: Session,
  palette: ICommandPalette | null,
  panelId: string
): void {
  const { commands } = app;
  commands.addCommand(COMMANDS.show, {
    label: 'Show Training Jobs',
    caption: 'Open the side panel with the jobs of all open notebooks',
    execute: () => app.shell.activateById(panelId)
  });
  const inNotebook = (
    label: string,
    caption: string,
    work: (current: Follower) => Promise<void>
  ) => ({
    label,
    caption,
    isEnabled: () => session.current() !== null,
    execute: () =>
      reported(async () => {
        const current = session.current();
        if (current) {
          await work(current);
        }
      })
  });
  commands.addCommand(
    COMMANDS.insert,
    inNotebook(
      'Insert a Training Cell',
      'Add a commented %%etrain cell to start from',
      async current => {
        const template = await templateOf(current);
        if (!current.link.isUp) {
          await addCell(current.notebook, LOAD, false);
        }
        await addCell(current.notebook, template, false);
      }
    )
  );
  commands.addCommand(
    COMMANDS.doctor,
    inNotebook(
      'Run the Doctor',
      'Add a cell that tells what is wrong here and how to mend it, and run it',
      current =>
        addCell(
          current.notebook,
          current.link.isUp ? '%etrain doctor' : `${LOAD}\n%etrain doctor`,
          true
        )
    )
  );
  for (const [request, [command, label, about]] of Object.entries(REQUESTS)) {
    commands.addCommand(command, {
      label: () => {
        const target = session.target();
        return target ? about(target.row.snapshot.name) : label;
      },
      caption: () =>
        whyNot(session.target(), request) ||
        'The job that was opened last, or the only one that is active',
      isEnabled: () => !whyNot(session.target(), request),
      execute: () => requestOf(session.target(), request)
    });
  }
  Object.values(COMMANDS).forEach(command => palette?.addItem({ command, category: CATEGORY }));
  let told = '';
  session.changed.connect(() => {
    // Rows change twice a second; the palette and menus draw anew whenever they hear of a change.
    const target = session.target();
    const reasons = Object.keys(REQUESTS).map(request => whyNot(target, request));
    const state = JSON.stringify([
      session.current()?.notebook.id,
      target?.id,
      target?.row.snapshot.name,
      reasons
    ]);
    if (state !== told) {
      told = state;
      Object.values(COMMANDS).forEach(command => commands.notifyCommandChanged(command));
    }
  });
}

/** Follow a job that runs elsewhere, from the kernel of the current notebook if that offers it. */
export async function attach(session: Session, jobId: string): Promise<void> {
  const { entries, offers } = session.merged;
  const known =
    entries.find(entry => entry.id === jobId)?.offers ??
    offers.find(offer => offer.other.job_id === jobId)?.offers;
  await reported(async () => {
    if (!known?.length) {
      throw new Error(
        'No kernel offers to follow this job any more. Look again with ⟳ in the panel.'
      );
    }
    await known[0].link.ask({ kind: 'session', ask: 'attach', job_id: jobId });
  });
}

/** Ask for something, after a confirmation if it ends the job, and tell how it went. */
async function requestOf(entry: Entry | null, request: string): Promise<void> {
  if (!entry || whyNot(entry, request)) {
    return;
  }
  const args = request === 'stop' ? await askToStop(entry) : {};
  if (args) {
    const { link } = entry.followers[0];
    await reported(async () => {
      const text = await link.ask({ kind: 'request', job_id: entry.id, request, args });
      Notification.success(text || `${REQUESTS[request][2](entry.row.snapshot.name)}: done.`, {
        autoClose: SHOWN_MS
      });
    });
  }
}

async function askToStop({ row: { snapshot } }: Entry): Promise<{ now?: boolean } | null> {
  const { button } = await showDialog({
    title: `Stop ${snapshot.name}?`,
    body: `Stopping with a checkpoint loses nothing. Stopping now: ${stopLoss(snapshot)}.`,
    buttons: [
      Dialog.cancelButton(),
      Dialog.warnButton({ label: 'Stop Now', actions: ['now'] }),
      Dialog.okButton({ label: 'Stop with a Checkpoint' })
    ]
  });
  return !button.accept ? null : button.actions.includes('now') ? { now: true } : {};
}

/** Do something, and say what went wrong. */
async function reported(work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    Notification.error((error as Error).message, { autoClose: false });
  }
}
