/**
 * Checks requests and options: an unknown key or a value of a wrong type is a TypeError that names the place. The protobuf
 * library would silently drop the one and convert the other.
 */

const SIGNED = /^(int|sint|sfixed)(32|64)$/;
const UNSIGNED = /^(uint|fixed)(32|64)$/;

/**
 * The message as it may be sent; undefined and null values are absent.
 * @param {import('protobufjs').Type} type
 * @param {object} value
 * @param {string} [place] where it is in the whole request
 */
export function checkedMessage(type, value, place = '') {
  if (!isPlain(value)) throw new TypeError(`${place || type.name}: an object, not ${kindOf(value)}`);
  const given = Object.entries(value).filter(([, item]) => item !== undefined && item !== null);
  refuseUnknown(given.map(([key]) => key), Object.keys(type.fields), place);
  for (const { name, oneof } of type.oneofsArray) {
    const chosen = given.filter(([key]) => oneof.includes(key)).map(([key]) => key);
    if (chosen.length > 1) throw new TypeError(`${join(place, name)}: ${chosen.join(' or ')}, not both`);
  }
  return Object.fromEntries(given.map(([key, item]) => [key, checkedField(type.fields[key], item, join(place, key))]));
}

/**
 * Options of a function, with their defaults.
 * @param {object | undefined} options
 * @param {object} defaults every option there is
 */
export function checkedOptions(options, defaults) {
  if (options === undefined) return defaults;
  if (!isPlain(options)) throw new TypeError(`options: an object, not ${kindOf(options)}`);
  refuseUnknown(Object.keys(options), Object.keys(defaults), 'options');
  const given = Object.entries(options).filter(([, item]) => item !== undefined);
  return { ...defaults, ...Object.fromEntries(given) };
}

/** @param {unknown} value for a message about it */
export function kindOf(value) {
  if (value === null || value === undefined) return String(value);
  if (Array.isArray(value)) return 'an array';
  const name = typeof value === 'object' ? value.constructor?.name ?? 'Object' : typeof value;
  return `${/^[aeiou]/i.test(name) ? 'an' : 'a'} ${name}`;
}

function checkedField(field, value, place) {
  if (field.map) {
    if (!isPlain(value)) throw new TypeError(`${place}: an object, not ${kindOf(value)}`);
    return Object.fromEntries(Object.entries(value).map(([key, item]) => {
      if (field.keyType !== 'string') integer(field.keyType, key.trim() ? Number(key) : key, `${join(place, key)}, its key`);
      return [key, single(field, item, join(place, key))];
    }));
  }
  if (!field.repeated) return single(field, value, place);
  if (!Array.isArray(value) && !isTyped(value)) throw new TypeError(`${place}: an array, not ${kindOf(value)}`);
  return Array.from(value, (item, index) => single(field, item, `${place}[${index}]`));
}

function single(field, value, place) {
  const { type, resolvedType } = field;
  if (resolvedType?.fields) return checkedMessage(resolvedType, value, place);
  if (resolvedType) return checkedEnum(resolvedType, value, place);
  if (type === 'string' || type === 'bool') {
    const wanted = type === 'bool' ? 'boolean' : type;
    if (typeof value !== wanted) throw new TypeError(`${place}: a ${wanted}, not ${kindOf(value)}`);
    return value;
  }
  if (type === 'bytes') {
    if (!(value instanceof Uint8Array)) throw new TypeError(`${place}: a Buffer, not ${kindOf(value)}`);
    return value;
  }
  if (type === 'float' || type === 'double') {
    if (typeof value !== 'number') throw new TypeError(`${place}: a number, not ${kindOf(value)}`);
    return value;
  }
  return integer(type, value, place);
}

function checkedEnum({ name, values }, value, place) {
  if (typeof value !== 'string') throw new TypeError(`${place}: a name of ${name}, not ${kindOf(value)}`);
  if (!(value in values)) throw new TypeError(`${place}: one of ${Object.keys(values).join(', ')}, not ${value}`);
  return value;
}

/** A 64-bit integer may be a bigint, which is passed on as text, as the library takes it. */
function integer(type, value, place) {
  const bits = Number(type.match(/\d+$/)[0]);
  if (bits === 64 && typeof value === 'bigint') {
    const low = SIGNED.test(type) ? -(2n ** 63n) : 0n;
    if (value < low || value >= low + 2n ** 64n) throw new TypeError(`${place}: ${value} is beyond 64 bits`);
    return String(value);
  }
  if (typeof value !== 'number') throw new TypeError(`${place}: an integer, not ${kindOf(value)}`);
  if (!Number.isSafeInteger(value)) throw new TypeError(`${place}: an integer, not ${value}`);
  const low = UNSIGNED.test(type) ? 0 : -(2 ** (bits - 1));
  if (value < low || value >= low + 2 ** bits) throw new TypeError(`${place}: ${value} is beyond ${type}`);
  return value;
}

function refuseUnknown(keys, known, place) {
  const wrong = keys.find((key) => !known.includes(key));
  if (wrong === undefined) return;
  const camel = wrong.replace(/_([a-z0-9])/g, (_, letter) => letter.toUpperCase());
  const hint = known.includes(camel) ? `did you mean ${camel}?` : `there are ${known.join(', ') || 'none'}`;
  throw new TypeError(`${join(place, wrong)}: no such field; ${hint}`);
}

const join = (place, key) => (place ? `${place}.${key}` : key);
const isTyped = (value) => ArrayBuffer.isView(value) && !(value instanceof DataView);

function isPlain(value) {
  return typeof value === 'object' && value !== null && !Array.isArray(value) && !ArrayBuffer.isView(value);
}
