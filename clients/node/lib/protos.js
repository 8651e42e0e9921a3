/**
 * The services' definitions, loaded from the .proto files of this repository, and google.rpc's error details.
 *
 * 64-bit integers are numbers: ids and counters of the protocol fit in 53 bits. Enums are their names.
 */
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const FOLDER = fileURLToPath(new URL('../../../protos', import.meta.url));
const OPTIONS = { keepCase: true, longs: Number, enums: String, bytes: Buffer, defaults: true, oneofs: true };

const loaded = grpc.loadPackageDefinition(
  protoLoader.loadSync(
    ['kvkeeper/cache/v1/cache_service.proto', 'kvkeeper/engine/v1/engine_service.proto'],
    { ...OPTIONS, includeDirs: [FOLDER] },
  ),
);

export const CacheService = loaded.kvkeeper.cache.v1.CacheService;
export const EngineService = loaded.kvkeeper.engine.v1.EngineService;

const field = (id, type, more = {}) => ({ id, type, ...more });
const messages = {
  'google.rpc.Status': {
    code: field(1, 'int32'),
    message: field(2, 'string'),
    details: field(3, 'Detail', { rule: 'repeated' }),
  },
  // google.protobuf.Any; under its own name the loader would unpack it, and fail on what it does not know.
  'google.rpc.Detail': { type_url: field(1, 'string'), value: field(2, 'bytes') },
  'google.rpc.ErrorInfo': {
    reason: field(1, 'string'),
    domain: field(2, 'string'),
    metadata: field(3, 'string', { keyType: 'string' }),
  },
  'google.rpc.RetryInfo': { retry_delay: field(1, 'Duration') },
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
