// The JupyterLab extension and the widget load the same style sheets.
import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';

const read = path => readFileSync(new URL(path, import.meta.url), 'utf8');
const extension = [...read('../style/index.css').matchAll(/'(\w+\.css)'/g)].map(found => found[1]);
const widget = [...read('../src/widget.ts').matchAll(/'\.\.\/style\/(\w+\.css)'/g)].map(
  found => found[1]
);

test('the widget loads the style sheets of the extension, except those of the side panel', () => {
  const shared = extension.filter(name => name !== 'panel.css');
  assert.deepEqual(widget.toSorted(), shared.toSorted());
});

test('every style sheet is loaded', () => {
  const files = readdirSync(new URL('../style', import.meta.url)).filter(
    name => name.endsWith('.css') && name !== 'index.css'
  );
  assert.deepEqual(extension.toSorted(), files.toSorted());
});

test('the widget applies its style sheets in the order of the extension', () => {
  const imports = [...read('../src/widget.ts').matchAll(/import (\w+) from '\.\.\/style\/(\w+)/g)];
  const fileOf = new Map(imports.map(([, variable, file]) => [variable, `${file}.css`]));
  const [, order] = read('../src/widget.ts').match(/STYLES = \[\s*uplotStyle,\s*([^\]]*?)\s*\]/);
  const applied = order.split(/,\s*/).map(variable => fileOf.get(variable));
  assert.deepEqual(
    applied,
    extension.filter(name => applied.includes(name))
  );
  assert.equal(applied.length, widget.length);
});
