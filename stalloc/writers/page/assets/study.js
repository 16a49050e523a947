"use strict";
// Charts of what a device, its host and the links between them did over time: computing, copies, phases, memory.

const SPLIT = [["computes", "compute_seconds", OKABE_ITO[0]], ["copies", "copy_seconds", OKABE_ITO[1]], ["both", "overlap_seconds", OKABE_ITO[2]], ["idle", "idle_seconds", "var(--hole)"]];
const LINK_COLORS = { "host to device": OKABE_ITO[5], "device to host": OKABE_ITO[4], "device to device": OKABE_ITO[3], "disk read": OKABE_ITO[6], "disk write": OKABE_ITO[2] };
const MEMORY = [["allocated", OKABE_ITO[0]], ["reserved", null], ["host", OKABE_ITO[3]]];
const MAX_PARTS = 40, ROW = 30, LEFT = 132, RIGHT = 16, TOP = 20, TALL = 150;
const DRAWN_BYTES = 2 ** 20; // below which memory of the host and traffic over time would be an empty picture

function humanSeconds(seconds) {
  if (seconds >= 1 || !seconds) return seconds ? seconds.toFixed(2) + " s" : "0 s";
  if (seconds >= 1e-3) return (seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0) + " ms";
  return (seconds * 1e6).toFixed(0) + " us";
}

const copiesText = (number) => `${count(number)} ${number === 1 ? "copy" : "copies"}`;
const percent = (share) => (100 * share).toFixed(1) + "%";
const rateText = (rate) => humanBytes(Math.round(rate)) + "/s";

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A drawing with a heading, in the place for charts: what it is of is said in words as well.
class Panel {
  constructor(element, title, height, legend = []) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), keys = document.createElement("ul");
    caption.textContent = title;
    keys.className = "legend";
    keys.append(...legend.map((line) => legendLine(...line)));
    figure.append(caption, keys);
    element.append(figure);
    this.width = Math.max(260, figure.clientWidth);
    this.left = Math.min(LEFT, 0.3 * this.width);
    this.right = this.width - RIGHT;
    this.svg = shape("svg", { viewBox: `0 0 ${this.width} ${height}`, width: "100%", height, role: "img", "aria-label": title });
    figure.append(this.svg);
  }

  text(x, y, words, anchor = "start", kind = "") {
    this.svg.append(shape("text", { x, y, "text-anchor": anchor, class: kind }, words));
  }

  box(x, y, width, height, color, hint, more = {}) {
    const made = shape("rect", { x, y, width: Math.max(0, width), height, fill: color, ...more });
    if (hint) made.append(shape("title", {}, hint));
    this.svg.append(made);
  }

  line(points, color, more = {}) {
    this.svg.append(shape("polyline", { points: points.map((point) => point.map((value) => value.toFixed(1)).join()).join(" "), fill: "none", stroke: color, "stroke-width": 1.5, ...more }));
  }

  // What does not fit in front of a row is cut, and said whole where it is pointed at.
  label(y, words) {
    const room = Math.floor((this.left - 8) / 7), shown = words.length > room ? words.slice(0, room - 1) + "…" : words;
    const made = shape("text", { x: this.left - 8, y, "text-anchor": "end" }, shown);
    made.append(shape("title", {}, words));
    this.svg.append(made);
  }
}

function legendLine(name, color, look = "") {
  const line = document.createElement("li"), patch = document.createElement("i");
  patch.className = look;
  if (!look) patch.style.background = color || "var(--ink)";
  line.append(patch, name);
  return line;
}

