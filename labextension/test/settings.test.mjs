// The defaults of the settings' schema are those of the code.
import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';
import { load } from './helpers.mjs';

const read = path => readFileSync(new URL(path, import.meta.url), 'utf8');
const schema = JSON.parse(read('../schema/settings.json'));
const code = read('../src/settings.ts');

test('each schema belongs to a plugin', () => {
  const ids = [...(code + read('../src/index.ts')).matchAll(/'(etrain-jupyter:[a-z]+)'/g)].map(
    found => found[1]
  );
  for (const file of readdirSync(new URL('../schema', import.meta.url))) {
    assert.ok(ids.includes(`etrain-jupyter:${file.replace('.json', '')}`), file);
  }
});

test('each setting has the default of the code, and none is missing', async () => {
  const { drawing } = await load('drawing');
  const choices = code.match(/choices: IChoices = \{([^}]*)\}/)[1];
  const others = Object.fromEntries(
    choices.split(',').map(pair => pair.split(':').map(word => word.trim()))
  );
  const wanted = {
    ...drawing,
    ...Object.fromEntries(Object.entries(others).map(([key, value]) => [key, value === 'true']))
  };
  const defaults = Object.fromEntries(
    Object.entries(schema.properties).map(([key, value]) => [key, value.default])
  );
  assert.deepEqual(defaults, wanted);
});

test('a listener receives changes until it is removed', async () => {
  const { changeDrawing, drawing, onDrawing } = await load('drawing');
  const received = [];
  const stop = onDrawing(() => received.push(drawing.smoothing));
  changeDrawing({ smoothing: 0.3 });
  stop();
  changeDrawing({ smoothing: 0.4 });
  assert.deepEqual(received, [0.3]);
});
