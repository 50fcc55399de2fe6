// Commands of the palette. They apply to the job selected in the panel, or else to the only active
// job. Stopping a job asks for confirmation.
import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, Notification, showDialog } from '@jupyterlab/apputils';
import { addCell, attachIn, reported, templateOf } from './cells';
import { stopLoss } from './controls';
import { LOAD, whyNot } from './jobs';
import { Entry, Follower, Session } from './session';
import { isTrialOf } from './studies';

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

/** A command that sends a request to a job. */
interface IJobCommand {
  command: string;
  /** Label while there is no job to apply it to. */
  label: string;
  labelOf: (name: string) => string;
}

const REQUESTS: Record<string, IJobCommand> = {
  pause: { command: COMMANDS.pause, label: 'Pause the Job', labelOf: name => `Pause ${name}` },
  resume: { command: COMMANDS.resume, label: 'Resume the Job', labelOf: name => `Resume ${name}` },
  checkpoint: {
    command: COMMANDS.checkpoint,
    label: 'Save a Checkpoint',
    labelOf: name => `Save a Checkpoint of ${name}`
  },
  stop: { command: COMMANDS.stop, label: 'Stop the Job…', labelOf: name => `Stop ${name}…` }
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
      'Add and run a cell that finds problems of this installation and how to fix them',
      current =>
        addCell(
          current.notebook,
          current.link.isUp ? '%etrain doctor' : `${LOAD}\n%etrain doctor`,
          true
        )
    )
  );
  for (const [request, { command, label, labelOf }] of Object.entries(REQUESTS)) {
    commands.addCommand(command, {
      label: () => {
        const target = session.target();
        return target ? labelOf(target.row.snapshot.name) : label;
      },
      caption: () =>
        whyNot(session.target(), request) ||
        'Applies to the job opened last, or to the only active one',
      isEnabled: () => !whyNot(session.target(), request),
      execute: () => requestOf(session.target(), request)
    });
  }
  Object.values(COMMANDS).forEach(command => palette?.addItem({ command, category: CATEGORY }));
  let notified = '';
  session.changed.connect(() => {
    // Rows change twice a second. Notify only real changes: each one redraws the palette and the
    // menus.
    const target = session.target();
    const reasons = Object.keys(REQUESTS).map(request => whyNot(target, request));
    const state = JSON.stringify([
      session.current()?.notebook.id,
      target?.id,
      target?.row.snapshot.name,
      reasons
    ]);
    if (state !== notified) {
      notified = state;
      Object.values(COMMANDS).forEach(command => commands.notifyCommandChanged(command));
    }
  });
}

/**
 * Attach to a job: by a cell in its notebook, whose kernel has restarted, or to a job that runs
 * elsewhere, preferably from the kernel of the current notebook.
 */
export async function attach(app: JupyterFrontEnd, session: Session, jobId: string): Promise<void> {
  const { offers, studies } = session.merged;
  const known =
    offers.find(offer => offer.other.job_id === jobId)?.offers ??
    studies.find(({ study }) => isTrialOf(study, jobId))?.followers;
  const lost = session.find(jobId)?.followers[0].notebook;
  await reported(async () => {
    if (lost) {
      app.shell.activateById(lost.id);
      await attachIn(lost, jobId);
      return;
    }
    if (!known?.length) {
      throw new Error(
        'No open kernel can attach to this job any more. Refresh the list with ⟳ in the panel.'
      );
    }
    await known[0].link.request({ kind: 'session', ask: 'attach', job_id: jobId });
  });
}

/** Send a request to the kernel and show its answer; ask for confirmation before a stop. */
async function requestOf(entry: Entry | null, request: string): Promise<void> {
  if (!entry || whyNot(entry, request)) {
    return;
  }
  const args = request === 'stop' ? await confirmStop(entry) : {};
  if (args) {
    const { link } = entry.followers[0];
    await reported(async () => {
      const answer = await link.request({ kind: 'request', job_id: entry.id, request, args });
      Notification.success(
        answer || `${REQUESTS[request].labelOf(entry.row.snapshot.name)}: done.`,
        {
          autoClose: SHOWN_MS
        }
      );
    });
  }
}

async function confirmStop({ row: { snapshot } }: Entry): Promise<{ now?: boolean } | null> {
  const { button } = await showDialog({
    title: `Stop ${snapshot.name}?`,
    body: `Stop with a checkpoint to lose nothing. Stop now: ${stopLoss(snapshot)}.`,
    buttons: [
      Dialog.cancelButton(),
      Dialog.warnButton({ label: 'Stop Now', actions: ['now'] }),
      Dialog.okButton({ label: 'Stop with a Checkpoint' })
    ]
  });
  return !button.accept ? null : button.actions.includes('now') ? { now: true } : {};
}
