// The logic of the front end. Run with `jlpm test`; pytest runs it, too.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { load } from './helpers.mjs';

const { average, CAPACITY, Curve, roomFor, smooth, thin } = await load('columns');
const { Axis } = await load('axis');
const { keepChoices, readChoices } = await load('choices');
const scale = await load('scale');
const { asSnapshot, checkpointTrouble } = await load('protocol');
const { JobData } = await load('job_data');
const format = await load('format');
const { page, text } = await load('untrusted');

function curveOf(y) {
  const curve = new Curve();
  curve.append(
    Float64Array.from(y, (_, i) => i),
    Float32Array.from(y)
  );
  return curve;
}

function block(x, y) {
  const bytes = new Uint8Array(x.length * 12);
  bytes.set(new Uint8Array(Float64Array.from(x).buffer), 0);
  bytes.set(new Uint8Array(Float32Array.from(y).buffer), x.length * 8);
  return bytes;
}

const update = (seq, more = {}) => ({
  kind: 'update',
  seq,
  snapshot: { step: seq },
  blocks: [],
  ...more
});

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

test('a part that was thinned before gets the same share of points as a new part', () => {
  const curve = new Curve();
  const old = Float64Array.from({ length: 1000 }, (_, i) => i * 100);
  const fresh = Float64Array.from({ length: 20000 }, (_, i) => 100000 + i);
  curve.append(
    old,
    Float32Array.from(old, (_, i) => i % 7)
  );
  curve.append(
    fresh,
    Float32Array.from(fresh, (_, i) => i % 7)
  );
  const [x] = thin(curve, -Infinity, Infinity, 300);
  assert.ok(x.length <= 602 && x.filter(at => at < 60000).length >= 290);
});

test('a thinned staircase keeps the last value of each bucket', () => {
  const steps = new Curve();
  steps.append(
    Float64Array.from({ length: 9000 }, (_, i) => i),
    Float32Array.from({ length: 9000 }, (_, i) => [1, 9, 4][i % 3])
  );
  const [x, y] = thin(steps, -Infinity, Infinity, 1, true);
  assert.deepEqual([x[x.length - 1], y[y.length - 1]], [8999, 4]);
});

test('a loss that is not a number is a gap', () => {
  assert.deepEqual(thin(curveOf([1, NaN, 2]), 0, 2, 300)[1], [1, null, 2]);
});

test('the value at a step is that of the last point at or before it', () => {
  const curve = curveOf([5, 6, 7]);
  assert.deepEqual(
    [curve.at(-1), curve.at(1), curve.at(99), curve.at(Infinity)],
    [undefined, 6, 7, 7]
  );
});

test('the axis leaves room to grow, but not beyond the end', () => {
  assert.equal(roomFor(100, 120), 120);
  assert.equal(roomFor(0, null), 10);
  assert.ok(roomFor(1000, 1e6) > 1000 && roomFor(1000, 1e6) < 1500);
});

test('curves grow block by block after a reset', () => {
  const data = new JobData('me');
  assert.equal(
    data.take(update(4, { blocks: [{ name: 'loss', rows: 1 }] }), [block([9], [9])]),
    'nothing'
  );
  assert.equal(
    data.take(update(5, { reset: true, blocks: [{ name: 'loss', rows: 2 }] }), [
      block([1, 2], [0.5, 0.25])
    ]),
    'update'
  );
  assert.equal(
    data.take(update(6, { blocks: [{ name: 'loss', rows: 1 }] }), [block([3], [0.125])]),
    'update'
  );
  assert.deepEqual([...data.curves.get('loss').x.view()], [1, 2, 3]);
  assert.deepEqual([...data.curves.get('loss').y.view()], [0.5, 0.25, 0.125]);
  assert.equal(data.snapshot.step, 6);
});

test('after a gap, messages are ignored until a reset', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true }), []);
  assert.equal(data.take(update(3), []), 'gap');
  assert.equal(data.take(update(4), []), 'nothing');
  assert.equal(data.take(update(5, { reset: true, to: 'me' }), []), 'update');
});

test('a reset addressed to another view is ignored', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true }), []);
  assert.equal(
    data.take(update(2, { reset: true, to: 'other', snapshot: { step: 77 } }), []),
    'nothing'
  );
  assert.equal(data.take(update(3), []), 'update');
  assert.equal(data.snapshot.step, 3);
});

test('a list that is not in a message stays', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true, snapshot: { events: [{ id: 1, text: 'hello' }] } }), []);
  data.take(update(2), []);
  assert.equal(data.snapshot.events[0].text, 'hello');
});

