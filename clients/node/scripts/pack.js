/**
 * What `npm pack` needs beside the sources: the .proto files, which lie outside of this folder in a checkout, and typings of
 * every message, made from them with their comments. `add` makes both, `remove` takes them away again: in a checkout there is
 * one copy of the protocol alone. In a fresh clone `add` installs the dependencies first, because it reads the protocol with them.
 */
import { execFileSync } from 'node:child_process';
import { cpSync, existsSync, rmSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const PROTOS = here('../protos');
const TYPINGS = here('../messages.d.ts');
const NUMBERS = /^(u?int|s?fixed|sint)(32|64)$|^float$|^double$/;

if (process.argv[2] === 'add') {
  if (!existsSync(here('../node_modules/protobufjs'))) {
    execFileSync('npm', ['ci', '--no-audit', '--no-fund'], { cwd: here('..'), stdio: ['ignore', 'ignore', 'inherit'] });
  }
  rmSync(PROTOS, { recursive: true, force: true });
  cpSync(here('../../../protos/kvkeeper'), `${PROTOS}/kvkeeper`, {
    recursive: true,
    filter: (path) => !/_pb2|__pycache__/.test(path),
  });
  writeFileSync(TYPINGS, typings(await import('../lib/root.js')));
} else if (process.argv[2] === 'remove') {
  rmSync(PROTOS, { recursive: true, force: true });
  rmSync(TYPINGS, { force: true });
} else {
  throw new Error('usage: node scripts/pack.js add|remove');
}

function typings({ PACKAGES, loadRoot }) {
  const root = loadRoot();
  const spaces = PACKAGES.map((name) => {
    const members = root.lookup(name).nestedArray.map((member) => (
      member.fields ? messageTyping(member) : member.values ? enumTyping(member) : ''
    ));
    return `export namespace ${name.split('.')[1]} {\n${members.filter(Boolean).join('\n')}}\n`;
  });
  return `/** Messages of the protocol, made from the .proto files. 64-bit integers are numbers, enums their names. */\n${spaces.join('\n')}`;
}

function enumTyping(type) {
  return `${comment(type, '  ')}  type ${type.name} = ${Object.keys(type.values).map((name) => `'${name}'`).join(' | ')};\n`;
}

function messageTyping(type) {
  const fields = type.fieldsArray.map((field) => `${comment(field, '    ')}    ${field.name}${isOptional(field) ? '?' : ''}: ${typeOf(field)};\n`);
  return `${comment(type, '  ')}  interface ${type.name} {\n${fields.join('')}  }\n`;
}

/** Members of a oneof, `optional` fields too: absent where they are not set. */
function isOptional(field) {
  return field.partOf !== null && field.partOf !== undefined;
}

function typeOf(field) {
  const one = singleTypeOf(field);
  if (field.map) return `Record<string, ${one}>`;
  if (field.repeated) return `${one}[]`;
  return field.resolvedType?.fields && !isOptional(field) ? `${one} | null` : one;
}

function singleTypeOf(field) {
  if (field.resolvedType) return field.resolvedType.name;
  if (NUMBERS.test(field.type)) return 'number';
  return { bool: 'boolean', string: 'string', bytes: 'Uint8Array' }[field.type];
}

function comment(item, indent) {
  return item.comment ? `${indent}/** ${item.comment.replaceAll('*/', '* /').replaceAll('\n', ' ')} */\n` : '';
}
