"use strict";
// The page: which device, which stretch of events, which moment, which colours; and what people do with them.

const byId = (id) => document.getElementById(id);
const fill = (id, tag, texts) => byId(id).replaceChildren(...texts.map((text) => Object.assign(document.createElement(tag), { textContent: text })));
const view = { device: 0, begin: 0, end: 1, moment: 0, other: null, by: "class", search: "" };
let devices = [], device = null, chart = null, maps = [], coloring, asked = false;

function theme() {
  const dark = document.documentElement.dataset.theme === "dark";
  return dark
    ? { name: "dark", ink: "#ececec", grid: "#3a3f45", error: "#ff8a5c", halo: "#15181c", nothing: word("#15181c"), hole: word("#4a4f55"), frame: word("#7a8087"), faded: word("#30353a") }
    : { name: "light", ink: PALETTES.INK, grid: "#d8d8d8", error: "#c23b00", halo: "#ffffff", nothing: word("#ffffff"), hole: word(PALETTES.HOLE), frame: word(PALETTES.FRAME), faded: word("#ececec") };
}

function draw() { // at most once a frame
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const began = performance.now(), look = theme();
    maps.forEach((map) => map.draw(view, coloring, look));
    chart?.draw(view, coloring, look);
    window.lastRedrawMs = performance.now() - began;
    try {
      history.replaceState(null, "", "#" + link());
    } catch { /* a frame, as in a notebook, has no address of its own */ }
  });
}

const link = () => new URLSearchParams({
  device: view.device, view: [Math.round(view.begin), Math.round(view.end)], at: view.moment,
  ...(view.other === null ? {} : { against: view.other }), by: view.by, ...(view.search ? { search: view.search } : {}),
}).toString();

function readLink() {
  const told = new URLSearchParams(location.hash.slice(1)), number = (text) => (text && /^\d+$/.test(text) ? Number(text) : null);
  const [begin, end] = (told.get("view") || "").split(",").map(number);
  const within = (event) => Math.min(Math.max(0, event), device.events);
  if (begin !== null && end) Object.assign(view, { begin: within(begin), end: Math.max(within(end), within(begin) + 1) });
  if (number(told.get("at")) !== null) view.moment = within(number(told.get("at")));
  if (number(told.get("against")) !== null) view.other = within(number(told.get("against")));
  if (groupings(device.header).includes(told.get("by"))) view.by = told.get("by");
  view.search = told.get("search") || "";
}

async function choose(number) {
  const { header, element } = devices[number];
  view.device = number;
  document.querySelectorAll("#devices button").forEach((button, at) => button.setAttribute("aria-pressed", devices.order[at] === number));
  document.querySelectorAll(".memory").forEach((part) => (part.hidden = !header.has_memory));
  byId("keys").hidden ||= !header.has_memory;
  tell(header);
  drawStudy(header.study, header.headline);
  if (!header.has_memory) return forgetMemory();
  device = devices[number].loaded ??= await loadDevice(header, element);
  Object.assign(view, { device: number, begin: 0, end: device.events, moment: header.moment.event + 1, other: null });
  byId("load").replaceChildren();
  chart = new LoadChart(byId("load"), device);
  byId("maps").replaceChildren();
  maps = device.maps.map((map) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), canvas = document.createElement("canvas");
    caption.textContent = `${map.name}: ${humanBytes(map.height * UNIT)} of addresses${map.note ? ", " + map.note : ""}`;
    canvas.setAttribute("aria-label", "addresses over events, " + map.name);
    figure.append(caption, canvas);
    byId("maps").append(figure);
    const shown = new AddressView(canvas, device, map);
    listen(shown);
    return shown;
  });
  options("grouping", groupings(header), view.by);
  options("holders", groupings(header), header.sites_are);
  view.by = byId("grouping").value;
  tellMemory(header);
}

function forgetMemory() {
  device = chart = null;
  maps = [];
}

function options(id, names, value) {
  byId(id).replaceChildren(...names.map((name) => new Option(name, name)));
  byId(id).value = names.includes(value) ? value : names[0];
}

function tell(header) {
  byId("title").textContent = `${header.file}, device ${header.device}${header.device_name ? `: ${header.device_name}` : ""}`;
  fill("story", "p", header.headline);
}

