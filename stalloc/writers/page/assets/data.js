"use strict";
// What the page knows of a device: its header, and columns of 32-bit numbers, most shown rows first.

const UNIT = 512; // bytes of a unit of sizes and addresses
const COLUMNS = ["start", "duration", "size", "kind", "stream", "stack"];

async function unpack(text) {
  const chars = atob(text), packed = new Uint8Array(chars.length);
  for (let at = 0; at < chars.length; at++) packed[at] = chars.charCodeAt(at); // many times as quick as Uint8Array.from
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint32Array(await new Response(stream).arrayBuffer());
}

// Columns by name, the maps' places and segments, and the groups of rows by level of detail.
async function loadDevice(header, element) {
  const words = await unpack(element.textContent);
  element.remove(); // its text is as large as what was made of it
  let at = 0;
  const take = (count) => words.subarray(at, (at += count));
  const device = { header, count: header.num_requests, events: header.num_events + 1 };
  for (const name of COLUMNS) device[name] = take(device.count);
  device.rowGroups = {};
  for (const name of Object.keys(header.groups)) device.rowGroups[name] = take(device.count);
  device.maps = header.maps.map((map) => ({ ...map, place: take(device.count) }));
  for (const map of device.maps) map.rects = take(4 * map.segments);
  device.groups = [];
  let first = 0;
  for (const [level, count] of header.levels) {
    device.groups.push({ level, first, last: first + count });
    first += count;
  }
  device.site = Uint32Array.from(device.stack, (stack) => header.stacks[stack][0]);
  device.changes = changesOf(device);
  return device;
}

// Rows in the order of their starts and of their ends: what changes from event to event.
function changesOf(device) {
  const { start, duration, count, events } = device;
  const order = (key) => {
    const begins = new Uint32Array(events + 2);
    for (let row = 0; row < count; row++) begins[key(row) + 1]++;
    for (let event = 0; event <= events; event++) begins[event + 1] += begins[event];
    const next = begins.slice(), rows = new Uint32Array(count);
    for (let row = 0; row < count; row++) rows[next[key(row)]++] = row;
    return { begins, rows };
  };
  return { born: order((row) => start[row]), dead: order((row) => Math.min(start[row] + duration[row], events)) };
}

// Calls visit(row) for the rows of one level of detail and above that live in [begin, end).
function visitRows(device, begin, end, level, visit) {
  const { start, duration } = device;
  for (const group of device.groups) {
    if (group.level < level) break;
    const reach = 2 ** (group.level + 1); // none of them lives longer
    for (let row = lowerBound(start, begin - reach, group.first, group.last); row < group.last; row++) {
      if (start[row] >= end) break;
      if (start[row] + duration[row] > begin) visit(row);
    }
  }
}

function lowerBound(column, value, first, last) {
  while (first < last) {
    const middle = (first + last) >>> 1;
    if (column[middle] < value) first = middle + 1;
    else last = middle;
  }
  return first;
}

// Bytes by group as events pass, one after the other.
class Load {
  constructor(device, group, numGroups) {
    Object.assign(this, { device, group, now: new Float64Array(numGroups), total: 0 });
  }

  apply(event) {
    const { size, changes } = this.device, { born, dead } = changes;
    for (let i = dead.begins[event]; i < dead.begins[event + 1]; i++) this.add(dead.rows[i], -size[dead.rows[i]] * UNIT);
    for (let i = born.begins[event]; i < born.begins[event + 1]; i++) this.add(born.rows[i], size[born.rows[i]] * UNIT);
  }

  add(row, bytes) {
    this.now[this.group[row]] += bytes;
    this.total += bytes;
  }

  // Passes the events [begin, end); the moment at which most is allocated, and what each group has then.
  highest(begin, end) {
    const best = { at: begin, total: -1, bytes: new Float64Array(this.now.length) };
    for (let event = begin; event < end; event++) {
      this.apply(event);
      if (this.total > best.total) {
        Object.assign(best, { at: event, total: this.total });
        best.bytes.set(this.now);
      }
    }
    return best;
  }
}

const STRETCHES = 4096; // of the whole record, each with its highest moment, and what was allocated before it
const profiles = new WeakMap();

function profileOf(device, group, numGroups) {
  if (!profiles.has(group)) {
    const load = new Load(device, group, numGroups), every = Math.ceil(device.events / STRETCHES), stretches = [];
    for (let begin = 0; begin < device.events; begin += every) {
      const before = load.now.slice();
      stretches.push({ before, ...load.highest(begin, Math.min(device.events, begin + every)) });
    }
    profiles.set(group, { every, stretches });
  }
  return profiles.get(group);
}

// The highest moments of about `points` stretches of [begin, end): where they are, and bytes by group.
function curves(device, group, numGroups, begin, end, points) {
  const { every, stretches } = profileOf(device, group, numGroups), width = Math.max(1, Math.floor((end - begin) / points));
  const first = Math.floor(begin / every), last = Math.min(stretches.length, Math.ceil(end / every)), moments = [];
  if (width >= every) {
    const together = Math.floor(width / every);
    for (let at = first; at < last; at += together) {
      moments.push(stretches.slice(at, Math.min(last, at + together)).reduce((one, other) => (other.total > one.total ? other : one)));
    }
  } else {
    const load = new Load(device, group, numGroups);
    load.now.set(stretches[first].before);
    load.total = load.now.reduce((so, bytes) => so + bytes, 0);
    for (let at = first * every; at < end; at += width) moments.push(load.highest(at, Math.min(device.events, at + width)));
  }
  const x = moments.map((moment) => moment.at);
  return { x, series: Array.from({ length: numGroups }, (_, number) => moments.map((moment) => moment.bytes[number])) };
}

// What was reserved at each of some events.
function reservedAt(device, events) {
  const steps = device.header.reserved;
  if (!steps.length) return null;
  let row = 0;
  return events.map((event) => {
    while (row + 1 < steps.length && steps[row + 1][0] <= event) row++;
    return steps[row][1];
  });
}

function humanBytes(bytes) {
  const size = Math.abs(bytes);
  if (size >= 2 ** 30) return (bytes / 2 ** 30).toFixed(2) + " GiB";
  if (size >= Math.floor(2 ** 20 / 10)) return (bytes / 2 ** 20).toFixed(2) + " MiB";
  return bytes + " B";
}

const count = (number) => number.toLocaleString("en-US");
// The page counts events from one, so that zero is before the first; people read what the other verbs print.
const eventName = (event) => (event <= 0 ? "when recording began" : "after event " + count(event - 1));