test('lists are updated row by row', () => {
  const data = new JobData('me');
  const workers = ['a', 'b', 'c'].map(worker => ({ worker, state: 'training', steps: 1 }));
  const events = [1, 2, 3].map(id => ({ id, text: `event ${id}` }));
  data.take(update(1, { reset: true, snapshot: { workers, events } }), []);
  const lists = {
    workers: {
      rows: [
        { worker: 'a', steps: 2 },
        { worker: 'b', state: 'lost' },
        { worker: 'd', steps: 7 }
      ],
      order: ['d', 'a', 'b']
    },
    events: {
      rows: [
        { id: 3, text: 'amended' },
        { id: 4, text: 'new' }
      ],
      gone: [1]
    }
  };
  data.take(update(2, { lists }), []);
  assert.deepEqual(
    data.snapshot.workers.map(w => [w.worker, w.state, w.steps]),
    [
      ['d', '', 7],
      ['a', 'training', 2],
      ['b', 'lost', 1]
    ]
  );
  assert.deepEqual(
    data.snapshot.events.map(e => e.text),
    ['event 2', 'amended', 'new']
  );
  data.take(
    update(3, {
      lists: {
        events: 'x',
        workers: { rows: [null, { worker: { toString: 1, valueOf: 1 } }], order: { a: 1 } },
        markers: []
      }
    }),
    []
  );
  assert.equal(data.snapshot.events.length, 3);
});

test('hostile payloads become harmless snapshots', () => {
  for (const hostile of [
    null,
    7,
    'x',
    [],
    { events: 'no', workers: [null, 3], markers: {}, metrics: [1] }
  ]) {
    const snapshot = asSnapshot(hostile);
    assert.equal(snapshot.step, 0);
    assert.ok(Array.isArray(snapshot.events));
  }
  const odd = asSnapshot({
    step: NaN,
    loss: 'NaN',
    progress: 1e99,
    metrics: { __proto__: 1, a: {}, b: '-Infinity' }
  });
  assert.ok(Number.isNaN(odd.loss));
  assert.equal(odd.progress, 1);
  assert.equal(odd.metrics.b, -Infinity);
  assert.equal(odd.metrics.a, undefined);
  new JobData('me').load({
    series: {
      loss: { x: [1, 'two'], y: [null, {}] },
      bad: { x: 1 },
      odd: { x: '1 two  -', y: 'nan {} ∞ 1e999' }
    }
  });
});

test('a buffer of the wrong size is ignored', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true, blocks: [{ name: 'loss', rows: 5 }] }), [block([1], [1])]);
  assert.equal(data.curves.has('loss'), false);
});

test('numbers are formatted for reading', () => {
  assert.deepEqual([1.23456, 12345.6, 0.00001, NaN, undefined].map(format.number), [
    '1.235',
    '12,346',
    '1.00e−5',
    'NaN',
    '–'
  ]);
  assert.deepEqual([42, 725, 3661].map(format.clock), ['0:42', '12:05', '1:01:01']);
  assert.deepEqual([3.7, 200, 7300].map(format.age), ['3 s', '3 min', '2 h']);
  assert.deepEqual([812, 1.5e6].map(format.size), ['812 B', '1.5 MB']);
});

test('a checkpoint is overdue while the job runs, and failed until the next one is durable', () => {
  const at = (status, due) => checkpointTrouble(asSnapshot({ status, checkpoint_due: due }), 131);
  const due = { since: 100, limit_s: 30, failed: '' };
  assert.equal(at('running', due), 'overdue');
  assert.equal(at('running', { ...due, limit_s: 31 }), '');
  assert.equal(at('paused', due), '');
  assert.equal(at('running', { ...due, limit_s: null }), '');
  assert.equal(at('finished', { ...due, failed: 'step 3: disk full' }), 'failed');
  assert.equal(at('running', undefined), '');
});

test('a curve of a million points stays small and keeps its peak', () => {
  const curve = new Curve();
  const means = new Curve(true);
  for (let start = 0; start < 1e6; start += 1000) {
    const x = Float64Array.from({ length: 1000 }, (_, i) => start + i);
    const y = Float32Array.from(x, step => (step === 432100 ? 99 : step % 2));
    curve.append(x, y);
    means.append(x, y);
  }
  assert.ok(curve.x.length <= CAPACITY && means.x.length <= CAPACITY);
  assert.equal(curve.y.view()[curve.x.view().indexOf(432100)], 99);
  assert.equal(curve.at(Infinity), 1);
  for (const kept of [curve, means]) {
    const x = [...kept.x.view()];
    const gap = Math.max(...x.map((at, i) => (i ? at - x[i - 1] : 0)));
    assert.ok(gap < 1e6 / 1000, `a gap of ${gap / 1e6} of the width has no point`);
  }
  const middle = means.y.view()[100];
  assert.ok(middle > 0.4 && middle < 0.6, `the mean of noise from 0 to 1 is ${middle}`);
  assert.ok(means.x.view().every((x, i, all) => !i || x > all[i - 1]));
});

