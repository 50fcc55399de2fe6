// Bundle and load one module of the sources.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after } from 'node:test';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const folder = mkdtempSync(join(tmpdir(), 'etrain-'));
after(() => rmSync(folder, { recursive: true }));

export async function load(name) {
  const outfile = join(folder, `${name}.mjs`);
  const source = fileURLToPath(new URL(`../src/${name}.ts`, import.meta.url));
  await build({ entryPoints: [source], bundle: true, format: 'esm', outfile, logLevel: 'error' });
  return import(outfile);
}
