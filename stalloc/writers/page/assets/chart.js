"use strict";
// Load over time: what is allocated, stacked by group, and what is reserved. uPlot draws it: it is small, quick with
// many points, and needs nothing else.

const POINTS = 900;

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
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.05 || 1] } },
      series: [{}, ...areas, ...(hasReserved ? [reserved] : [])],
      axes: [
        { ...axis, values: (plot, splits) => splits.map((value) => (Number.isInteger(value) ? count(value) : "")) },
        { ...axis, size: 84, values: (plot, splits) => splits.map(humanBytes), incrs: [...Array(40).keys()].flatMap((power) => [2 ** power]) },
      ],
      hooks: { draw: [(plot) => this.overlay(plot)] },
    };
  }

  room() {
    return { width: Math.max(200, this.element.clientWidth), height: Math.max(120, this.element.clientHeight) };
  }

  resize() {
    this.plot?.setSize(this.room());
  }

  overlay(plot) {
    const { view, theme } = this.marks, { ctx, bbox } = plot;
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
    const steps = this.device.header.marks.filter((mark) => mark[1]);
    if (steps.length < 200) steps.forEach(([event]) => line(event + 0.5, theme.grid, [2, 3]));
    this.device.header.errors.forEach((event) => line(event + 1, theme.error, []));
    line(view.moment, theme.ink, []);
    if (view.other !== null) line(view.other, theme.ink, [4, 4]);
  }

  // The moment under a pointer.
  at(pointer) {
    const box = this.plot.over.getBoundingClientRect();
    return Math.round(this.plot.posToVal(pointer.clientX - box.left, "x"));
  }
}