// Values over time above shaded phases; the axis upwards has the highest value, the one below the seconds.
function overTime(element, title, study, series, shown, limit = null) {
  const { seconds, stretches } = study.found, every = study.series.stretch_seconds;
  const panel = new Panel(element, title, TOP + TALL + 24, [
    ...series.map(([name, , color, filled]) => [name, color, filled || color ? "" : "line"]), ...(limit ? [[limit[0], "", "dashed line"]] : []),
  ]);
  const most = Math.max(limit ? limit[1] : 0, ...series.flatMap(([, values]) => values)) || 1;
  const x = (moment) => panel.left + (moment / seconds) * (panel.right - panel.left), y = (value) => TOP + TALL * (1 - value / (1.04 * most));
  const names = [...new Set(stretches.map(([name]) => name))];
  for (const [name, begin, end] of stretches) {
    panel.box(x(begin), TOP, x(end) - x(begin), TALL, "var(--ink)", `${name}, ${humanSeconds(begin)} to ${humanSeconds(end)}`, { opacity: names.indexOf(name) % 2 ? 0.1 : 0.04 });
    if (x(end) - x(begin) > 7.5 * name.length + 8) panel.text((x(begin) + x(end)) / 2, TOP - 6, name, "middle", "quiet");
  }
  for (const [name, values, color, filled] of series) {
    const points = values.flatMap((value, at) => (value === null ? [] : [[x(at * every), y(value)], [x(Math.min(seconds, (at + 1) * every)), y(value)]]));
    if (!points.length) continue;
    if (filled) panel.line([[points[0][0], y(0)], ...points, [points[points.length - 1][0], y(0)]], "none", { fill: color, "fill-opacity": 0.75 });
    else panel.line(points, color || "var(--ink)");
  }
  if (limit) {
    panel.line([[panel.left, y(limit[1])], [panel.right, y(limit[1])]], "var(--ink)", { "stroke-dasharray": "5 4", "stroke-width": 1 });
  }
  panel.line([[panel.left, y(0)], [panel.right, y(0)]], "var(--line)", { "stroke-width": 1 });
  for (const share of [0, 0.5, 1]) panel.text(panel.left - 8, y(share * most) + 4, shown(share * most), "end");
  for (const share of [0, 0.5, 1]) panel.text(x(share * seconds), TOP + TALL + 17, humanSeconds(share * seconds), share === 1 ? "end" : share ? "middle" : "start", "quiet");
}

// One row a name: parts [text, value, color] side by side, and what is said behind them.
function bars(element, title, rows, legend, most) {
  const panel = new Panel(element, title, rows.length * ROW + 6, legend);
  const room = Math.max(40, panel.right - panel.left - 7 * Math.max(...rows.map((row) => row.said.length)));
  rows.forEach((row, number) => {
    const y = 4 + number * ROW;
    let x = panel.left;
    panel.label(y + 15, row.name);
    for (const [text, value, color] of row.parts) {
      const width = (room * value) / (most || 1);
      panel.box(x, y, width, ROW - 9, color, text);
      x += width;
    }
    panel.text(x + 7, y + 15, row.said, "start", "figure");
  });
}

// `told` are sentences that stand elsewhere in the page. What the file lacks is said below, and not drawn.
function drawStudy(study, told = []) {
  const charts = byId("charts");
  byId("study").hidden = !study;
  charts.replaceChildren();
  if (!study) return;
  const { found, series } = study;
  fill("findings", "li", study.findings.filter((text) => !told.includes(text)));
  fill("missing", "li", found.missing.map((text) => "Not drawn: " + text + "."));
  const kind = found.is_estimated ? "estimated" : "measured";
  if (found.phases.some((phase) => phase.compute_seconds + phase.overlap_seconds > 0)) drawSplit(charts, found.phases, found.is_estimated ? ", estimated" : "");
  if (series) drawMemory(charts, study);
  else drawMemoryByPhase(charts, found.phases);
  if (series) drawTraffic(charts, study, kind);
  if (found.links.length) drawLinks(charts, found, found.is_estimated ? ", estimated" : "");
  if (found.phases.some((phase) => phase.headroom_bytes !== null)) drawHeadroom(charts, found);
  for (const phase of new Set(found.parts.map((part) => part.phase))) {
    const parts = found.parts.filter((part) => part.phase === phase).slice(0, MAX_PARTS);
    if (found.has_times) drawParts(charts, parts, found.is_estimated ? ", estimated" : "");
    else drawPartsMoved(charts, parts, found.links);
  }
}