test('a smoothed line starts at its first point, keeps gaps and reaches a new level', () => {
  const x = Array.from({ length: 400 }, (_, i) => i);
  const y = x.map(i => (i === 50 ? null : i < 200 ? 5 : 1));
  const [, smoothed] = smooth([x, y], 0.9, 400);
  assert.equal(smoothed[0], 5);
  assert.equal(smoothed[50], null);
  assert.equal(Math.round(smoothed[199] * 1e6), 5e6);
  assert.ok(smoothed[201] > 1 && smoothed[399] < 1.01);
});

test('smoothing does not depend on how many points there are', () => {
  const line = count => {
    const x = Array.from({ length: count + 1 }, (_, i) => (10 * i) / count);
    return smooth([x, x.map(at => (at < 5 ? 0 : 1))], 0.99, 10)[1];
  };
  const [few, many] = [line(200), line(4000)];
  assert.ok(Math.abs(few[150] - many[3000]) < 0.02);
});

function dataOf(steps, elapsed, snapshot = {}) {
  const data = new JobData('me');
  data.load({
    snapshot: {
      status: 'running',
      step: steps[steps.length - 1],
      started_at: 100,
      updated_at: 100,
      ...snapshot
    },
    series: {
      elapsed_s: { x: steps.join(' '), y: elapsed.join(' ') },
      samples: { x: steps.join(' '), y: steps.map(step => step * 64).join(' ') }
    }
  });
  return data;
}

test('the time axis converts steps to times and back', () => {
  const axis = new Axis(dataOf([1, 2, 3, 4], [1, 2, 12, 13]));
  axis.use('time');
  assert.deepEqual(
    [1, 2, 3, 4].map(step => axis.ofStep(step)),
    [1, 2, 12, 13]
  );
  assert.deepEqual(
    [1, 7, 12.5].map(at => axis.stepAt(at)),
    [1, 2.5, 3.5]
  );
  assert.equal(axis.ofMarker({ step: 2, time: 109 }), 9);
  axis.use('samples');
  assert.equal(axis.ofStep(3), 192);
});

test('a zoom stays on its steps when the axis changes', () => {
  const axis = new Axis(dataOf([1, 2, 3, 4, 5], [1, 2, 12, 13, 14]));
  axis.zoom = [2, 4];
  axis.use('time');
  assert.deepEqual(axis.zoom, [2, 13]);
  axis.use('step');
  assert.deepEqual(axis.zoom, [2, 4]);
});

test('details of a zoomed range grow with new points and end with a rewind', () => {
  const data = new JobData('me');
  const blocks = rows => [{ name: 'loss', rows }];
  data.take(update(1, { reset: true, snapshot: { step: 100 }, blocks: blocks(2) }), [
    block([1, 100], [9, 1])
  ]);
  assert.equal(
    data.take({ kind: 'detail', seq: 2, to: 'me', first: 90, last: 200, blocks: blocks(3) }, [
      block([98, 99, 100], [3, 2, 1])
    ]),
    'detail'
  );
  assert.deepEqual([...data.curveIn('loss', 95, 150).x.view()], [98, 99, 100]);
  assert.deepEqual([...data.curveIn('loss', 1, 150).x.view()], [1, 100]);
  data.take(update(3, { blocks: blocks(1), snapshot: { step: 101 } }), [block([101], [0])]);
  assert.deepEqual([...data.curveIn('loss', 95, 150).x.view()], [98, 99, 100, 101]);
  data.take(update(4, { reset: true, snapshot: { step: 50 } }), []);
  assert.equal(data.hasDetail(95, 150), false);
});

test('details for another view are ignored, and the next message is not a gap', () => {
  const data = new JobData('me');
  data.take(update(1, { reset: true }), []);
  assert.equal(
    data.take({ kind: 'detail', seq: 2, to: 'other', first: 0, last: 9, blocks: [] }, []),
    'nothing'
  );
  assert.equal(data.take(update(3), []), 'update');
  assert.equal(data.hasDetail(0, 9), false);
});

