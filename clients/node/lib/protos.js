/**
 * The services' definitions, loaded from the .proto files, and google.rpc's error details.
 *
 * Fields have their names in camelCase. 64-bit integers are numbers: ids and counters of the protocol fit in 53 bits. Enums are
 * their names.
 */
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import { PROTOS, loadRoot } from './root.js';

const OPTIONS = { longs: Number, enums: String, bytes: Buffer, defaults: true, oneofs: false };

const loaded = grpc.loadPackageDefinition(
  protoLoader.loadSync(PROTOS.files, { ...OPTIONS, includeDirs: [PROTOS.folder] }),
);
const root = loadRoot();

export const CacheService = loaded.kvkeeper.cache.v1.CacheService;
export const EngineService = loaded.kvkeeper.engine.v1.EngineService;

/** @param {string} path of a method, as in '/kvkeeper.engine.v1.EngineService/Generate' */
export function requestTypeOf(path) {
  const [, service, method] = path.split('/');
  return root.lookupService(service).methods[method].resolvedRequestType;
}

const field = (id, type, more = {}) => ({ id, type, ...more });
const messages = {
  'google.rpc.Status': {
    code: field(1, 'int32'),
    message: field(2, 'string'),
    details: field(3, 'Detail', { rule: 'repeated' }),
  },
  // google.protobuf.Any; under its own name the loader would unpack it, and fail on what it does not know.
  'google.rpc.Detail': { typeUrl: field(1, 'string'), value: field(2, 'bytes') },
  'google.rpc.ErrorInfo': {
    reason: field(1, 'string'),
    domain: field(2, 'string'),
    metadata: field(3, 'string', { keyType: 'string' }),
  },
  'google.rpc.RetryInfo': { retryDelay: field(1, 'Duration') },
  'google.rpc.Duration': { seconds: field(1, 'int64'), nanos: field(2, 'int32') },
};
const nested = Object.fromEntries(
  Object.entries(messages).map(([name, fields]) => [name.split('.').at(-1), { fields }]),
);
const details = protoLoader.fromJSON(
  { nested: { google: { nested: { rpc: { nested } } } } },
  OPTIONS,
);

/** @param {string} name for example 'google.rpc.Status' @param {Buffer} bytes */
export function decodeDetail(name, bytes) {
  return details[name].deserialize(bytes);
}
