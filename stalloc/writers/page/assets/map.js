"use strict";
// The map: address upwards, events to the right, each request a rectangle. Drawn into an image word by word, since
// rectangles of one map never overlap: what is drawn is bounded by the pixels, and levels of detail bound the rest.

class AddressView {
  constructor(canvas, device, map) {
    Object.assign(this, { canvas, device, map });
    this.low = 0;
    this.high = map.height;
    this.found = new Set();
    canvas.tabIndex = 0;
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(this.canvas.clientWidth * ratio)), height = Math.max(1, Math.round(this.canvas.clientHeight * ratio));
    if (this.canvas.width !== width || this.canvas.height !== height || !this.image) {
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.canvas.getContext("2d").createImageData(width, height);
      this.words = new Uint32Array(this.image.data.buffer);
    }
  }

  draw(view, coloring, theme) {
    this.resize();
    const { device, map, words } = this, { width, height } = this.canvas;
    const { begin, end } = view, span = end - begin, tall = this.high - this.low;
    const x = (event) => ((event - begin) / span) * width, y = (unit) => height - ((unit - this.low) / tall) * height;
    words.fill(theme.nothing);
    const frames = map.rects;
    for (let at = 0; at < frames.length; at += 4) {
      this.fill(x(frames[at]), x(frames[at + 1]), y(frames[at + 3]), y(frames[at + 2]), theme.hole, theme.frame);
    }
    const level = Math.max(0, Math.floor(Math.log2(span / width)));
    const palette = coloring.colors.map(word), searching = this.found.size > 0;
    visitRows(device, begin, end, level, (row) => {
      const bottom = map.place[row], top = bottom + device.size[row];
      if (top <= this.low || bottom >= this.high) return;
      let color = palette[coloring.group[row]];
      if (searching && !this.found.has(device.stack[row])) color = theme.faded;
      this.fill(x(device.start[row]), x(device.start[row] + device.duration[row]), y(top), y(bottom), color, darker(color));
    });
    const context = this.canvas.getContext("2d");
    context.putImageData(this.image, 0, 0);
    this.overlay(context, x, y, view, theme);
  }

  // Pixels [left, right) × [top, bottom), at least one each way; an edge where there is room for it.
  fill(left, right, top, bottom, color, edge) {
    const { width, height } = this.canvas, words = this.words;
    const x0 = Math.max(0, Math.round(left)), x1 = Math.min(width, Math.max(Math.round(right), x0 + 1));
    const y0 = Math.max(0, Math.round(top)), y1 = Math.min(height, Math.max(Math.round(bottom), y0 + 1));
    const framed = x1 - x0 > 4 && y1 - y0 > 4;
    for (let y = y0; y < y1; y++) words.fill(framed && (y === y0 || y === y1 - 1) ? edge : color, y * width + x0, y * width + x1);
    if (!framed) return;
    for (let y = y0; y < y1; y++) words[y * width + x0] = words[y * width + x1 - 1] = edge;
  }

  overlay(context, x, y, view, theme) {
    const { height } = this.canvas, line = (event, color, dash) => {
      context.strokeStyle = color;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x(event + 0.5), 0);
      context.lineTo(x(event + 0.5), height);
      context.stroke();
    };
    context.lineWidth = 1;
    line(view.moment, theme.ink, []);
    if (view.other !== null) line(view.other, theme.ink, [4, 4]);
    for (const event of this.device.header.errors) line(event + 1, theme.error, [6, 3]);
    context.setLineDash([]);
    this.labels(context, view, theme);
    if (this.hovered === undefined) return;
    const row = this.hovered, place = this.map.place[row], { start, duration, size } = this.device;
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(x(start[row]), y(place + size[row]), Math.max(2, x(start[row] + duration[row]) - x(start[row])), Math.max(2, y(place) - y(place + size[row])));
  }

  // Which addresses and events the picture reaches over, in its corners.
  labels(context, view, theme) {
    const { width, height } = this.canvas, ratio = window.devicePixelRatio || 1, edge = 5 * ratio;
    Object.assign(context, { font: `${11 * ratio}px system-ui, sans-serif`, fillStyle: theme.ink, strokeStyle: theme.halo, lineWidth: 3 * ratio, lineJoin: "round" });
    const write = (words, right, bottom) => {
      Object.assign(context, { textAlign: right ? "right" : "left", textBaseline: bottom ? "bottom" : "top" });
      context.strokeText(words, right ? width - edge : edge, bottom ? height - edge : edge);
      context.fillText(words, right ? width - edge : edge, bottom ? height - edge : edge);
    };
    write(humanBytes(Math.round(this.high) * UNIT), false, false);
    write(`${humanBytes(Math.round(this.low) * UNIT)}, event ${count(Math.max(0, Math.round(view.begin) - 1))}`, false, true);
    write(`event ${count(Math.round(view.end) - 1)}`, true, true);
    context.lineWidth = 1;
  }

  // The row whose rectangle holds an event and a unit of addresses, or is at most so many units away; else undefined.
  rowAt(event, unit, reach = 0) {
    const { start, duration, size } = this.device, place = this.map.place;
    let found, nearest = Infinity;
    visitRows(this.device, event, event + 1, 0, (row) => {
      const away = Math.max(0, place[row] - unit, unit - place[row] - size[row]);
      if (away <= reach && away < nearest && start[row] <= event && event < start[row] + duration[row]) [found, nearest] = [row, away];
    });
    return found;
  }

  // The event and the unit under a pointer.
  at(pointer, view) {
    const box = this.canvas.getBoundingClientRect();
    const event = Math.floor(view.begin + ((pointer.clientX - box.left) / box.width) * (view.end - view.begin));
    const unit = this.low + (1 - (pointer.clientY - box.top) / box.height) * (this.high - this.low);
    return { event, unit };
  }

  zoomAddresses(factor, around) {
    const span = Math.min(this.map.height, Math.max(8, (this.high - this.low) * factor));
    const share = (around - this.low) / (this.high - this.low);
    this.low = Math.min(Math.max(0, around - share * span), this.map.height - span);
    this.high = this.low + span;
  }

  panAddresses(units) {
    const span = this.high - this.low;
    this.low = Math.min(Math.max(0, this.low + units), this.map.height - span);
    this.high = this.low + span;
  }
}
