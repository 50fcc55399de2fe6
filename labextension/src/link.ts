// Connection to the jobs of a kernel: one comm per kernel, shared by all outputs of a notebook and
// the side panel.
import { ISessionContext } from '@jupyterlab/apputils';
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { JSONObject } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { IJobSource } from './core';
import { Buffer } from './job_data';
import { IFollower, KernelJobs } from './jobs';
import { text } from './untrusted';

const TARGET = 'etrain.jobs';
/** Interval of the requests that keep the kernel reporting its jobs; see side_panel.py. */
const WATCH_EVERY_MS = 20000;
const ANSWER_WITHIN_MS = 35000;

interface IListener {
  jobId: string;
  onMessage: (content: unknown, buffers: readonly Buffer[]) => void;
  onLink: (isUp: boolean) => void;
}

/**
 * The comm of one notebook's kernel.
 *
 * The kernel opens the comm on %load_ext. The front end never does, so a kernel without etrain
 * receives one comm_info_request and nothing else. After a page reload, that request finds the comm
 * that is already open.
 */
export class KernelLink implements IFollower {
  readonly jobs = new KernelJobs();
  private comm: Kernel.IComm | null = null;
  private kernel: Kernel.IKernelConnection | null = null;
  private clock = 0;
  private readonly listeners = new Set<IListener>();
  private readonly waiting = new Map<string, (level: string, answer: unknown) => void>();
  private readonly changes = new Signal<this, void>(this);

  /** The kernel reported on its jobs, connected or disconnected. */
  get changed(): ISignal<this, void> {
    return this.changes;
  }

  get isUp(): boolean {
    return this.comm !== null && !this.comm.isDisposed;
  }

  async attach(kernel: Kernel.IKernelConnection | null | undefined): Promise<void> {
    if (!kernel || !kernel.handleComms || this.kernel === kernel) {
      return;
    }
    this.kernel = kernel;
    kernel.registerCommTarget(TARGET, comm => this.adopt(comm));
    const reply = await kernel.requestCommInfo({ target_name: TARGET });
    if (reply.content.status !== 'ok' || this.comm || this.kernel !== kernel) {
      return;
    }
    const id = Object.keys(reply.content.comms)[0];
    if (id && !kernel.hasComm(id)) {
      this.adopt(kernel.createComm(TARGET, id));
    }
  }

  /** The kernel died or restarted. */
  drop(): void {
    this.comm = null;
    window.clearInterval(this.clock);
    this.jobs.lose();
    this.waiting.forEach(answer =>
      answer(
        'error',
        'The kernel died or restarted before it answered. The request may have been carried out.'
      )
    );
    this.waiting.clear();
    this.listeners.forEach(listener => listener.onLink(false));
    this.changes.emit();
  }

  /** The notebook has a different kernel now. */
  replace(kernel: Kernel.IKernelConnection | null | undefined): void {
    this.kernel = null;
    this.drop();
    void this.attach(kernel);
  }

  source(jobId: string, saved: () => unknown): IJobSource {
    return {
      saved,
      send: content => this.send({ ...content, job_id: jobId }),
      listen: (onMessage, onLink) => {
        const listener = { jobId, onMessage, onLink };
        this.listeners.add(listener);
        return () => this.listeners.delete(listener);
      }
    };
  }

  /**
   * Send a request about one job (kind `request`) or about all jobs (kind `session`). Return the
   * answer, checked by `read`.
   */
  request(
    content: Record<string, unknown>,
    read: (answer: unknown) => string = text
  ): Promise<string> {
    const view = Math.random().toString(36).slice(2);
    return new Promise((resolve, reject) => {
      if (!this.isUp) {
        reject(new Error('This kernel has not loaded etrain. Run %load_ext etrain_jupyter in it.'));
        return;
      }
      const timeout = `The kernel did not answer within ${ANSWER_WITHIN_MS / 1000} s. The request may still be carried out.`;
      const timer = window.setTimeout(() => this.answer(view, 'error', timeout), ANSWER_WITHIN_MS);
      this.waiting.set(view, (level, answer) => {
        window.clearTimeout(timer);
        if (level === 'error') {
          reject(new Error(text(answer)));
        } else {
          resolve(read(answer));
        }
      });
      this.send({ ...content, view });
    });
  }

  /** Make the kernel scan for other jobs and for pools now. */
  scan(): void {
    this.send({ kind: 'session', ask: 'look' });
  }

  /** Forget the jobs of dead kernels. */
  forget(): void {
    this.jobs.forget();
    this.changes.emit();
  }

  private send(content: Record<string, unknown>): void {
    if (this.comm && !this.comm.isDisposed) {
      this.comm.send(content as JSONObject);
    }
  }

  private adopt(comm: Kernel.IComm): void {
    comm.onMsg = message => this.onMessage(message);
    comm.onClose = () => {
      if (this.comm === comm) {
        this.drop();
      }
    };
    this.comm = comm;
    window.clearInterval(this.clock);
    const watch = () => this.send({ kind: 'session', ask: 'watch' });
    this.clock = window.setInterval(watch, WATCH_EVERY_MS);
    watch();
    this.listeners.forEach(listener => listener.onLink(true));
    this.changes.emit();
  }

  private onMessage(message: KernelMessage.ICommMsgMsg): void {
    const content = message.content.data as Record<string, unknown>;
    if (content.kind === 'session' && content.tell === 'jobs') {
      this.jobs.take(content);
      this.changes.emit();
    } else if (content.kind === 'session' || content.kind === 'notice') {
      this.answer(text(content.to), text(content.level), content.text);
    }
    this.listeners.forEach(listener => {
      if (listener.jobId === content.job_id) {
        listener.onMessage(content, message.buffers ?? []);
      }
    });
  }

  private answer(view: string, level: string, answer: unknown): void {
    const receive = this.waiting.get(view);
    this.waiting.delete(view);
    receive?.(level, answer);
  }
}

const links = new WeakMap<ISessionContext, KernelLink>();

/** Return the link of a notebook. It stays the same when the notebook changes its kernel. */
export function linkOf(context: ISessionContext): KernelLink {
  const known = links.get(context);
  if (known) {
    return known;
  }
  const link = new KernelLink();
  links.set(context, link);
  context.kernelChanged.connect(() => link.replace(context.session?.kernel));
  context.statusChanged.connect((_, status) => {
    if (
      status === 'restarting' ||
      status === 'autorestarting' ||
      status === 'dead' ||
      status === 'terminating'
    ) {
      link.drop();
    }
  });
  context.disposed.connect(() => link.drop());
  void link.attach(context.session?.kernel);
  return link;
}
