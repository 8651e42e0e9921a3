/**
 * Continue a prompt with an engine: a stream of tokens first, then three continuations at once.
 *
 *     node generate.js [ADDRESS]
 *
 * The address is that of an engine service, which `kvkeeper up` starts; the default is 127.0.0.1:7411.
 */
import { EngineClient } from 'kvkeeper';

const PROMPT = 'def fibonacci(n):  # the first n Fibonacci numbers, smallest first';

const client = new EngineClient(process.argv[2]);
try {
  // A stream. Leaving the loop cancels the request.
  for await (const chunk of client.generate(PROMPT, { sampling: { maxTokens: 16, temperature: 0 } })) {
    process.stdout.write(chunk.text);
  }
  console.log();

  // Three continuations: the prompt is computed once, then forked. This prompt is in the cache already.
  const texts = ['', '', ''];
  let usage;
  for await (const chunk of client.generate(PROMPT, { n: 3, sampling: { maxTokens: 16, temperature: 0.8, seed: 7 } })) {
    texts[chunk.index] += chunk.text;
    usage = chunk.usage ?? usage;
  }
  texts.forEach((text) => console.log(JSON.stringify(text)));
  console.log(`${usage.cachedTokens} of ${usage.promptTokens} prompt tokens came from the cache`);
} finally {
  client.close();
}