function tellMemory(header) {
  fill("remarks", "li", header.remarks);
  const told = header.explanation, gap = told.reserved_bytes - told.allocated_bytes;
  byId("gap").textContent = `${eventName(told.event + 1)}: reserved ${humanBytes(told.reserved_bytes)}, allocated ${humanBytes(told.allocated_bytes)}, ${humanBytes(gap)} between them.`;
  const rows = (id, pairs) => {
    byId(id).replaceChildren();
    for (const [name, text] of pairs) {
      const line = byId(id).insertRow();
      line.insertCell().textContent = name;
      line.insertCell().textContent = text;
    }
  };
  rows("causes", Object.entries(told.causes).filter(([, bytes]) => bytes).sort((one, other) => other[1] - one[1]).map(([name, bytes]) => [name.replaceAll("_", " "), humanBytes(bytes)]));
  byId("pinned").replaceChildren(...told.segments.map((segment) => {
    const line = document.createElement("li"), button = document.createElement("button");
    button.textContent = `${humanBytes(segment.free_bytes)} of a ${humanBytes(segment.size_bytes)} segment is pinned by ${count(segment.num_blocks)} live block${segment.num_blocks === 1 ? "" : "s"} (${humanBytes(segment.live_bytes)}) from ${segment.sites.join(", ")}`;
    button.addEventListener("click", () => search(segment.sites[0] || "", told.event + 1));
    line.append(button);
    return line;
  }));
  const figures = Object.entries(header.summary).filter(([, value]) => typeof value === "number");
  rows("figures", figures.map(([name, value]) => [name.replaceAll("_", " ").replace(" bytes", ""), name.includes("bytes") ? humanBytes(value) : count(value)]));
}

function recolor() {
  if (!device) return draw();
  coloring = groupRows(device, view.by, view.moment);
  const { header } = device, lines = [
    ...(header.reserved.length ? [["reserved", "line"]] : []), ...(header.steps.length && header.steps.length < MAX_MARKS ? [["end of a step", "dotted line"]] : []),
    ...(header.errors.length ? [["out of memory", "error line"]] : []), ["the chosen moment", "thin line"],
  ];
  byId("legend").replaceChildren(
    ...coloring.names.map((name, number) => legendLine(name, coloring.colors[number])),
    ...lines.map(([name, look]) => legendLine(name, "", look)),
  );
  hold();
}

function hold() {
  const by = byId("holders").value, now = totalHeld(device, view.moment);
  const when = eventName(view.moment), held = `${humanBytes(now.bytes)} by ${count(now.requests)} requests`;
  byId("held-title").textContent = view.other === null ? `Who holds memory ${when}: ${held}` : `What grew from ${eventName(view.other)} to ${when}: ${humanBytes(now.bytes - totalHeld(device, view.other).bytes)}`;
  fillTable(byId("held"), heldTable(device, by, view), view.other === null ? now.bytes : 0);
  flame(byId("flame"), device, view, (name) => search(name === "all" ? "" : name));
  draw();
}

function moveTo(moment, other = view.other) {
  Object.assign(view, { moment: Math.min(Math.max(0, moment), device.events - 1), other });
  hold();
}

function search(text, moment = view.moment) {
  view.search = byId("search").value = text;
  const wanted = text.toLowerCase(), { stacks, sites } = device.header, found = new Set();
  if (wanted) stacks.forEach(([site, ...frames], stack) => [sites[site], ...frames].some((name) => name.toLowerCase().includes(wanted)) && found.add(stack));
  maps.forEach((map) => (map.found = found));
  moveTo(moment);
}

function zoom(factor, around) {
  const span = Math.min(device.events, Math.max(8, (view.end - view.begin) * factor));
  const share = (around - view.begin) / (view.end - view.begin);
  view.begin = Math.min(Math.max(0, around - share * span), device.events - span);
  view.end = view.begin + span;
  draw();
}

function pan(events) {
  const span = view.end - view.begin;
  view.begin = Math.min(Math.max(0, view.begin + events), device.events - span);
  view.end = view.begin + span;
  draw();
}

function reset() {
  Object.assign(view, { begin: 0, end: device.events });
  maps.forEach((map) => Object.assign(map, { low: 0, high: map.map.height }));
  draw();
}

function point(map, pointer) {
  const { event, unit } = map.at(pointer, view);
  pointAt(map, event, unit);
}

function pointAt(map, event, unit, reach = 0) {
  const row = map.rowAt(event, unit, reach);
  maps.forEach((other) => (other.hovered = row));
  byId("pointed").textContent = row === undefined ? `${eventName(event)}: nothing lives there` : describe(row, map);
  draw();
}

function describe(row, map) {
  const { start, duration, size, header } = device, [, ...frames] = header.stacks[device.stack[row]];
  const end = start[row] + duration[row], lives = end >= device.events ? "to the end" : `to event ${count(end - 1)}`;
  const place = map.map.place[row];
  let next;
  visitRows(device, end, device.events, 0, (other) => {
    if (map.map.place[other] < place + size[row] && place < map.map.place[other] + size[other] && start[other] >= end && (next === undefined || start[other] < start[next])) next = other;
  });
  const from = start[row] ? `from event ${count(start[row] - 1)}` : "from before the recording";
  const reuse = next === undefined ? "its place is not used again" : `its place is used again by ${humanBytes(size[next] * UNIT)} from ${header.sites[device.site[next]]} at event ${count(start[next] - 1)}`;
  return `${humanBytes(size[row] * UNIT)}, ${from} ${lives}, ${header.kinds[device.kind[row]]}, stream ${header.streams[device.stream[row]]}; ${reuse}\n${frames.slice().reverse().join("  ←  ")}`;
}

