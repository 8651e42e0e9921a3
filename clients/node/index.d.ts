/** Typings of the Node client. Those of the messages are made from the .proto files when the package is packed. */
import type { cache, engine } from './messages.js';

export type { cache, engine } from './messages.js';

/** What may be given of a message: any of its fields; undefined is absent. */
export type Given<T> = T extends Uint8Array
  ? Uint8Array
  : T extends (infer Item)[]
    ? readonly Given<Item>[] | ArrayLike<Given<Item>>
    : T extends object
      ? { [Key in keyof T]?: Given<T[Key]> }
      : T;

export interface ClientOptions {
  /** Most time of a call, repeats included; 10,000 by default. */
  timeoutMs?: number;
  /** For how long after its start a call is repeated while the service is unavailable; 3,000 by default. */
  retryMs?: number;
  /** Shown to the service with each call; goes before tokenFile. */
  token?: string;
  /** File with the token, read anew for each call; KVKEEPER_TOKEN_FILE by default. */
  tokenFile?: string;
  /** Authority of the service's certificate, a file in PEM, which switches TLS on; KVKEEPER_TLS_CA by default. */
  tlsCa?: string;
  /** Certificate that is shown to the service, a file in PEM; KVKEEPER_TLS_CERT by default. */
  tlsCert?: string;
  /** Key of tlsCert; KVKEEPER_TLS_KEY by default. */
  tlsKey?: string;
}

/** A call that failed. */
export class KvkeeperError extends Error {
  name: 'KvkeeperError';
  /** A value of grpc.status. */
  code: number;
  /** A name of the protocol's ErrorReason without its prefix; empty when the transport failed. */
  reason: string;
  /** What is needed to go on, for example expected_step_id or limit. */
  metadata: Record<string, string>;
  retryAfterMs: number | null;
}

/** A message as OpenAI's clients write it. */
export interface Message {
  role: 'system' | 'developer' | 'user' | 'assistant' | 'tool';
  /** Null or absent beside tool_calls alone. */
  content?: string | readonly { type: 'text'; text: string }[] | null;
  name?: string;
  tool_calls?: readonly { id?: string; type?: 'function'; function: { name: string; arguments?: string | object } }[];
  tool_call_id?: string;
}

/** A conversation with what the model's chat template is given beside it. */
export type Chat = Omit<Given<engine.Chat>, 'messages' | 'tools' | 'templateArguments'> & {
  messages: readonly Message[];
  tools?: readonly object[];
  templateArguments?: object;
};

export type Prompt = string | ArrayLike<number> | readonly Message[] | Chat;

export type Sampling = Omit<Given<engine.SamplingParams>, 'choices' | 'seed' | 'badWordsTokenIds'> & {
  /** The output is one of these. */
  choices?: readonly string[];
  /** Token lists that must not come in the output. */
  badWordsTokenIds?: readonly ArrayLike<number>[];
  seed?: number | bigint;
};

export type GenerateOptions = Omit<Given<engine.GenerateRequest>, 'text' | 'tokenIds' | 'chat' | 'sampling'> & {
  sampling?: Sampling;
};

export type FinishReason =
  | 'length'
  | 'stop'
  | 'end_of_sequence'
  | 'cancelled'
  | 'error'
  | 'timed_out'
  | 'stalled'
  | (string & {});
export type RequestState = 'pending' | 'running' | 'preempted' | 'completed' | 'failed' | 'cancelled';

type Told<T> = Omit<T, 'finishReason' | 'cumulativeLogprob'> & {
  /** Null until the continuation ends. */
  finishReason: FinishReason | null;
  /** Null but at the end of a continuation of bestOf or beamSearch. */
  cumulativeLogprob: number | null;
};

/** A chunk of one continuation. The last one of the request has its usage. */
export type OutputChunk = Told<engine.GenerateResponse>;
export type RequestInfo = Omit<engine.RequestInfo, 'state'> & { state: RequestState };

export interface Result {
  request: RequestInfo;
  state: RequestState;
  outputs: Told<engine.RequestOutput>[];
  usage: engine.Usage | null;
  error: engine.RequestError | null;
}

/** One channel to an engine service; host:port or unix:/path. */
export class EngineClient {
  constructor(address?: string, options?: ClientOptions);
  /** Continues a prompt; leaving the loop cancels it. Throws TypeError for what no request can hold. */
  generate(prompt: Prompt, options?: GenerateOptions): AsyncGenerator<OutputChunk, void, undefined>;
  /** Continues a conversation, by the model's chat template. */
  chat(messages: readonly Message[], options?: GenerateOptions): AsyncGenerator<OutputChunk, void, undefined>;
  /** Has a prompt continued without staying connected; the id to ask for its results by. */
  submit(prompt: Prompt, options?: GenerateOptions): Promise<string>;
  /** The output of a submitted request from its beginning, as it comes; goes on behind a broken connection. */
  follow(requestId: string, options?: { reconnectMs?: number }): AsyncGenerator<OutputChunk, void, undefined>;
  /** What a submitted request has given: now, or when it has ended, or after waitMs. */
  result(requestId: string, options?: { waitMs?: number }): Promise<Result>;
  cancel(requestId: string): Promise<void>;
  listRequests(options?: { sessionId?: string }): Promise<RequestInfo[]>;
  tokenize(text: string): Promise<number[]>;
  /** keepSpecialTokens: tell also what tokenize puts around a text. */
  detokenize(tokenIds: ArrayLike<number>, options?: { keepSpecialTokens?: boolean }): Promise<string>;
  model(): Promise<engine.GetModelResponse>;
  stats(): Promise<engine.GetStatsResponse>;
  iterationPlan(): Promise<engine.GetIterationPlanResponse>;
  close(): void;
}

