/** The engine service: text in, text out. */
import { randomUUID } from 'node:crypto';
import { setTimeout as pause } from 'node:timers/promises';
import { checkedOptions, kindOf } from './checked.js';
import { Received } from './received.js';
import { Transport, LONGEST_TIMEOUT_MS, UNAVAILABLE } from './transport.js';
import { EngineService } from './protos.js';

const SLACK_MS = 5_000; // the service's own deadline, with its reason, comes first
const LONGEST_WAIT_MS = 60_000; // the service's
const PAUSE_MS = 100; // before a broken stream is asked for again
const MOVED = 'REQUEST_MOVED';
const WHAT = 'a prompt is text, an array of token ids, an array of messages {role, content}, or a chat {messages, tools, ...}';
const KEYS = ['role', 'content', 'name', 'tool_calls', 'tool_call_id'];

/** One channel to an engine service. */
export class EngineClient {
  #transport;
  #others = new Map(); // by address, to engines that took over from the first
  #moved = new Map(); // by id of a submitted request, the address of the engine that took it over
  #options;

  /**
   * @param {string} address host:port or unix:/path
   * @param {{timeoutMs?: number, retryMs?: number}} [options]
   */
  constructor(address = '127.0.0.1:7411', options = {}) {
    this.#transport = new Transport(EngineService, address, options);
    this.#options = options;
  }

  /**
   * Continues a prompt. Yields chunks {requestId, index, text, tokenIds, finishReason, usage, ...}; the last one has usage.
   * Leaving the loop cancels the request.
   * @param {string | ArrayLike<number> | object[] | object} prompt text, token ids, or a conversation: its messages, or a chat
   * @param {object} [options] fields of GenerateRequest but the prompt: n, sampling, timeoutMs, ...
   */
  generate(prompt, options = {}) {
    const request = this.#transport.checked('Generate', requestOf(prompt, options));
    const timeoutMs = request.timeoutMs === undefined ? LONGEST_TIMEOUT_MS : request.timeoutMs + SLACK_MS;
    return this.#output(this.#transport.stream('Generate', request, timeoutMs), new Received(), timeoutMs, 0);
  }

  /**
   * The output of a submitted request from its beginning, as it comes. Where the connection breaks, it goes on from there.
   * @param {string} requestId
   * @param {{reconnectMs?: number}} [options] for how long the engine may be away
   */
  follow(requestId, options = {}) {
    const { reconnectMs } = checkedOptions(options, { reconnectMs: 10_000 });
    const received = new Received(requestId);
    return this.#output(this.#rest(received, LONGEST_TIMEOUT_MS), received, LONGEST_TIMEOUT_MS, reconnectMs);
  }

  /** Continues a conversation of {role, content}; content is text, or an array of {type: 'text', text}. */
  chat(messages, options = {}) {
    if (!Array.isArray(messages)) throw new TypeError(`messages: an array, not ${kindOf(messages)}`);
    if (!messages.length) throw new TypeError('messages: one message or more');
    if (typeof messages[0] !== 'object') throw new TypeError(`messages[0]: an object, not ${kindOf(messages[0])}`);
    return this.generate(messages, options);
  }

