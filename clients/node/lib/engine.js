/** The engine service: text in, text out. */
import { Door } from './door.js';
import { EngineService } from './protos.js';

const DEFAULT_TIMEOUT_MS = 60_000; // the service's
const SLACK_MS = 5_000; // the service's own deadline, with its reason, comes first

/** One channel to an engine service. */
export class EngineClient {
  #door;

  /**
   * @param {string} address host:port or unix:/path
   * @param {{timeoutMs?: number, retryMs?: number}} [options]
   */
  constructor(address = '127.0.0.1:7411', options = {}) {
    this.#door = new Door(EngineService, address, options);
  }

  /**
   * Continues a prompt. Yields pieces {request_id, index, text, token_ids, finish_reason}; the last one has `usage`.
   * Leaving the loop cancels the request.
   * @param {string} text
   * @param {{n?: number, timeoutMs?: number, sampling?: object, retention?: object, sessionId?: string, metadata?: object}}
   *   [options] sampling: fields of SamplingParams; retention: {num_sink_tokens, num_window_tokens}
   */
  generate(text, { n, timeoutMs, sampling = {}, retention, sessionId, metadata } = {}) {
    const request = { text, n, timeout_ms: timeoutMs, sampling, retention, session_id: sessionId, metadata };
    return this.#door.stream('Generate', request, (timeoutMs ?? DEFAULT_TIMEOUT_MS) + SLACK_MS);
  }

  async tokenize(text) {
    return (await this.#door.call('Tokenize', { text })).token_ids;
  }

  model() {
    return this.#door.call('GetModel', {});
  }

  stats() {
    return this.#door.call('GetStats', {});
  }

  close() {
    this.#door.close();
  }
}
