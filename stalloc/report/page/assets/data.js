"use strict";
// What the page knows of a device: its header, and columns of 32-bit numbers, most shown rows first.

const UNIT = 512; // bytes of a unit of sizes and addresses
const COLUMNS = ["start", "duration", "size", "kind", "stream", "stack"];

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
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

// Bytes by group after the events of [begin, end], at most `points` of them: the highest moment of each stretch.
function curves(device, group, numGroups, begin, end, points) {
  const { size, changes } = device, { born, dead } = changes;
  const now = new Float64Array(numGroups);
  let total = 0, next = 0;
  const apply = (event) => {
    for (let i = dead.begins[event]; i < dead.begins[event + 1]; i++) {
      const row = dead.rows[i], bytes = size[row] * UNIT;
      now[group[row]] -= bytes;
      total -= bytes;
    }
    for (let i = born.begins[event]; i < born.begins[event + 1]; i++) {
      const row = born.rows[i], bytes = size[row] * UNIT;
      now[group[row]] += bytes;
      total += bytes;
    }
  };
  for (; next < begin; next++) apply(next);
  const stretch = Math.max(1, (end - begin) / points), x = [], series = Array.from({ length: numGroups }, () => []);
  for (let edge = begin; edge < end; edge += stretch) {
    const until = Math.min(end, edge + stretch);
    let most = -1, at = next, best = null;
    for (; next < until; next++) {
      apply(next);
      if (total > most) {
        most = total;
        at = next;
        best = now.slice();
      }
    }
    if (best === null) continue;
    x.push(at);
    best.forEach((bytes, number) => series[number].push(bytes));
  }
  return { x, series };
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
const eventName = (event) => (event <= 0 ? "before the first event" : "after event " + count(event - 1));
