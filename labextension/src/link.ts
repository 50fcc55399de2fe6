// The way to a kernel's jobs: one comm a kernel, shared by all outputs of a notebook and by the side panel.
import { ISessionContext } from '@jupyterlab/apputils';
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { JSONObject } from '@lumino/coreutils';
import { ISignal, Signal } from '@lumino/signaling';
import { IJobSource } from './core';
import { IFollower, KernelJobs } from './jobs';
import { Buffer, text } from './protocol';

const TARGET = 'etrain.jobs';
/** The kernel tells its jobs for as long as somebody asks; see side_panel.py. */
const WATCH_EVERY_MS = 20000;
const ANSWER_WITHIN_MS = 35000;

interface IListener {
  jobId: string;
  onMessage: (content: unknown, buffers: readonly Buffer[]) => void;
  onLink: (isUp: boolean) => void;
}

/**
 * The kernel opens the comm on %load_ext; we never open one, so a kernel without etrain sees no more than one
 * question. After a reload of the page we look for the comm that the kernel already has.
 */
export class KernelLink implements IFollower {
  readonly jobs = new KernelJobs();
  private comm: Kernel.IComm | null = null;
  private kernel: Kernel.IKernelConnection | null = null;
  private clock = 0;
  private readonly listeners = new Set<IListener>();
  private readonly waiting = new Map<string, (level: string, text: string) => void>();
  private readonly changes = new Signal<this, void>(this);

  /** The kernel told something about its jobs, came or went. */
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

  /** The kernel died or started anew. */
  drop(): void {
    this.comm = null;
    window.clearInterval(this.clock);
    this.jobs.lose();
    this.waiting.forEach(answer =>
      answer('error', 'The kernel is gone. Nobody knows whether that was done.')
    );
    this.waiting.clear();
    this.listeners.forEach(listener => listener.onLink(false));
    this.changes.emit();
  }

  /** Another kernel took the place of the one that we knew. */
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

  /** Ask for something about a job (`request`) or about all of them (`session`), and be answered in words. */
  ask(content: Record<string, unknown>): Promise<string> {
    const view = Math.random().toString(36).slice(2);
    return new Promise((resolve, reject) => {
      if (!this.isUp) {
        reject(new Error('This kernel has not loaded etrain. Run %load_ext etrain_jupyter in it.'));
        return;
      }
      const late = `The kernel has not answered within ${ANSWER_WITHIN_MS / 1000} s. What was asked for may still happen.`;
      const timer = window.setTimeout(() => this.answer(view, 'error', late), ANSWER_WITHIN_MS);
      this.waiting.set(view, (level, text) => {
        window.clearTimeout(timer);
        if (level === 'error') {
          reject(new Error(text));
        } else {
          resolve(text);
        }
      });
      this.send({ ...content, view });
    });
  }

  /** Have the kernel look for other jobs and for pools now. */
  look(): void {
    this.send({ kind: 'session', ask: 'look' });
  }

  /** Forget the jobs of kernels that are gone. */
  forget(): void {
    this.jobs.lost.clear();
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
      this.answer(text(content.to), text(content.level), text(content.text));
    }
    this.listeners.forEach(listener => {
      if (listener.jobId === content.job_id) {
        listener.onMessage(content, message.buffers ?? []);
      }
    });
  }

  private answer(view: string, level: string, text: string): void {
    const hear = this.waiting.get(view);
    this.waiting.delete(view);
    hear?.(level, text);
  }
}

const links = new WeakMap<ISessionContext, KernelLink>();

/** The link of a notebook; it follows the notebook from kernel to kernel. */
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
