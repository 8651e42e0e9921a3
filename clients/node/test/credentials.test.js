/** Credentials of a client: over TLS with a token. KVKEEPER_CACHE_LISTEN names a service that asks for both. */
import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { test } from 'node:test';
import { CacheClient, KvkeeperError } from '../index.js';

const { KVKEEPER_CACHE_LISTEN: address, TEST_CA: tlsCa, TEST_TOKEN_FILE: tokenFile, TEST_OTHER_FILE: otherFile } = process.env;
const refusedWith = (reason) => (error) => error instanceof KvkeeperError && error.reason === reason;

async function asked(options) {
  const client = new CacheClient(address, { retryMs: 0, ...options });
  try {
    return await client.stats();
  } finally {
    client.close();
  }
}

test('a token over TLS is let in', async () => {
  assert.equal(Number((await asked({ tlsCa, tokenFile })).numOpenedSessions), 0);
});

test('the environment names what is not given', async () => {
  process.env.KVKEEPER_TLS_CA = tlsCa;
  process.env.KVKEEPER_TOKEN_FILE = tokenFile;
  try {
    await asked({});
  } finally {
    delete process.env.KVKEEPER_TLS_CA;
    delete process.env.KVKEEPER_TOKEN_FILE;
  }
});

test('no token, a wrong one and one of another role are refused', async () => {
  await assert.rejects(asked({ tlsCa }), refusedWith('NO_CREDENTIAL'));
  await assert.rejects(asked({ tlsCa, token: 'kvk_no' }), refusedWith('WRONG_CREDENTIAL'));
  await assert.rejects(asked({ tlsCa, tokenFile: otherFile }), refusedWith('ROLE_NOT_ALLOWED'));
});

test('without TLS there is no answer', async () => {
  await assert.rejects(asked({ tokenFile }), { code: 14 });
});

test('what cannot be sent safely is refused before', async () => {
  const refused = refusedWith('CREDENTIALS');
  assert.throws(() => new CacheClient('10.0.0.1:7410', { token: 'kvk_x' }), refused);
  assert.throws(() => new CacheClient('example.net:7410', { tokenFile }), refused);
  assert.throws(() => new CacheClient(address, { tlsCert: 'a', tlsKey: 'b' }), refused);
  assert.throws(() => new CacheClient(address, { tlsCa: '/none' }), refused);
  assert.throws(() => new CacheClient(address, { tlsCa, tlsCert: tlsCa }), refused);
  await assert.rejects(asked({ tlsCa, tokenFile: '/none' }), refused);
});

test('a file of a token that changes is read again', async () => {
  const client = new CacheClient(address, { tlsCa, tokenFile: `${otherFile}.new`, retryMs: 0 });
  writeFileSync(`${otherFile}.new`, 'kvk_no\n');
  await assert.rejects(client.stats(), refusedWith('WRONG_CREDENTIAL'));
  writeFileSync(`${otherFile}.new`, `${process.env.TEST_TOKEN}\n`);
  await client.stats();
  client.close();
});
