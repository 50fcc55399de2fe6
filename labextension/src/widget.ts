// The anywidget, for front ends without our extension. esbuild bundles it to
// etrain_jupyter/static/widget.js.
import type { AnyModel } from '@anywidget/types';
import uplotStyle from 'uplot/dist/uPlot.min.css';
import theme from '../style/theme.css';
import header from '../style/header.css';
import controls from '../style/controls.css';
import tiles from '../style/tiles.css';
import chartBar from '../style/chart_bar.css';
import chart from '../style/chart.css';
import exhibits from '../style/exhibits.css';
import workers from '../style/workers.css';
import events from '../style/events.css';
import { IJobSource, mountJob } from './core';

// The same order as in style/index.css, which the JupyterLab extension loads.
const STYLES = [
  uplotStyle,
  theme,
  header,
  controls,
  tiles,
  chartBar,
  chart,
  exhibits,
  workers,
  events
];

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
      const receive = (content: unknown, buffers: DataView[]) => onMessage(content, buffers);
      // An event of the underlying Backbone model, missing in anywidget's types: the kernel
      // restarted or died.
      const disconnect = () => onLink(false);
      const events = model as unknown as {
        on(name: string, f: () => void): void;
        off(name: string, f: () => void): void;
      };
      model.on('msg:custom', receive);
      events.on('comm_live_update', disconnect);
      return () => {
        model.off('msg:custom', receive);
        events.off('comm_live_update', disconnect);
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