function listen(map) {
  const canvas = map.canvas, pointers = new Map();
  let moved = 0, apart = 0;
  canvas.addEventListener("wheel", (wheel) => {
    wheel.preventDefault();
    const factor = Math.exp((wheel.deltaY || wheel.deltaX) * 0.0016), { event, unit } = map.at(wheel, view);
    if (wheel.shiftKey) map.zoomAddresses(factor, unit), draw();
    else zoom(factor, event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (pointer) => {
    canvas.setPointerCapture(pointer.pointerId);
    pointers.set(pointer.pointerId, pointer);
    moved = apart = 0;
  });
  canvas.addEventListener("pointermove", (pointer) => {
    const before = pointers.get(pointer.pointerId);
    if (!before) return point(map, pointer);
    pointers.set(pointer.pointerId, pointer);
    if (pointers.size === 2) { // pinch
      const [one, other] = [...pointers.values()], now = Math.abs(one.clientX - other.clientX);
      if (apart && now) zoom(apart / now, map.at({ clientX: (one.clientX + other.clientX) / 2, clientY: one.clientY }, view).event);
      apart = now;
      return;
    }
    const box = canvas.getBoundingClientRect(), x = pointer.clientX - before.clientX, y = pointer.clientY - before.clientY;
    moved += Math.abs(x) + Math.abs(y);
    map.panAddresses((y / box.height) * (map.high - map.low));
    pan((-x / box.width) * (view.end - view.begin));
  });
  const up = (pointer) => {
    if (pointers.delete(pointer.pointerId) && moved < 4 && pointer.type === "pointerup") {
      const { event } = map.at(pointer, view);
      if (pointer.shiftKey) moveTo(event, view.moment);
      else moveTo(event);
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("keydown", (key) => press(key, map));
}

// With the keys alone: the middle of the view is the moment, and the block nearest to it is the one that is pointed at.
function chooseMiddle(map, moment, isCompared) {
  moveTo(moment, isCompared ? view.moment : view.other);
  pointAt(map, moment, (map.low + map.high) / 2, map.map.height);
}

function press(key, map) {
  const middle = (view.begin + view.end) / 2, step = (view.end - view.begin) / 10, tall = (map.high - map.low) / 10;
  const actions = {
    "+": () => zoom(0.8, middle), "-": () => zoom(1.25, middle),
    PageUp: () => map.zoomAddresses(0.8, (map.low + map.high) / 2), PageDown: () => map.zoomAddresses(1.25, (map.low + map.high) / 2),
    ArrowLeft: () => pan(-step), ArrowRight: () => pan(step), ArrowUp: () => map.panAddresses(tall), ArrowDown: () => map.panAddresses(-tall),
    Enter: () => chooseMiddle(map, Math.floor(middle), key.shiftKey), Escape: () => moveTo(view.moment, null), "[": () => moveTo(view.moment - 1), "]": () => moveTo(view.moment + 1), 0: reset,
  };
  const action = actions[key.key === "=" ? "+" : key.key];
  if (!action || key.ctrlKey || key.metaKey) return;
  key.preventDefault();
  action();
  draw();
}

async function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  devices = JSON.parse(byId("headers").textContent).map((header, number) => ({ header, element: byId("columns-" + number) }));
  showDevices();
  const hash = location.hash, wanted = new URLSearchParams(hash.slice(1)).get("device");
  await choose(wanted in devices ? Number(wanted) : devices.order[0]);
  if (hash && device) {
    readLink();
    byId("grouping").value = view.by;
  }
  byId("grouping").addEventListener("change", () => ((view.by = byId("grouping").value), recolor()));
  byId("holders").addEventListener("change", hold);
  byId("search").addEventListener("input", () => search(byId("search").value));
  byId("reset").addEventListener("click", reset);
  byId("theme").addEventListener("click", () => ((document.documentElement.dataset.theme = theme().name === "dark" ? "light" : "dark"), draw()));
  byId("help").addEventListener("click", () => byId("help").setAttribute("aria-expanded", !(byId("keys").hidden = !byId("keys").hidden)));
  byId("load").addEventListener("click", (pointer) => moveTo(chart.at(pointer), pointer.shiftKey ? view.moment : view.other));
  byId("load").addEventListener("wheel", (wheel) => (wheel.preventDefault(), zoom(Math.exp(wheel.deltaY * 0.0016), chart.at(wheel))), { passive: false });
  new ResizeObserver(() => (chart?.resize(), draw())).observe(byId("load"));
  let width = window.innerWidth;
  window.addEventListener("resize", () => width !== window.innerWidth && ((width = window.innerWidth), drawStudy(devices[view.device].header.study, devices[view.device].header.headline)));
  recolor();
  if (view.search) search(view.search);
  window.isReady = true;
}

begin();