test('means come from the kernel, or else from the points', () => {
  const data = new JobData('me');
  const both = [
    { name: 'loss', rows: 2 },
    { name: 'mean.loss', rows: 1 },
    { name: 'eval.loss', rows: 1 }
  ];
  data.take(update(1, { reset: true, blocks: both }), [
    block([1, 2], [0, 4]),
    block([1.5], [1]),
    block([2], [3])
  ]);
  data.take(update(2, { blocks: [{ name: 'loss', rows: 1 }] }), [block([3], [5])]);
  assert.deepEqual([...data.meansIn('loss', 0, 9).y.view()], [1, 5]);
  assert.equal(data.curves.get('mean.eval.loss'), undefined);
});

test('the ticks of a logarithmic scale are round, and few', () => {
  const labels = range => scale.logSplits(range).map(at => format.tick(10 ** at));
  assert.deepEqual(labels([-2, 0.4]), ['0.01', '0.03', '0.1', '0.3', '1']);
  assert.deepEqual(labels([-0.2, 0.2]).length > 2, true);
  assert.ok(labels([-12, 3]).length <= 6);
  assert.deepEqual(
    scale.logged([
      [1, 2, 3],
      [10, 0, -1]
    ])[1],
    [1, null, null]
  );
  assert.deepEqual(scale.logRange([]), [0, 1]);
});

test('the ticks of a linear scale are round, and whole for counts', () => {
  assert.deepEqual(scale.splits([0, 1], false), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(scale.splits([0, 1.1], true), [0, 1]);
  for (const range of [
    scale.range([1e308, -1e308], false),
    scale.range([5], false),
    scale.range([], true)
  ]) {
    assert.ok(scale.splits(range, false).length <= 20);
  }
});

test('means cover equal parts of the axis, and a gap has none', () => {
  const [x, y] = average(curveOf([1, 3, 5, 7, NaN, NaN, 2, 4]), -Infinity, Infinity, 4);
  assert.deepEqual(
    [x, y],
    [
      [0.5, 2.5, 4.5, 6.5],
      [2, 6, null, 3]
    ]
  );
  assert.deepEqual(average(curveOf([1, 3, 5]), 0.5, 1.5, 9), [
    [0, 1, 2],
    [1, 3, 5]
  ]);
});

test('a saved curve is parsed from text, without points whose x decreases', () => {
  const data = new JobData('me');
  data.load({
    series: { loss: { x: '1 2.5 2 7', y: '0.5 nan 3 1e-05' }, short: { x: '1 2', y: '1' } }
  });
  assert.deepEqual([...data.curves.get('loss').x.view()], [1, 2.5, 7]);
  const [first, gap, last] = data.curves.get('loss').y.view();
  assert.ok(first === 0.5 && Number.isNaN(gap) && Math.abs(last - 1e-5) < 1e-9);
  assert.equal(data.curves.get('short'), undefined);
});

test('chart preferences are stored', () => {
  const kept = new Map();
  const store = {
    getItem: key => kept.get(key) ?? null,
    setItem: (key, value) => kept.set(key, value)
  };
  assert.deepEqual(readChoices(store), { unit: null, weight: null, isLog: new Map() });
  const isLog = new Map(Array.from({ length: 300 }, (_, i) => [`chart ${i}`, i % 2 === 0]));
  keepChoices({ unit: 'time', weight: 0, isLog }, store);
  const again = readChoices(store);
  assert.deepEqual([again.unit, again.weight, again.isLog.size], ['time', 0, 100]);
  assert.deepEqual([again.isLog.get('chart 298'), again.isLog.get('chart 299')], [true, false]);
});

test('forbidden storage and invalid content give the defaults', () => {
  const refuse = () => {
    throw new Error('denied');
  };
  const stores = [null, { getItem: refuse, setItem: refuse }];
  for (const odd of [
    '',
    'null',
    '[]',
    '7',
    '"x"',
    '{',
    '{"unit":"__proto__","weight":"1e9","isLog":{"a":1}}',
    '{"weight":2,"isLog":[1,null,[3,true]]}'
  ]) {
    stores.push({ getItem: () => odd, setItem: refuse });
  }
  for (const store of stores) {
    assert.deepEqual(readChoices(store), { unit: null, weight: null, isLog: new Map() });
    keepChoices(readChoices(store), store);
  }
  keepChoices(readChoices()); // Node.js has no window
});

test('a page is longer than other texts, and anything but text is empty', () => {
  const long = 'x'.repeat(100_000);
  assert.equal(page(long).length, 100_000);
  assert.ok(text(long).length < 100_000);
  assert.equal(page({ html: long }), '');
});