/** One channel to a cache service; host:port or unix:/path. */
export class CacheClient {
  constructor(address?: string, options?: ClientOptions);
  openSession(
    spec: Given<cache.KvSpec>,
    options?: { ttlMs?: number; clientName?: string; executor?: cache.Executor },
  ): Promise<CacheSession>;
  capabilities(): Promise<cache.GetCapabilitiesResponse>;
  stats(): Promise<cache.GetStatsResponse>;
  checkInvariants(): Promise<cache.CheckInvariantsResponse>;
  close(): void;
}

export interface KvChunk {
  layerIdx: number;
  firstTokenIdx: number;
  key: Uint8Array;
  value: Uint8Array;
}

/** Columns of a Step by their names in the protocol, in camelCase. */
export type StepItems = { [column: string]: ArrayLike<number> };
/** The answer of a Step: a column is an array of numbers. */
export type StepResult = { stepId: number } & { [column: string]: unknown };

/** For whom a prompt is, with which adapter (64 hex digits) and which salt. */
type Scope = { tenant?: string; adapter?: string; cacheSalt?: string };
type Request<T> = Omit<Given<T>, 'sessionId' | 'epoch'>;

/** A lease on a pool. Every call renews it; renew() does in between. */
export class CacheSession {
  private constructor();
  readonly sessionId: string;
  readonly epoch: number;
  readonly pool: cache.PoolInfo;
  /** The last step answered. */
  readonly stepId: number;
  renew(): Promise<cache.RenewSessionResponse>;
  close(): Promise<cache.CloseSessionResponse>;
  createSequence(
    sequenceId: number,
    tokenIds: ArrayLike<number>,
    options?: {
      maxTokens?: number;
      tenant?: string;
      adapter?: string;
      cacheSalt?: string;
      priority?: number;
      retention?: Given<cache.Retention>;
      startNumber?: number;
      reuseHint?: cache.ReuseHint;
      retainMs?: number;
    },
  ): Promise<number>;
  createSequences(sequences: Given<cache.NewSequence>[]): Promise<Array<cache.CreateSequenceResponse | KvkeeperError>>;
  extend(sequenceId: number, numTokens: number, options?: { skipLookUp?: boolean }): Promise<cache.SequenceInfo>;
  commit(
    sequenceId: number,
    numTokens: number,
    firstTokenIdx?: number,
    tokenIds?: ArrayLike<number>,
  ): Promise<cache.SequenceInfo>;
  fork(parentId: number, childId: number, numTokens?: number): Promise<cache.SequenceInfo>;
  truncate(sequenceId: number, numTokens: number): Promise<cache.SequenceInfo>;
  release(sequenceId: number): Promise<number>;
  update(
    sequenceId: number,
    changes: { priority?: number; retention?: Given<cache.Retention>; reuseHint?: cache.ReuseHint },
  ): Promise<cache.SequenceInfo>;
  swapOut(sequenceId: number): Promise<cache.SequenceInfo>;
  swapIn(sequenceId: number): Promise<cache.SequenceInfo>;
  /** What another session of the pool shows to take the running sequence. */
  handOff(sequenceId: number): Promise<Uint8Array>;
  take(offer: Uint8Array, sequenceId: number): Promise<cache.SequenceInfo>;
  withdraw(sequenceId: number): Promise<void>;
  get(sequenceId: number, options?: { includeTokens?: boolean }): Promise<cache.SequenceInfo>;
  list(): Promise<cache.SequenceInfo[]>;
  writeKv(sequenceId: number, chunks: readonly KvChunk[]): Promise<cache.WriteKvResponse>;
  readKv(
    sequenceId: number,
    options?: { firstTokenIdx?: number; numTokens?: number; layers?: ArrayLike<number> },
  ): Promise<(KvChunk & { numTokens: number; numKvHeads: number; headDim: number })[]>;
  step(items: StepItems, completedStepId?: number): Promise<StepResult>;
  streamSteps(): { step(items: StepItems, completedStepId?: number): Promise<StepResult>; end(): void };
  matchPrefix(tokenIds: ArrayLike<number>, options?: Scope): Promise<cache.MatchPrefixResponse>;
  explainMatch(tokenIds: ArrayLike<number>, options?: Scope): Promise<cache.ExplainMatchResponse>;
  pinPrefix(tokenIds: ArrayLike<number>, ttlMs: number, options?: Scope): Promise<cache.PinPrefixResponse>;
  unpinPrefix(pinId: string): Promise<void>;
  hintPrefixes(hints: readonly cache.PrefixHint[]): Promise<number[]>;
  watchEvents(options?: {
    tenant?: string;
    adapter?: string;
    cacheSalt?: string;
    timeoutMs?: number;
    includeTokenIds?: boolean;
  }): AsyncGenerator<cache.WatchEventsResponse, void, undefined>;
  checkAdmission(options?: Request<cache.CheckAdmissionRequest>): Promise<cache.CheckAdmissionResponse>;
  getBlock(blockId: number): Promise<cache.GetBlockResponse>;
  selectVictims(options?: Request<cache.SelectVictimsRequest>): Promise<cache.SelectVictimsResponse>;
  clearPrefixCache(): Promise<cache.ClearPrefixCacheResponse>;
  evictBlocks(options?: Request<cache.EvictBlocksRequest>): Promise<cache.EvictBlocksResponse>;
  collectGarbage(): Promise<cache.CollectGarbageResponse>;
  storeLogits(sequenceId: number, numTokens: number, logits: Float32Array): Promise<void>;
  readLogits(sequenceId: number): Promise<Float32Array>;
}
