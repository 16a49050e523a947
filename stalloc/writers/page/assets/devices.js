"use strict";
// Devices and files as small pictures side by side: the one that ran out of memory or wastes most comes first.

function showDevices() {
  const worst = (header) => (header.has_memory ? header.explanation.reserved_bytes - header.explanation.allocated_bytes : -1);
  const failed = (header) => Number(header.has_memory && header.errors.length > 0);
  const figures = (header) => (header.has_memory ? `${humanBytes(header.explanation.allocated_bytes)} allocated, ${humanBytes(worst(header))} more reserved` : humanSeconds(header.study.found.seconds));
  const badness = (one, other) => failed(other) - failed(one) || worst(other) - worst(one);
  devices.order = [...devices.keys()].sort((one, other) => badness(devices[one].header, devices[other].header));
  if (devices.length < 2) return;
  byId("devices").hidden = false;
  byId("devices").replaceChildren(...devices.order.map((number) => {
    const { header } = devices[number], button = document.createElement("button"), canvas = document.createElement("canvas");
    const said = document.createElement("span");
    said.textContent = `${devices.some(({ header: other }) => other.file !== header.file) ? header.file + ", " : ""}device ${header.device}${failed(header) ? ", out of memory" : ""}: ${figures(header)}`;
    button.append(canvas, said);
    button.addEventListener("click", () => choose(number).then(recolor));
    if (header.has_memory) requestAnimationFrame(() => sparkline(canvas, header.reserved, header.num_events));
    return button;
  }));
}

function sparkline(canvas, steps, events) {
  const ratio = window.devicePixelRatio || 1, width = (canvas.width = canvas.clientWidth * ratio), height = (canvas.height = canvas.clientHeight * ratio);
  const most = Math.max(1, ...steps.map((step) => step[1])), context = canvas.getContext("2d");
  context.fillStyle = "#7aa7c7";
  steps.forEach(([event, bytes], at) => {
    const end = at + 1 < steps.length ? steps[at + 1][0] : events + 1;
    context.fillRect((event / events) * width, height * (1 - bytes / most), Math.max(1, ((end - event) / events) * width), (height * bytes) / most);
  });
}
