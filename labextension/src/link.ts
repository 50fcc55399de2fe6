// The way to a kernel's jobs: one comm a kernel, shared by all outputs of a notebook (and later by the side panel).
import { ISessionContext } from '@jupyterlab/apputils';
import { Kernel, KernelMessage } from '@jupyterlab/services';
import { IJobSource } from './core';
import { Buffer } from './protocol';

const TARGET = 'etrain.jobs';

interface IListener {
  jobId: string;
  onMessage: (content: unknown, buffers: readonly Buffer[]) => void;
  onLink: (isUp: boolean) => void;
}

/**
 * The kernel opens the comm when it shows its first job; we never open one, so a kernel without etrain sees no more
 * than one question. After a reload of the page we look for the comm that the kernel already has.
 */
export class KernelLink {
  private comm: Kernel.IComm | null = null;
  private kernel: Kernel.IKernelConnection | null = null;
  private readonly listeners = new Set<IListener>();

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
    this.listeners.forEach(listener => listener.onLink(false));
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
      send: content => {
        if (this.comm && !this.comm.isDisposed) {
          this.comm.send({ ...content, job_id: jobId } as any);
        }
      },
      listen: (onMessage, onLink) => {
        const listener = { jobId, onMessage, onLink };
        this.listeners.add(listener);
        return () => this.listeners.delete(listener);
      }
    };
  }

  private adopt(comm: Kernel.IComm): void {
    comm.onMsg = message => this.onMessage(message);
    comm.onClose = () => {
      if (this.comm === comm) {
        this.drop();
      }
    };
    this.comm = comm;
    this.listeners.forEach(listener => listener.onLink(true));
  }

  private onMessage(message: KernelMessage.ICommMsgMsg): void {
    const content = message.content.data as Record<string, unknown>;
    this.listeners.forEach(listener => {
      if (listener.jobId === content.job_id) {
        listener.onMessage(content, message.buffers ?? []);
      }
    });
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
    if (status === 'restarting' || status === 'autorestarting' || status === 'dead' || status === 'terminating') {
      link.drop();
    }
  });
  void link.attach(context.session?.kernel);
  return link;
}
