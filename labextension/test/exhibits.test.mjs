// Exhibits from untrusted messages.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { load } from './helpers.mjs';

const { asExhibit, indexOfStep, pictureUrl, savedExhibits } = await load('exhibit_data');
const { asSnapshot } = await load('protocol');

/** The first bytes of a PNG, which are all that is checked. */
function pngHeader(width, height, { length = 40 } = {}) {
  const bytes = new Uint8Array(length);
  bytes.set([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0, 0, 0, 13, 0x49, 0x48, 0x44, 0x52]);
  const view = new DataView(bytes.buffer);
  view.setUint32(16, width);
  view.setUint32(20, height);
  return bytes;
}

const head = { name: 'curve', step: 20 };

test('a picture becomes a data: URL with its bytes', () => {
  const bytes = pngHeader(200, 100, { length: 20000 });
  const padded = new Uint8Array(20010);
  padded.set(bytes, 10);
  const views = [bytes.buffer, bytes, new DataView(padded.buffer, 10), padded.subarray(10)];
  for (const view of views) {
    const { picture, error } = asExhibit({ ...head, format: 'png' }, [view]);
    assert.equal(error, null);
    const [type, data] = picture.split(',');
    assert.equal(type, 'data:image/png;base64');
    assert.deepEqual(new Uint8Array(Buffer.from(data, 'base64')), bytes);
  }
});

test('bytes that are not a PNG, and a PNG that is too large, are refused', () => {
  const svg = new TextEncoder().encode('<svg xmlns="http://www.w3.org/2000/svg" onload="x()"/>');
  const wrong = pngHeader(10, 10);
  wrong[12] = 0;
  const large = [pngHeader(50000, 50000), pngHeader(10, 10, { length: 1000001 })];
  for (const buffer of [undefined, new ArrayBuffer(4), svg, wrong, pngHeader(0, 10), ...large]) {
    assert.equal(pictureUrl(buffer), null);
    const exhibit = asExhibit({ ...head, format: 'png' }, [buffer]);
    assert.equal(exhibit.error, 'The picture is not a valid PNG.');
  }
});

test('a table has one scalar cell per column, within limits', () => {
  const table = {
    columns: ['name', 'loss', 'right'],
    rows: [['a', 'NaN', true], ['b', 0.5], 'no row', [{ evil: 1 }, [2], null, 'extra']]
  };
  const found = asExhibit({ ...head, format: 'table', table }, []).table;
  assert.deepEqual(found.columns, ['name', 'loss', 'right']);
  assert.deepEqual(found.rows, [
    ['a', NaN, true],
    ['b', 0.5, null],
    [null, null, null],
    [null, null, null]
  ]);
  const many = { columns: Array(99).fill('c'), rows: Array(999).fill([1]) };
  const cut = asExhibit({ ...head, format: 'table', table: many }, []).table;
  assert.deepEqual([cut.columns.length, cut.rows.length], [20, 200]);
});

test('an error and an unknown format are errors', () => {
  assert.equal(asExhibit({ ...head, error: 'gone' }, []).error, 'gone');
  const unknown = asExhibit({ ...head, format: 'html', text: '<b>' }, []);
  assert.match(unknown.error, /cannot show/);
  assert.equal(unknown.text, null);
  for (const garbage of [null, 7, [], 'text']) {
    assert.match(asExhibit(garbage, []).error, /cannot show/);
  }
});

test('a saved notebook has exhibits, and invalid ones are left out', () => {
  const bytes = pngHeader(20, 10);
  const data = Buffer.from(bytes).toString('base64');
  const svg = Buffer.from('<svg onload="x()"/>').toString('base64');
  const exhibits = [
    { ...head, format: 'png', data },
    { ...head, name: 'report', format: 'text', text: 'fine' },
    { ...head, format: 'png', data: svg },
    { ...head, format: 'png', data: '%' },
    { ...head, format: 'png', data: 7 },
    null
  ];
  const [curve, report, ...others] = savedExhibits({ exhibits });
  assert.equal(curve.picture, `data:image/png;base64,${data}`);
  assert.deepEqual([report.name, report.step, report.text], ['report', 20, 'fine']);
  assert.deepEqual(others, []);
  const text = { ...head, format: 'text', text: '' };
  assert.equal(savedExhibits({ exhibits: Array(99).fill(text) }).length, 50);
  for (const garbage of [null, 7, [], {}, { exhibits: 'no' }]) {
    assert.deepEqual(savedExhibits(garbage), []);
  }
});

test('the slider follows the newest step until the user moves it', () => {
  assert.equal(indexOfStep([10, 20, 30], null), 2);
  assert.equal(indexOfStep([10, 20, 30], 20), 1);
  assert.equal(indexOfStep([10, 30], 20), 0, 'its exhibit was removed');
  assert.equal(indexOfStep([20, 30], 10), 0);
  assert.equal(indexOfStep([10, 20], 30), 1);
});

test('the exhibits of a snapshot are limited', () => {
  const series = { name: 'curve\n', steps: [...Array(999).keys()] };
  const { exhibits } = asSnapshot({ exhibits: [series, null, { name: 3, steps: 'no' }] });
  assert.deepEqual(
    exhibits.map(({ name, steps }) => [name, steps.length]),
    [
      ['curve ', 300],
      ['', 0],
      ['3', 0]
    ]
  );
  assert.deepEqual(asSnapshot({ exhibits: 'no' }).exhibits, []);
  assert.equal(asSnapshot({ exhibits: Array(99).fill({}) }).exhibits.length, 50);
});
