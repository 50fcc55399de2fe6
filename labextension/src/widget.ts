// The anywidget: for front ends without our extension. Bundled by esbuild to etrain_jupyter/static/widget.js.
import type { AnyModel } from '@anywidget/types';
import uplotStyle from 'uplot/dist/uPlot.min.css';
import theme from '../style/theme.css';
import header from '../style/header.css';
import controls from '../style/controls.css';
import tiles from '../style/tiles.css';
import chartBar from '../style/chart_bar.css';
import chart from '../style/chart.css';
import workers from '../style/workers.css';
import events from '../style/events.css';
import { IJobSource, mountJob } from './core';

// In the order of style/index.css, which is what the JupyterLab extension loads.
const STYLES = [uplotStyle, theme, header, controls, tiles, chartBar, chart, workers, events];

type Model = AnyModel<{ saved: unknown }>;

function addStyle(element: HTMLElement): void {
  const root = element.getRootNode();
  const place = root instanceof ShadowRoot ? root : document.head;
  if (!place.querySelector('style[data-etrain]')) {
    const tag = document.createElement('style');
    tag.dataset.etrain = '';
    tag.textContent = STYLES.join('\n');
    place.append(tag);
  }
}

function sourceOf(model: Model): IJobSource {
  return {
    saved: () => model.get('saved'),
    send: content => model.send(content),
    listen(onMessage, onLink) {
      const hear = (content: unknown, buffers: DataView[]) => onMessage(content, buffers);
      // An event of the Backbone model beneath: the kernel restarted or died.
      const lose = () => onLink(false);
      const events = model as unknown as {
        on(name: string, f: () => void): void;
        off(name: string, f: () => void): void;
      };
      model.on('msg:custom', hear);
      events.on('comm_live_update', lose);
      return () => {
        model.off('msg:custom', hear);
        events.off('comm_live_update', lose);
      };
    }
  };
}

export default {
  render({ model, el }: { model: Model; el: HTMLElement }): () => void {
    addStyle(el);
    const job = mountJob(el, sourceOf(model));
    const refresh = () => job.refresh();
    model.on('change:saved', refresh);
    return () => {
      model.off('change:saved', refresh);
      job.unmount();
    };
  }
};
