"use strict";
// Who holds memory at the chosen moment, or what grew between two: a table by site, class, size and stream, and a
// flame view of the stacks.

const ROWS = 12;

function heldTable(device, by, view) {
  const [column, names] = columnOf(device, by);
  const now = heldBy(device, column, names.length, view.moment);
  const before = view.other === null ? null : heldBy(device, column, names.length, view.other);
  const rows = names.map((name, number) => ({
    name, bytes: now.bytes[number] - (before ? before.bytes[number] : 0), requests: now.requests[number] - (before ? before.requests[number] : 0),
  }));
  const shown = rows.filter((row) => row.bytes !== 0 || row.requests !== 0);
  return shown.sort((one, other) => Math.abs(other.bytes) - Math.abs(one.bytes) || (one.name < other.name ? -1 : 1));
}

function sizeColumn(device) {
  if (!device.sizes) {
    const numbers = new Map(), column = new Uint32Array(device.count);
    for (let row = 0; row < device.count; row++) {
      const size = device.size[row];
      if (!numbers.has(size)) numbers.set(size, numbers.size);
      column[row] = numbers.get(size);
    }
    device.sizes = [column, [...numbers.keys()].map((size) => humanBytes(size * UNIT))];
  }
  return device.sizes;
}

function totalHeld(device, moment) {
  const { bytes, requests } = heldBy(device, device.zeros ??= new Uint8Array(device.count), 1, moment);
  return { bytes: bytes[0], requests: requests[0] };
}

function fillTable(body, rows, total) {
  body.replaceChildren();
  const shown = rows.slice(0, ROWS), rest = rows.slice(ROWS);
  if (rest.length) {
    const sum = (name) => rest.reduce((so, row) => so + row[name], 0);
    shown.push({ name: count(rest.length) + " more", bytes: sum("bytes"), requests: sum("requests") });
  }
  for (const row of shown) {
    const cells = [row.name, humanBytes(row.bytes), total ? ((100 * row.bytes) / total).toFixed(1) + " %" : "", count(row.requests)];
    const line = body.insertRow();
    cells.forEach((text) => (line.insertCell().textContent = text));
  }
}

// Frames with the bytes below them, as rectangles: a child lies under its caller and is as wide as what it holds.
function flame(element, device, view, choose) {
  const held = heldBy(device, device.stack, device.header.stacks.length, view.moment).bytes;
  const root = { name: "all", bytes: 0, children: new Map() };
  device.header.stacks.forEach(([, ...frames], stack) => {
    if (!held[stack]) return;
    root.bytes += held[stack];
    let branch = root;
    for (const name of frames) {
      if (!branch.children.has(name)) branch.children.set(name, { name, bytes: 0, children: new Map() });
      branch = branch.children.get(name);
      branch.bytes += held[stack];
    }
  });
  element.replaceChildren();
  element.style.height = 0;
  if (!device.header.sites_are) return; // one frame, which nobody knows
  const add = (branch, left, depth) => {
    const share = branch.bytes / (root.bytes || 1);
    if (share < 0.004 || depth > 40) return;
    const box = document.createElement("button");
    box.className = "frame depth-" + (depth % 4);
    box.style.left = 100 * left + "%";
    box.style.width = 100 * share + "%";
    box.style.top = 1.6 * depth + "em";
    box.textContent = box.title = `${branch.name}: ${humanBytes(branch.bytes)}, ${(100 * share).toFixed(1)} %`;
    box.addEventListener("click", () => choose(branch.name));
    element.append(box);
    deepest = Math.max(deepest, depth);
    let at = left;
    for (const child of [...branch.children.values()].sort((one, other) => other.bytes - one.bytes)) {
      add(child, at, depth + 1);
      at += child.bytes / (root.bytes || 1);
    }
  };
  let deepest = 0;
  add(root, 0, 0);
  element.style.height = 1.6 * (deepest + 1) + "em";
}
