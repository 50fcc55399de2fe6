// The merged list of jobs behind the panel, the status bar and the palette.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { load } from './helpers.mjs';

const {
  attachLines,
  bestFollower,
  countsOf,
  idlePools,
  KernelJobs,
  merge,
  showLine,
  targetOf,
  whyNot
} = await load('jobs');
const { isTrialOf } = await load('studies');
const { JobData } = await load('job_data');
const { curvePath, statusOf } = await load('list');

const row = (job_id, more = {}) => ({
  snapshot: {
    job_id,
    name: job_id,
    status: 'running',
    step: 3,
    submitted_at: 1,
    controls: { stop: '' },
    ...more
  },
  loss: { x: [1, 2], y: [2, 1] }
});
const pool = (more = {}) => ({
  pool: 'local',
  cluster_id: 'c',
  workers: 2,
  idle_s: 300,
  ends_in_s: 600,
  time: 1000,
  ...more
});

function follower(name, ...rows) {
  const jobs = new KernelJobs();
  jobs.take({ whole: true, rows });
  return { name, jobs };
}

test('a message changes the rows it contains and no other', () => {
  const { jobs } = follower('n', row('a'), row('b'));
  jobs.take({ rows: [row('b', { step: 9 })], gone: ['a', 'x'] });
  assert.deepEqual([...jobs.rows.keys()], ['b']);
  assert.equal(jobs.rows.get('b').snapshot.step, 9);
});

test('a whole message replaces all rows', () => {
  const { jobs } = follower('n', row('a'));
  jobs.take({ whole: true, rows: [row('b')] });
  assert.deepEqual([...jobs.rows.keys()], ['b']);
});

test('a comparison goes through the kernel that is attached to most of the jobs', () => {
  const first = follower('first', row('a'));
  const second = follower('second', row('a'), row('b'));
  const { entries } = merge([first, second]);
  assert.equal(bestFollower(entries, [first, second]), second);
  assert.equal(bestFollower(entries.slice(0, 0), [first, second]), first);
  assert.equal(bestFollower(entries, []), null);
});

test('jobs of a dead kernel can be compared through any other kernel', () => {
  const dead = follower('dead', row('a'), row('b'));
  dead.jobs.lose();
  const alive = follower('alive');
  const { entries } = merge([dead, alive]);
  assert.equal(bestFollower(entries, [alive]), alive);
});

test('other jobs and pools stay until the next report', () => {
  const { jobs } = follower('n');
  jobs.take({ rows: [], others: [{ job_id: 'x' }], pools: [pool()] });
  jobs.take({ rows: [row('a')] });
  assert.equal(jobs.others.length, 1);
  jobs.take({ rows: [], others: [], pools: [] });
  assert.equal(jobs.others.length + jobs.pools.length, 0);
});

test('a job that two notebooks are attached to is listed once', () => {
  const [a, b] = [follower('a', row('x')), follower('b', row('x'), row('y', { submitted_at: 2 }))];
  const { entries } = merge([a, b]);
  assert.deepEqual(
    entries.map(entry => [entry.id, entry.followers.map(f => f.name)]),
    [
      ['y', ['b']],
      ['x', ['a', 'b']]
    ]
  );
});

test('the newest job comes first, and jobs of equal age are sorted by id', () => {
  const { entries } = merge([follower('n', row('b'), row('a'), row('new', { submitted_at: 5 }))]);
  assert.deepEqual(
    entries.map(entry => entry.id),
    ['new', 'a', 'b']
  );
});

test('jobs of a dead kernel are shown as last seen, until another kernel reports them', () => {
  const [old, other] = [
    follower('old', row('x'), row('done', { status: 'finished' })),
    follower('other')
  ];
  old.jobs.lose();
  const [done, x] = merge([old, other]).entries;
  assert.deepEqual(
    [statusOf(x), x.isGone, statusOf(done)],
    ['last seen running', true, 'finished']
  );
  assert.match(whyNot(x, 'stop'), /No kernel/);

  other.jobs.take({ rows: [row('x', { step: 8 })] });
  const again = merge([old, other]).entries.find(entry => entry.id === 'x');
  assert.deepEqual(
    [again.isGone, again.row.snapshot.step, again.followers.map(f => f.name)],
    [false, 8, ['other']]
  );
});

test('of two dead kernels, the newer report is shown', () => {
  const [a, b] = [
    follower('a', row('x', { updated_at: 5, step: 5 })),
    follower('b', row('x', { updated_at: 9, step: 9 }))
  ];
  a.jobs.lose();
  b.jobs.lose();
  assert.equal(merge([a, b]).entries[0].row.snapshot.step, 9);
});

