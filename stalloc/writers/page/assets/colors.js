"use strict";
// Colours of groups; PALETTES stands before the scripts, from palettes.py.

const { OKABE_ITO, TOL_MUTED, REST, SIZES } = PALETTES;

// What a device can be coloured by, and what holds memory listed by: modules and roles where operations are known.
const groupings = (header) => ["class", ...(header.sites_are ? [header.sites_are] : []), ...Object.keys(header.groups), "size", "stream"];

// The group of each row, and names and colours of the groups; what holds most at the chosen moment gets a colour.
function groupRows(device, by, moment) {
  const { header } = device;
  if (by === "class") return named(device.kind, header.kinds, OKABE_ITO);
  if (by === "size") {
    const group = Uint8Array.from(device.size, (units) => SIZES.findIndex(([, limit]) => units * UNIT < limit));
    return { group, names: SIZES.map((entry) => entry[0]), colors: SIZES.map((entry) => entry[2]) };
  }
  const [column, names] = columnOf(device, by);
  const held = heldBy(device, column, names.length, moment).bytes;
  const order = [...held.keys()].sort((one, other) => held[other] - held[one]);
  const shown = order.slice(0, TOL_MUTED.length), group = new Uint8Array(device.count), place = new Uint8Array(names.length).fill(shown.length);
  shown.forEach((name, number) => (place[name] = number));
  for (let row = 0; row < device.count; row++) group[row] = place[column[row]];
  const kept = shown.map((number) => names[number]);
  if (names.length > shown.length) kept.push("all others");
  return { group, names: kept, colors: [...TOL_MUTED.slice(0, shown.length), REST].slice(0, kept.length) };
}

// The number of each row in a grouping, and the names of the numbers.
function columnOf(device, by) {
  const { header } = device;
  if (by in header.groups) return [device.rowGroups[by], header.groups[by]];
  if (by === "class") return [device.kind, header.kinds];
  if (by === "stream") return [device.stream, header.streams.map((name) => "stream " + name)];
  return by === "size" ? sizeColumn(device) : [device.site, header.sites];
}

function named(column, names, palette) {
  return { group: column, names, colors: names.map((_, number) => palette[number % palette.length]) };
}

// Bytes and requests by a column's value of what lives at a moment.
function heldBy(device, column, numValues, moment) {
  const { start, duration, size } = device;
  const bytes = new Float64Array(numValues), requests = new Uint32Array(numValues);
  for (let row = 0; row < device.count; row++) {
    if (start[row] <= moment && moment < start[row] + duration[row]) {
      bytes[column[row]] += size[row] * UNIT;
      requests[column[row]]++;
    }
  }
  return { bytes, requests };
}

// A CSS colour as a word of an image: red is the lowest byte.
function word(color) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

const darker = (value) => ((255 << 24) | ((value >>> 1) & 0x7f7f7f)) >>> 0;