function drawSplit(charts, phases, how) {
  const rows = phases.map((phase) => ({
    name: phase.name, said: humanSeconds(phase.seconds) + (phase.runs > 1 ? ` in ${count(phase.runs)} runs` : ""),
    parts: SPLIT.map(([name, part, color]) => [`${phase.name}: ${name} ${humanSeconds(phase[part])}, ${percent(phase[part] / (phase.seconds || 1))}`, phase[part], color]),
  }));
  bars(charts, "Time of each phase" + how, rows, SPLIT.map(([name, , color]) => [name, color]), Math.max(...phases.map((phase) => phase.seconds)));
}

function drawMemory(charts, study) {
  const memory = study.series.memory_bytes, total = study.found.total_bytes;
  const device = MEMORY.filter(([kind]) => kind !== "host" && memory[kind]).map(([kind, color]) => [kind, memory[kind], color, kind === "allocated"]);
  const held = Math.max(0, ...device.flatMap(([, values]) => values));
  const full = total !== null && held > total / 4 ? ["all that the device has", total] : null;
  if (device.length) overTime(charts, `Memory of the device: at most ${humanBytes(held)}${total === null ? "" : " of " + humanBytes(total)}`, study, device, humanBytes, full);
  const host = memory.host ? Math.max(...memory.host) : 0;
  if (host >= DRAWN_BYTES) overTime(charts, `Memory of the host: at most ${humanBytes(host)}`, study, [["host", memory.host, MEMORY[2][1], true]], humanBytes);
}

function drawMemoryByPhase(charts, phases) {
  const kinds = [["allocated", "allocated_bytes", MEMORY[0][1]], ["host", "host_bytes", MEMORY[2][1]]].filter(([, part]) => phases.some((phase) => phase[part]));
  const rows = phases.flatMap((phase) => kinds.filter(([, part]) => phase[part]).map(([name, part, color]) => ({
    name: phase.name, said: `${humanBytes(phase[part])} ${name}`, parts: [[`${phase.name}: ${humanBytes(phase[part])} ${name}`, phase[part], color]],
  })));
  if (rows.length) bars(charts, "Memory of each phase, at the most", rows, kinds.map(([name, , color]) => [name, color]), Math.max(...rows.map((row) => row.parts[0][1])));
}

function drawTraffic(charts, study, kind) {
  for (const link of study.found.links.filter((one) => one.num_bytes >= DRAWN_BYTES)) {
    const peak = link.peak_rate === null ? null : [kind + " peak", link.peak_rate];
    const used = link.used === null ? "" : `, link used to ${percent(link.used)}`;
    overTime(charts, `Traffic ${link.link}: ${humanBytes(link.num_bytes)} in ${copiesText(link.copies)}${used}`, study, [[link.link, study.series.link_bytes_per_second[link.link], LINK_COLORS[link.link], true]], rateText, peak);
  }
}

// Bytes by phase and by size of copy; and how quick they were, where that is known.
function drawLinks(charts, found, how) {
  const timed = found.has_times, keys = found.links.map((link) => [link.link, LINK_COLORS[link.link]]);
  const moved = found.phases.flatMap((phase) => Object.entries(phase.moved_bytes).map(([link, bytes]) => ({ phase, link, bytes })));
  bars(charts, timed ? "Traffic by phase, and how far the link is used" + how : "Traffic by phase", moved.map(({ phase, link, bytes }) => ({
    name: phase.name, said: humanBytes(bytes) + (timed && link in phase.link_used ? `, ${percent(phase.link_used[link])}` : ""), parts: [[`${phase.name}, ${link}: ${humanBytes(bytes)}`, bytes, LINK_COLORS[link]]],
  })), keys, Math.max(...moved.map((row) => row.bytes)));
  bars(charts, timed ? "Copies by size, and the rate that they reach" + how : "Copies by size", found.sizes.map((one) => {
    const copies = `${copiesText(one.copies)}, ${humanBytes(one.num_bytes)}`, said = timed ? `${rateText(one.rate)}: ${copies}` : copies;
    return { name: one.size, said, parts: [[`${one.link}, ${one.size}: ${said}`, timed ? one.rate : one.num_bytes, LINK_COLORS[one.link]]] };
  }), keys, Math.max(...found.sizes.map((one) => (timed ? one.rate : one.num_bytes))));
}