test('a new kernel in the same notebook reports a lost job again', () => {
  const { jobs } = follower('n', row('x'));
  jobs.lose();
  jobs.take({ whole: true, rows: [row('x')] });
  assert.equal(jobs.lost.size, 0);
});

test('a job running elsewhere is offered once, unless its kernel has died: then its row can attach', () => {
  const [a, b] = [follower('a', row('x'), row('mine')), follower('b')];
  a.jobs.lose();
  for (const { jobs } of [a, b]) {
    jobs.take({ rows: [], others: [{ job_id: 'x' }, { job_id: 'y', name: 'y' }] });
  }
  const { entries, offers } = merge([a, b]);
  assert.equal(entries.find(entry => entry.id === 'x').isGone, true);
  assert.equal(attachLines('x'), '%load_ext etrain_jupyter\n%etrain attach x -o job');
  assert.throws(() => attachLines('x\n!id'), /No cell was inserted/);
  assert.deepEqual(
    offers.map(offer => [offer.other.job_id, offer.offers.length]),
    [['y', 2]]
  );
});

test('commands apply to the selected job if it is active, else to the only active one', () => {
  const rows = [row('a'), row('b', { status: 'finished' })];
  const { entries } = merge([follower('n', ...rows)]);
  assert.equal(targetOf(entries, '').id, 'a');
  assert.equal(targetOf(entries, 'b').id, 'a');
  const two = merge([follower('n', ...rows, row('c'))]).entries;
  assert.equal(targetOf(two, ''), null);
  assert.equal(targetOf(two, 'c').id, 'c');
  assert.equal(targetOf(two, 'b').id, 'b');
  assert.equal(targetOf([], 'b'), null);
});

test('a request is refused with the reason of the kernel, and so is one that it does not report', () => {
  const [entry] = merge([
    follower('n', row('a', { controls: { stop: '', pause: 'The job is paused.' } }))
  ]).entries;
  assert.equal(whyNot(entry, 'stop'), '');
  assert.equal(whyNot(entry, 'pause'), 'The job is paused.');
  assert.match(whyNot(entry, 'checkpoint'), /has not reported/);
  assert.match(whyNot(null, 'stop'), /Select a job/);
});

test('only workers of active jobs are counted', () => {
  const rows = [
    row('a', { world_size: 3 }),
    row('b', { world_size: 2 }),
    row('c', { status: 'finished', world_size: 4 })
  ];
  assert.deepEqual(countsOf(merge([follower('n', ...rows)]).entries), {
    jobs: 3,
    active: 2,
    workers: 5
  });
});

test('a pool without a job for a minute is idle, and listed once', () => {
  const [a, b] = [follower('a'), follower('b')];
  a.jobs.take({
    pools: [pool(), pool({ cluster_id: 'd', idle_s: 5 }), pool({ cluster_id: 'e', idle_s: 0 })]
  });
  b.jobs.take({ pools: [pool({ time: 1010, workers: 1 })] });
  assert.deepEqual(
    idlePools([a, b], []).map(p => [p.cluster_id, p.workers]),
    [['c', 1]]
  );
});

test('a pool is not idle if a job was submitted after its report', () => {
  const n = follower('n', row('a', { submitted_at: 1001 }));
  n.jobs.take({ pools: [pool()] });
  assert.deepEqual(idlePools([n], merge([n]).entries), []);
  const before = follower('n', row('a', { submitted_at: 900 }));
  before.jobs.take({ pools: [pool()] });
  assert.equal(idlePools([before], merge([before]).entries).length, 1);
});

test('hostile messages are harmless', () => {
  const { jobs } = follower('n');
  for (const message of [
    null,
    3,
    'x',
    [],
    { rows: 3, others: 'x', pools: {} },
    { rows: [null, 1, { snapshot: 4 }], gone: 7 }
  ]) {
    jobs.take(message);
  }
  jobs.take({
    rows: [
      { snapshot: { job_id: 'constructor', step: 1e300 }, loss: { y: ['x', null, 'NaN', 2] } }
    ],
    pools: [null]
  });
  const [taken, ...more] = merge([{ jobs }]).entries;
  assert.deepEqual([taken.id, more], ['constructor', []]);
  assert.deepEqual(taken.row.curve, [null, null, null, 2]);
  assert.ok(Number.isFinite(taken.row.snapshot.step));
});

