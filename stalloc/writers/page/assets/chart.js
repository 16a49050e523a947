"use strict";
// Load over time: what is allocated, stacked by group, and what is reserved. uPlot draws it: it is small, quick with
// many points, and needs nothing else.

const POINTS = 900, MAX_MARKS = 200, FONT = "12px system-ui, sans-serif";

class LoadChart {
  constructor(element, device) {
    Object.assign(this, { element, device });
  }

  draw(view, coloring, theme) {
    const { x, series } = curves(this.device, coloring.group, coloring.names.length, Math.floor(view.begin), Math.ceil(view.end), POINTS);
    const reserved = reservedAt(this.device, x);
    const stacked = [];
    for (let number = series.length - 1, below = x.map(() => 0); number >= 0; number--) {
      below = below.map((bytes, at) => bytes + series[number][at]);
      stacked[number] = below;
    }
    const data = [x, ...stacked, ...(reserved ? [reserved] : [])];
    const key = JSON.stringify([coloring.names, coloring.colors, theme.name, Boolean(reserved)]);
    this.marks = { view, theme };
    if (this.plot && this.key === key) {
      this.plot.setData(data, false);
      this.plot.setScale("x", { min: view.begin, max: view.end });
      return;
    }
    this.plot?.destroy();
    this.key = key;
    this.plot = new uPlot(this.settings(coloring, theme, Boolean(reserved)), data, this.element);
    this.plot.setScale("x", { min: view.begin, max: view.end });
  }

  settings(coloring, theme, hasReserved) {
    const axis = { stroke: theme.ink, grid: { stroke: theme.grid }, ticks: { stroke: theme.grid } };
    const areas = coloring.names.map((label, number) => ({
      label, stroke: coloring.colors[number], fill: coloring.colors[number], width: 0, points: { show: false },
    }));
    const reserved = { label: "reserved", stroke: theme.ink, width: 2, points: { show: false } };
    return {
      ...this.room(),
      padding: [20, 22, 0, 0], // room for the names of phases
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.1 || 1] } },
      series: [{}, ...areas, ...(hasReserved ? [reserved] : [])],
      axes: [
        { ...axis, label: "events", size: 30, labelSize: 18, labelFont: FONT, values: (plot, splits) => splits.map((value) => (Number.isInteger(value) ? count(value) : "")) },
        { ...axis, size: 84, values: (plot, splits) => splits.map(humanBytes), incrs: [...Array(40).keys()].flatMap((power) => [2 ** power]) },
      ],
      hooks: { drawAxes: [(plot) => this.shadePhases(plot)], draw: [(plot) => this.overlay(plot)] },
    };
  }

  room() {
    return { width: Math.max(200, this.element.clientWidth), height: Math.max(120, this.element.clientHeight) };
  }

  resize() {
    this.plot?.setSize(this.room());
  }

  overlay(plot) {
    const { view, theme } = this.marks, { ctx, bbox } = plot, { header } = this.device;
    const line = (event, color, dash) => {
      const x = plot.valToPos(event, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.save();
      ctx.strokeStyle = color;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    };
    if (header.steps.length < MAX_MARKS) header.steps.forEach((event) => line(event + 0.5, theme.ink, [2, 4]));
    line(view.moment, theme.ink, []);
    if (view.other !== null) line(view.other, theme.ink, [4, 4]);
    header.errors.forEach((event) => line(event + 1, theme.error, [6, 3])); // the chosen moment may be one
    this.markPeak(plot, theme);
  }

  // Phases as shades, those of one name alike, with the name above where there is room.
  shadePhases(plot) {
    const { theme } = this.marks, { ctx, bbox } = plot, { phases } = this.device.header, ratio = window.devicePixelRatio || 1;
    const names = [...new Set(phases.map(([, , name]) => name))], x = (event) => Math.min(Math.max(plot.valToPos(event + 1, "x", true), bbox.left), bbox.left + bbox.width);
    const seen = phases.map(([begin, end, name]) => [x(begin), x(end), name]).filter(([left, right]) => right > left);
    if (seen.length > MAX_MARKS) return;
    ctx.save();
    Object.assign(ctx, { fillStyle: theme.ink, font: `${11 * ratio}px system-ui, sans-serif`, textAlign: "center", textBaseline: "bottom" });
    for (const [left, right, name] of seen) {
      ctx.globalAlpha = names.indexOf(name) % 2 ? 0.16 : 0.05;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.globalAlpha = 0.75;
      if (ctx.measureText(name).width < right - left) ctx.fillText(name, (left + right) / 2, bbox.top - 3 * ratio);
    }
    ctx.restore();
  }

  // The highest moment of what is allocated, by a triangle with its bytes.
  markPeak(plot, theme) {
    const { ctx, bbox } = plot, { allocated_peak_bytes: bytes, allocated_peak_event: event } = this.device.header.summary, ratio = window.devicePixelRatio || 1;
    const x = plot.valToPos(event + 1, "x", true), y = plot.valToPos(bytes, "y", true), side = 5 * ratio, words = "peak " + humanBytes(bytes);
    if (event === null || x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    Object.assign(ctx, { fillStyle: theme.ink, font: `600 ${11 * ratio}px system-ui, sans-serif`, textBaseline: "bottom", textAlign: "left" });
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x - side, y - 1.6 * side);
    ctx.lineTo(x + side, y - 1.6 * side);
    ctx.fill();
    const width = ctx.measureText(words).width, left = x + width + 3 * side > bbox.left + bbox.width ? x - width - 1.6 * side : x + 1.6 * side;
    const height = 14 * ratio; // a plate below the words, or the line of what is reserved strikes them through
    ctx.fillStyle = theme.halo;
    ctx.fillRect(left - 2 * ratio, y - height, width + 4 * ratio, height);
    ctx.fillStyle = theme.ink;
    ctx.fillText(words, left, y - 2);
    ctx.restore();
  }

  // The moment under a pointer.
  at(pointer) {
    const box = this.plot.over.getBoundingClientRect();
    return Math.round(this.plot.posToVal(pointer.clientX - box.left, "x"));
  }
}
