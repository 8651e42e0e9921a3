/** Compiles against the installed package, and only with each error that is expected here. */
import { CacheClient, EngineClient, KvkeeperError, type Message, type OutputChunk } from 'kvkeeper';

declare function show(...what: unknown[]): void;

const client = new EngineClient('127.0.0.1:7411', { timeoutMs: 5000 });
const messages: Message[] = [
  { role: 'system', content: 'Be brief.' },
  { role: 'user', content: [{ type: 'text', text: 'hello' }] },
];

export async function used(): Promise<void> {
  const options = { n: 2, sampling: { maxTokens: 8, temperature: 0, stop: ['\n'], seed: 7n } };
  for await (const chunk of client.generate('x', options)) take(chunk);
  for await (const chunk of client.generate(Int32Array.of(1, 2), { timeoutMs: 100 })) take(chunk);
  for await (const chunk of client.chat(messages, { sampling: { choices: ['yes', 'no'] } })) take(chunk);
  const id: string = await client.submit([1, 2, 3]);
  const result = await client.result(id, { waitMs: 1000 });
  if (result.state === 'failed') show(result.error?.reason);
  await client.cancel(id);
  // @ts-expect-error no such option
  client.generate('x', { max_tokens: 8 });
  // @ts-expect-error no such field
  client.generate('x', { sampling: { max_tokens: 8 } });
  // @ts-expect-error a wrong type
  client.generate('x', { sampling: { maxTokens: '8' } });
  // @ts-expect-error no prompt
  client.generate(7);

  const session = await new CacheClient().openSession({ modelId: 'm', kvDtype: 'KV_DTYPE_FLOAT32' });
  const sequence = await session.extend(1, 4, { skipLookUp: true });
  const table: number[] = sequence.blockTable;
  show(table, session.pool.numBlocks, new Error() instanceof KvkeeperError);
  // @ts-expect-error no such name
  await session.selectVictims({ policy: 'OLDEST' });
}

function take(chunk: OutputChunk): void {
  const newTokens: number | undefined = chunk.usage?.newTokens;
  show(chunk.text, chunk.finishReason, newTokens);
}
