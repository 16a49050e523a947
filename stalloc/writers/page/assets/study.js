"use strict";
// Charts of what a device, its host and the links between them did over time: computing, copies, phases, memory.

const SPLIT = [["computes", "compute_seconds", OKABE_ITO[0]], ["copies", "copy_seconds", OKABE_ITO[1]], ["both", "overlap_seconds", OKABE_ITO[2]], ["idle", "idle_seconds", "var(--hole)"]];
const LINK_COLORS = { "host to device": OKABE_ITO[5], "device to host": OKABE_ITO[4], "device to device": OKABE_ITO[3], "disk read": OKABE_ITO[6], "disk write": OKABE_ITO[2] };
const MEMORY = [["allocated", OKABE_ITO[0]], ["reserved", null], ["host", OKABE_ITO[3]]];
const ROW = 30, LEFT = 132, RIGHT = 16, TOP = 20, TALL = 150;
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
    keys.append(...legend.map(([name, color]) => legendLine(name, color)));
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

function legendLine(name, color) {
  const line = document.createElement("li"), patch = document.createElement("i");
  patch.style.background = color || "var(--ink)";
  line.append(patch, name);
  return line;
}

// Values over time above shaded phases; the axis upwards has the highest value, the one below the seconds.
function overTime(element, title, study, series, shown, limit = null) {
  const { seconds, stretches } = study.found, every = study.curves.seconds;
  const panel = new Panel(element, title, TOP + TALL + 24, series.map(([name, , color]) => [name, color]));
  const most = Math.max(limit ? limit[1] : 0, ...series.flatMap(([, values]) => values)) || 1;
  const x = (moment) => panel.left + (moment / seconds) * (panel.right - panel.left), y = (value) => TOP + TALL * (1 - value / (1.04 * most));
  const names = [...new Set(stretches.map(([name]) => name))];
  for (const [name, begin, end] of stretches) {
    panel.box(x(begin), TOP, x(end) - x(begin), TALL, "var(--ink)", `${name}, ${humanSeconds(begin)} to ${humanSeconds(end)}`, { opacity: names.indexOf(name) % 2 ? 0.1 : 0.04 });
    if (x(end) - x(begin) > 7.5 * name.length + 8) panel.text((x(begin) + x(end)) / 2, TOP - 6, name, "middle", "quiet");
  }
  for (const [name, values, color, filled] of series) {
    const points = values.flatMap((value, at) => (value < 0 ? [] : [[x(at * every), y(value)], [x(Math.min(seconds, (at + 1) * every)), y(value)]]));
    if (!points.length) continue;
    if (filled) panel.line([[points[0][0], y(0)], ...points, [points[points.length - 1][0], y(0)]], "none", { fill: color, "fill-opacity": 0.75 });
    else panel.line(points, color || "var(--ink)");
  }
  if (limit) {
    panel.line([[panel.left, y(limit[1])], [panel.right, y(limit[1])]], "var(--ink)", { "stroke-dasharray": "5 4", "stroke-width": 1 });
    panel.text(panel.right - 4, y(limit[1]) + 14, limit[0], "end", "quiet");
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

// `told` are sentences that stand elsewhere in the page.
function drawStudy(study, told = []) {
  const charts = byId("charts");
  byId("study").hidden = !study;
  charts.replaceChildren();
  if (!study) return;
  const { found, curves } = study, items = (id, texts) => byId(id).replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  items("findings", study.findings.filter((text) => !told.includes(text)));
  items("missing", found.missing.map((text) => "Not drawn: " + text + "."));
  const computes = found.phases.some((phase) => phase.compute_seconds + phase.copy_seconds + phase.overlap_seconds > 0);
  if (computes) {
    const rows = found.phases.map((phase) => ({
      name: phase.name, said: humanSeconds(phase.seconds) + (phase.runs > 1 ? ` in ${count(phase.runs)} runs` : ""),
      parts: SPLIT.map(([name, part, color]) => [`${phase.name}: ${name} ${humanSeconds(phase[part])}, ${percent(phase[part] / (phase.seconds || 1))}`, phase[part], color]),
    }));
    bars(charts, "Time of each phase", rows, SPLIT.map(([name, , color]) => [name, color]), Math.max(...found.phases.map((phase) => phase.seconds)));
  }
  const device = MEMORY.filter(([kind]) => kind !== "host" && curves.memory[kind]).map(([kind, color]) => [kind, curves.memory[kind], color, kind === "allocated"]);
  const held = Math.max(0, ...device.flatMap(([, values]) => values)), total = found.total_bytes;
  const full = total !== null && held > total / 4 ? ["all that the device has", total] : null;
  if (device.length) overTime(charts, `Memory of the device: at most ${humanBytes(held)}${total === null ? "" : " of " + humanBytes(total)}`, study, device, humanBytes, full);
  if (curves.memory.host && Math.max(...curves.memory.host) >= DRAWN_BYTES) overTime(charts, "Memory of the host", study, [["host", curves.memory.host, MEMORY[2][1], true]], humanBytes);
  for (const link of found.links.filter((one) => one.num_bytes >= DRAWN_BYTES)) {
    const peak = link.peak_rate === null ? null : ["measured peak", link.peak_rate];
    const used = link.used === null ? "" : `, used to ${percent(link.used)}`;
    overTime(charts, `Traffic ${link.link}: ${humanBytes(link.num_bytes)} in ${copiesText(link.copies)}${used}`, study, [[link.link, curves.traffic[link.link], LINK_COLORS[link.link], true]], rateText, peak);
  }
  if (found.links.length) {
    const moved = found.phases.flatMap((phase) => Object.entries(phase.moved_bytes).map(([link, bytes]) => ({ phase, link, bytes })));
    bars(charts, "Traffic by phase, and how far the link is used", moved.map(({ phase, link, bytes }) => ({
      name: phase.name, said: humanBytes(bytes) + (link in phase.link_used ? `, ${percent(phase.link_used[link])}` : ""), parts: [[`${phase.name}, ${link}: ${humanBytes(bytes)}`, bytes, LINK_COLORS[link]]],
    })), found.links.map((link) => [link.link, LINK_COLORS[link.link]]), Math.max(...moved.map((row) => row.bytes)));
    bars(charts, "Copies by size, and the rate that they reach", found.sizes.map((one) => ({
      name: one.size, said: `${rateText(one.rate)}: ${copiesText(one.copies)}, ${humanBytes(one.num_bytes)}`, parts: [[`${one.link}, ${one.size}: ${rateText(one.rate)}`, one.rate, LINK_COLORS[one.link]]],
    })), found.links.map((link) => [link.link, LINK_COLORS[link.link]]), Math.max(...found.sizes.map((one) => one.rate)));
  }
  const headroom = found.phases.filter((phase) => phase.headroom_bytes !== null);
  if (headroom.length) {
    bars(charts, "Headroom of each phase", headroom.map((phase) => ({
      name: phase.name, said: `${humanBytes(phase.headroom_bytes)} left`,
      parts: [[`${phase.name}: held at most ${humanBytes(found.total_bytes - phase.headroom_bytes)}`, found.total_bytes - phase.headroom_bytes, OKABE_ITO[0]], [`${phase.name}: ${humanBytes(phase.headroom_bytes)} left`, phase.headroom_bytes, "var(--hole)"]],
    })), [["held at most", OKABE_ITO[0]], ["left", "var(--hole)"]], found.total_bytes);
  }
  if (found.parts.length) drawParts(charts, found.parts.slice(0, 40));
}

// When each subgroup ran, the part of it that computes, and what it moved.
function drawParts(element, parts) {
  const begin = Math.min(...parts.map((part) => part.start_seconds)), end = Math.max(...parts.map((part) => part.start_seconds + part.seconds));
  const panel = new Panel(element, `Subgroups: ${parts[0].phase}`, parts.length * ROW + 26, [["time", "var(--hole)"], ["computes", OKABE_ITO[0]]]);
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
