// The parts of the view that decide something; run with `jlpm test` or through tests/unit/dashboard.
import assert from 'node:assert/strict';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const folder = mkdtempSync(join(tmpdir(), 'etrain-'));
after(() => rmSync(folder, { recursive: true }));

async function load(name) {
  const outfile = join(folder, `${name}.mjs`);
  const source = fileURLToPath(new URL(`../src/${name}.ts`, import.meta.url));
  await build({ entryPoints: [source], bundle: true, format: 'esm', outfile, logLevel: 'error' });
  return import(outfile);
}

const { Curve, roomFor, thin } = await load('columns');
const { asSnapshot, JobData } = await load('protocol');
const format = await load('format');

function curveOf(y) {
  const curve = new Curve();
  curve.append(Float64Array.from(y, (_, i) => i), Float32Array.from(y));
  return curve;
}

function block(x, y) {
  const bytes = new Uint8Array(x.length * 12);
  bytes.set(new Uint8Array(Float64Array.from(x).buffer), 0);
  bytes.set(new Uint8Array(Float32Array.from(y).buffer), x.length * 8);
  return bytes;
}

const update = (seq, more = {}) => ({ kind: 'update', seq, snapshot: { step: seq }, blocks: [], ...more });

test('thinning keeps the peak and the dip of a long curve', () => {
  const y = new Array(100000).fill(1);
  y[31234] = 9;
  y[77001] = -5;
  const [x, kept] = thin(curveOf(y), 0, 1e5, 300);
  assert.ok(x.length <= 602);
  assert.equal(kept[x.indexOf(31234)], 9);
  assert.equal(kept[x.indexOf(77001)], -5);
});

test('thinning shows every point of a zoomed range and one beyond each end', () => {
  const [x] = thin(curveOf(new Array(1000).fill(0)), 10, 12, 300);
  assert.deepEqual(x, [9, 10, 11, 12]);
});

test('a loss that is not a number is a gap', () => {
  assert.deepEqual(thin(curveOf([1, NaN, 2]), 0, 2, 300)[1], [1, null, 2]);
});

test('the value at a step is that of the last point up to it', () => {
  const curve = curveOf([5, 6, 7]);
  assert.deepEqual([curve.at(-1), curve.at(1), curve.at(99), curve.at(Infinity)], [undefined, 6, 7, 7]);
});

test('the axis leaves room for what comes, but not beyond the end', () => {
  assert.equal(roomFor(100, 120), 120);
  assert.equal(roomFor(0, null), 10);
  assert.ok(roomFor(1000, 1e6) > 1000 && roomFor(1000, 1e6) < 1500);
});

test('curves grow block by block once a reset has come', () => {
  const data = new JobData('me');
  assert.equal(data.take(update(4, { blocks: [{ name: 'loss', rows: 1 }] }), [block([9], [9])]), 'nothing');
  assert.equal(data.take(update(5, { reset: true, blocks: [{ name: 'loss', rows: 2 }] }), [block([1, 2], [0.5, 0.25])]), 'news');
  assert.equal(data.take(update(6, { blocks: [{ name: 'loss', rows: 1 }] }), [block([3], [0.125])]), 'news');
  assert.deepEqual([...data.curves.get('loss').x.view()], [1, 2, 3]);
  assert.deepEqual([...data.curves.get('loss').y.view()], [0.5, 0.25, 0.125]);
  assert.equal(data.snapshot.step, 6);
});

test('a gap asks for a new start and draws nothing wrong until it came', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true }), []);
  assert.equal(data.take(update(3), []), 'gap');
  assert.equal(data.take(update(4), []), 'nothing');
  assert.equal(data.take(update(5, { reset: true, to: 'me' }), []), 'news');
});

test('a start addressed to another view is passed over', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true }), []);
  assert.equal(data.take(update(2, { reset: true, to: 'other', snapshot: { step: 77 } }), []), 'nothing');
  assert.equal(data.take(update(3), []), 'news');
  assert.equal(data.snapshot.step, 3);
});

test('lists that did not change are not sent again and stay', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true, snapshot: { events: [{ text: 'hello' }] } }), []);
  data.take(update(2), []);
  assert.equal(data.snapshot.events[0].text, 'hello');
});

test('hostile payloads become harmless snapshots', () => {
  for (const hostile of [null, 7, 'x', [], { events: 'no', workers: [null, 3], markers: {}, metrics: [1] }]) {
    const snapshot = asSnapshot(hostile);
    assert.equal(snapshot.step, 0);
    assert.ok(Array.isArray(snapshot.events));
  }
  const odd = asSnapshot({ step: NaN, loss: 'NaN', progress: 1e99, metrics: { __proto__: 1, a: {}, b: '-Infinity' } });
  assert.ok(Number.isNaN(odd.loss));
  assert.equal(odd.progress, 1);
  assert.equal(odd.metrics.b, -Infinity);
  assert.equal(odd.metrics.a, undefined);
  new JobData('me').load({ series: { loss: { x: [1, 'two'], y: [null, {}] }, bad: { x: 1 } } });
});

test('a buffer of the wrong size is left out', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true, blocks: [{ name: 'loss', rows: 5 }] }), [block([1], [1])]);
  assert.equal(data.curves.has('loss'), false);
});

test('numbers read as a person writes them', () => {
  assert.deepEqual([1.23456, 12345.6, 0.00001, NaN, undefined].map(format.number), ['1.235', '12,346', '1.00e−5', 'NaN', '–']);
  assert.deepEqual([42, 725, 3661].map(format.clock), ['0:42', '12:05', '1:01:01']);
  assert.deepEqual([3.7, 200, 7300].map(format.age), ['3 s', '3 min', '2 h']);
  assert.deepEqual([812, 1.5e6].map(format.size), ['812 B', '1.5 MB']);
});
