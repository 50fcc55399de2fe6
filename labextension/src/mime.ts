// Renderer of application/vnd.etrain.job+json: live if the kernel is attached to the job, else its
// saved state.
import { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Widget } from '@lumino/widgets';
import { IJobSource, IMountedJob, mountJob } from './core';
import { KernelLink } from './link';
import { jobId } from './untrusted';

export const MIME = 'application/vnd.etrain.job+json';
/** Preferred to the widget view, whose rank is -10. */
export const RANK = -20;

export class JobOutput extends Widget implements IRenderMime.IRenderer {
  private job: IMountedJob | null = null;
  private jobId: string | null = null;
  private saved: unknown = {};

  constructor(
    private readonly link: KernelLink,
    private readonly actionsOf: (jobId: string) => Partial<IJobSource>
  ) {
    super();
    this.addClass('etrain-output');
  }

  /** Mount the view, or refresh it: the kernel updates the saved output from time to time. */
  renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.saved = model.data[MIME] ?? {};
    const snapshot = (this.saved as { snapshot?: { job_id?: unknown } }).snapshot;
    const id = jobId(snapshot?.job_id);
    if (this.job && this.jobId === id) {
      this.job.refresh();
      return Promise.resolve();
    }
    this.job?.unmount();
    this.jobId = id;
    const source = this.link.source(id, () => this.saved);
    this.job = mountJob(this.node, { ...source, ...this.actionsOf(id) });
    return Promise.resolve();
  }

  dispose(): void {
    this.job?.unmount();
    this.job = null;
    super.dispose();
  }
}