// "Show in ..." runs a cell that contains the job ID.
const EVIL_IDS = [
  "x\nopen('PWNED','w')",
  'x\n',
  'x y',
  'x;y',
  '--help',
  '.x',
  '../x',
  '<b>',
  '__proto__',
  'x\u2028y',
  'x'.repeat(65),
  '',
  3,
  null,
  {}
];

test('only a valid job ID gets into a cell that is run', () => {
  assert.equal(showLine('my.digits_2-00c0ffee'), '%etrain show my.digits_2-00c0ffee');
  for (const id of EVIL_IDS) {
    assert.throws(() => showLine(id), /Invalid job ID/);
  }
});

test('a job with an invalid ID is neither listed nor offered', () => {
  const { jobs } = follower('n');
  jobs.take({
    rows: EVIL_IDS.map(id => row(id)),
    others: EVIL_IDS.map(id => ({ job_id: id, name: 'x' })),
    pools: []
  });
  assert.deepEqual(merge([{ jobs }]), { entries: [], offers: [], studies: [] });
});

test('a name is one line without control characters', () => {
  const { jobs } = follower(
    'n',
    row('a', { name: 'a\n%run evil\u202e\u001b[2J' + 'x'.repeat(1e6) })
  );
  const { name } = jobs.rows.get('a').snapshot;
  assert.equal(name.slice(0, 16), 'a %run evil [2Jx');
  assert.ok(name.length <= 200);
});

test('the view of a job with a dead kernel starts from its row', () => {
  const { jobs } = follower('n', { ...row('a'), loss: { x: [1, 2, 3], y: [2, null, 1] } });
  const data = new JobData('v');
  data.load(jobs.rows.get('a').saved);
  assert.equal(data.snapshot.step, 3);
  assert.deepEqual([...data.curves.get('loss').y.view()], [2, NaN, 1]);
});

test('a sparkline has its highest value at the top and gaps for null', () => {
  assert.equal(curvePath([2, 1], 10, 12), 'M0.0 1.0L10.0 11.0');
  assert.equal(curvePath([1, null, 1, 1], 30, 12), 'M0.0 11.0M20.0 11.0L30.0 11.0');
  assert.equal(curvePath([], 10, 12), '');
  assert.equal(curvePath([null], 10, 12), '');
});

const study = (study_id, more = {}) => ({
  study_id,
  name: study_id,
  status: 'running',
  num_trials: 4,
  num_begun: 1,
  created: 1,
  trials: [{ job_id: `${study_id}-000`, number: 0, state: 'running', value: 0.5 }],
  ...more
});

test('studies stay until the next report, the newest one first, each once', () => {
  const [a, b] = [follower('a'), follower('b')];
  a.jobs.take({ rows: [], studies: [study('old'), study('new', { created: 2 })] });
  b.jobs.take({ rows: [], studies: [study('old')] });
  a.jobs.take({ rows: [row('x')] });
  const { studies } = merge([a, b]);
  assert.deepEqual(
    studies.map(s => [s.study.study_id, s.followers.length, s.isGone]),
    [
      ['new', 1, false],
      ['old', 2, false]
    ]
  );
});

test('a study of a dead kernel stays, without a notebook to attach from', () => {
  const one = follower('one');
  one.jobs.take({ rows: [], studies: [study('net')] });
  one.jobs.lose();
  const [entry] = merge([one]).studies;
  assert.deepEqual([entry.isGone, entry.followers], [true, []]);
  one.jobs.take({ rows: [], studies: [study('net')] });
  assert.deepEqual([merge([one]).studies.length, one.jobs.lostStudies.size], [1, 0]);
  one.jobs.lose();
  one.jobs.forget();
  assert.equal(merge([one]).studies.length, 0);
});

test('studies and trials without a valid ID are left out', () => {
  const one = follower('one');
  const trials = [{ job_id: 'net-000', value: 'NaN' }, { job_id: 'a b' }, null];
  one.jobs.take({ rows: [], studies: [study('x y'), study('net', { trials, name: 3 }), 7] });
  const [entry, ...rest] = merge([one]).studies;
  assert.equal(rest.length, 0);
  assert.deepEqual(entry.study.trials, [
    { job_id: 'net-000', number: 0, state: '', value: null, params: '' }
  ]);
});

test('a trial is a job with the ID of its study and a number', () => {
  const { study: net } = merge([
    {
      jobs: {
        rows: new Map(),
        lost: new Map(),
        others: [],
        studies: new Map([['n', study('n')]]),
        lostStudies: new Map()
      }
    }
  ]).studies[0];
  assert.ok(isTrialOf(net, 'n-012'));
  assert.ok(!isTrialOf(net, 'n'));
  assert.ok(!isTrialOf(net, 'nn-012'));
});