function drawHeadroom(charts, found) {
  const total = found.total_bytes, rows = found.phases.filter((phase) => phase.headroom_bytes !== null).map((phase) => ({
    name: phase.name, said: `${humanBytes(phase.headroom_bytes)} left`,
    parts: [[`${phase.name}: held at most ${humanBytes(total - phase.headroom_bytes)}`, total - phase.headroom_bytes, OKABE_ITO[0]], [`${phase.name}: ${humanBytes(phase.headroom_bytes)} left`, phase.headroom_bytes, "var(--hole)"]],
  }));
  bars(charts, `Headroom of each phase, of ${humanBytes(total)}`, rows, [["held at most", OKABE_ITO[0]], ["left", "var(--hole)"]], total);
}

// What each subgroup moves on each link.
function drawPartsMoved(charts, parts, links) {
  const rows = parts.map((part) => ({
    name: `${part.phase}/${part.name}`, said: humanBytes(Object.values(part.moved_bytes).reduce((so, bytes) => so + bytes, 0)),
    parts: Object.entries(part.moved_bytes).map(([link, bytes]) => [`${part.phase}/${part.name}: ${humanBytes(bytes)} ${link}`, bytes, LINK_COLORS[link]]),
  }));
  bars(charts, `What subgroups of ${parts[0].phase} move`, rows, links.map((link) => [link.link, LINK_COLORS[link.link]]), Math.max(...rows.map((row) => row.parts.reduce((so, [, bytes]) => so + bytes, 0))));
}

// When each part of a phase ran, such as a subgroup of the update: what of it computes, and what it moved.
function drawParts(element, parts, how) {
  const begin = Math.min(...parts.map((part) => part.start_seconds)), end = Math.max(...parts.map((part) => part.start_seconds + part.seconds));
  const panel = new Panel(element, `Subgroups of ${parts[0].phase}${how}`, parts.length * ROW + 26, [["copies or computes", "var(--hole)"], ["share that computes", OKABE_ITO[0]]]);
  const room = (panel.right - panel.left) * 0.55, x = (moment) => panel.left + ((moment - begin) / (end - begin || 1)) * room;
  parts.forEach((part, number) => {
    const y = 4 + number * ROW, width = (part.seconds / (end - begin || 1)) * room;
    panel.label(y + 15, `${part.phase}/${part.name}`);
    panel.box(x(part.start_seconds), y, width, ROW - 9, "var(--hole)", `${part.name}: ${humanSeconds(part.seconds)}`);
    panel.box(x(part.start_seconds), y, (width * part.compute_seconds) / (part.seconds || 1), ROW - 9, OKABE_ITO[0], `${part.name}: computes ${humanSeconds(part.compute_seconds)}`);
    const moved = Object.entries(part.moved_bytes).map(([link, bytes]) => `${humanBytes(bytes)} ${link}`).join(", ");
    panel.text(panel.left + room + 8, y + 15, moved, "start", "figure");
  });
  panel.text(panel.left, parts.length * ROW + 18, humanSeconds(begin), "start", "quiet");
  panel.text(panel.left + room, parts.length * ROW + 18, humanSeconds(end), "end", "quiet");
}
