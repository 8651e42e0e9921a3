/** The protocol by reflection: what a message may hold. The .proto files are the package's own, or the checkout's. */
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import protobuf from 'protobufjs';

const FOLDERS = ['../protos', '../../../protos'].map((path) => fileURLToPath(new URL(path, import.meta.url)));
const FILES = ['kvkeeper/cache/v1/cache_service.proto', 'kvkeeper/engine/v1/engine_service.proto'];

export const PROTOS = { folder: FOLDERS.find((folder) => existsSync(`${folder}/${FILES[0]}`)) ?? FOLDERS[0], files: FILES };
export const PACKAGES = ['kvkeeper.cache.v1', 'kvkeeper.engine.v1'];

/** @returns {protobuf.Root} with the names of fields in camelCase */
export function loadRoot() {
  const root = new protobuf.Root();
  root.resolvePath = (_, target) => `${PROTOS.folder}/${target}`;
  return root.loadSync(FILES, { alternateCommentMode: true }).resolveAll();
}