  /**
   * Has a prompt continued without staying connected.
   * @returns {Promise<string>} the id to ask for its results by; safe to repeat with one requestId
   */
  async submit(prompt, options = {}) {
    const request = requestOf(prompt, options);
    request.requestId ||= randomUUID();
    return (await this.#transport.call('SubmitRequest', { request })).requestId;
  }

  /**
   * The results of a submitted request: now, or when it has ended, or after waitMs.
   * @returns {Promise<object>} {request, state, outputs, usage, error}; usage and error are null until they are known
   */
  async result(requestId, options = {}) {
    const { waitMs } = checkedOptions(options, { waitMs: 0 });
    const deadline = Date.now() + waitMs;
    const longest = Math.min(LONGEST_WAIT_MS, Math.trunc(this.#transport.timeoutMs / 2));
    for (;;) {
      const wait = Math.trunc(Math.max(0, Math.min(deadline - Date.now(), longest)));
      const { request, outputs, usage, error } = await this.#requestOf(requestId, wait);
      const state = plainName(request.state, 'REQUEST_STATE_');
      if (['completed', 'failed', 'cancelled'].includes(state) || Date.now() >= deadline) {
        return { request: { ...request, state }, state, outputs: outputs.map(chunkOf), usage, error };
      }
    }
  }

  /** Ends a request that waits or runs. */
  async cancel(requestId) {
    await this.#transport.call('CancelRequest', { requestId });
  }

  /** Requests that wait or run, in order of arrival. @param {{sessionId?: string}} [options] of one conversation only */
  async listRequests(options = {}) {
    const rows = await this.#transport.list('ListRequests', checkedOptions(options, { sessionId: '' }), 'requests');
    return rows.map((row) => ({ ...row, state: plainName(row.state, 'REQUEST_STATE_') }));
  }

  async tokenize(text) {
    return (await this.#transport.call('Tokenize', { text })).tokenIds;
  }

  /** The text of these tokens. @param {{keepSpecialTokens?: boolean}} [options] include what tokenize puts around a text */
  async detokenize(tokenIds, options = {}) {
    const { keepSpecialTokens } = checkedOptions(options, { keepSpecialTokens: false });
    return (await this.#transport.call('Detokenize', { tokenIds, keepSpecialTokens })).text;
  }

  model() {
    return this.#transport.call('GetModel', {});
  }

  stats() {
    return this.#transport.call('GetStats', {});
  }

  /** What the last iteration computed; its `plan` is readable. */
  iterationPlan() {
    return this.#transport.call('GetIterationPlan', {});
  }

  close() {
    for (const transport of [this.#transport, ...this.#others.values()]) transport.close();
  }

  /** The chunks of a request; its stream goes on in the engine that took it over, and behind a broken connection. */
  async *#output(stream, received, timeoutMs, reconnectMs) {
    let giveUpAt = 0;
    for (;;) {
      try {
        for await (const answer of stream) {
          received.add(answer);
          giveUpAt = 0;
          yield chunkOf(answer);
        }
        return;
      } catch (error) {
        if (error.reason === MOVED) {
          received.move(error.metadata);
        } else {
          giveUpAt ||= Date.now() + reconnectMs;
          if (error.code !== UNAVAILABLE || Date.now() + PAUSE_MS > giveUpAt) throw error;
          await pause(PAUSE_MS);
        }
        stream = this.#rest(received, timeoutMs);
      }
    }
  }

  #rest(received, timeoutMs) {
    const transport = this.#to(received.address);
    return transport.stream('StreamRequest', transport.checked('StreamRequest', received.rest()), timeoutMs);
  }

  /** The channel to an engine that took over; empty: the client's own. */
  #to(address) {
    if (!address) return this.#transport;
    if (!this.#others.has(address)) this.#others.set(address, new Transport(EngineService, address, this.#options));
    return this.#others.get(address);
  }

  async #requestOf(requestId, waitMs) {
    for (;;) {
      try {
        return await this.#to(this.#moved.get(requestId)).call('GetRequest', { requestId, waitMs });
      } catch (error) {
        if (error.reason !== MOVED) throw error;
        this.#moved.set(requestId, error.metadata.address);
      }
    }
  }
}

function requestOf(prompt, options) {
  if (typeof options !== 'object' || options === null) throw new TypeError(`options: an object, not ${kindOf(options)}`);
  const twice = ['text', 'tokenIds', 'chat'].find((key) => key in options);
  if (twice) throw new TypeError(`${twice}: the prompt is the first argument`);
  const { sampling } = options;
  const request = { ...options, ...promptOf(prompt) };
  if (Array.isArray(sampling?.choices)) request.sampling = { ...sampling, choices: { texts: sampling.choices } };
  if (Array.isArray(sampling?.badWordsTokenIds)) {
    request.sampling = { ...request.sampling, badWordsTokenIds: sampling.badWordsTokenIds.map((ids) => ({ ids })) };
  }
  return request;
}

function promptOf(prompt) {
  if (typeof prompt === 'string') return { text: prompt };
  if (Array.isArray(prompt?.messages)) return { chat: chatOf(prompt) };
  if (!Array.isArray(prompt) && !ArrayBuffer.isView(prompt)) throw new TypeError(`${WHAT}, not ${kindOf(prompt)}`);
  if (typeof prompt[0] === 'object') return { chat: { messages: prompt.map(turnOf) } };
  const odd = Array.from(prompt).find((id) => typeof id !== 'number');
  if (odd !== undefined) throw new TypeError(`${WHAT}; this array has ${kindOf(odd)} in it`);
  return { tokenIds: { ids: prompt } };
}

function turnOf(message, index) {
  const place = `messages[${index}]`;
  if (typeof message !== 'object' || message === null) {
    throw new TypeError(`${place}: an object with role and content, not ${kindOf(message)}`);
  }
  const unknown = Object.keys(message).find((key) => !KEYS.includes(key));
  if (unknown !== undefined) throw new TypeError(`${place}: a message has ${KEYS.join(', ')}, and no ${unknown}`);
  const { role, content, name, tool_call_id: toolCallId, tool_calls: calls } = message;
  if (typeof role !== 'string') throw new TypeError(`${place}.role: a string, not ${kindOf(role)}`);
  if (!calls?.length) return { role, content: contentOf(content, `${place}.content`), name, toolCallId };
  const toolCalls = calls.map((call, at) => callOf(call, `${place}.tool_calls[${at}]`));
  return { role, content: content == null ? undefined : contentOf(content, `${place}.content`), name, toolCallId, toolCalls };
}

function callOf(call, place) {
  const { type = 'function', id, function: called } = call ?? {};
  if (type !== 'function' || typeof called !== 'object' || called === null) {
    throw new TypeError(`${place}: only calls {type: 'function', function: {name, arguments}} are taken`);
  }
  return { id, name: called.name, arguments: jsonOf(called.arguments) };
}

/** A chat of the protocol; what is JSON there may be given as what it stands for. */
function chatOf({ messages, tools, templateArguments, ...others }) {
  return { ...others, messages: messages.map(turnOf), tools: jsonOf(tools), templateArguments: jsonOf(templateArguments) };
}

const jsonOf = (value) => (typeof value === 'object' && value !== null ? JSON.stringify(value) : value);

function contentOf(content, place) {
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) throw new TypeError(`${place}: a string or an array of text parts, not ${kindOf(content)}`);
  return content.map((part, index) => {
    if (part?.type !== 'text' || typeof part.text !== 'string') {
      throw new TypeError(`${place}[${index}]: only parts {type: 'text', text: string} are taken`);
    }
    return part.text;
  }).join('');
}

/** finishReason is null until it ends; usage and cumulativeLogprob are null where they are not reported. */
function chunkOf(message) {
  const finishReason = plainName(message.finishReason, 'FINISH_REASON_');
  return {
    ...message,
    finishReason: finishReason === 'unspecified' ? null : finishReason,
    cumulativeLogprob: message.cumulativeLogprob ?? null,
  };
}

/** A name of an enum without its prefix, in lower case. */
const plainName = (name, prefix) => name.slice(prefix.length).toLowerCase();
