// A chart: curves drawn by uPlot, with zoom by mouse and keyboard, and marks of what cannot be drawn.
"use strict";

const PLOT_HEIGHT = 210;
addState("x", "iteration");
addState("log", false);
addState("zoom", []);

function ascending(x, y) {  // uPlot needs x in order; repeated iterations are older than those before them
  let isSorted = true;
  for (let i = 1; i < x.length && isSorted; i++) isSorted = x[i] >= x[i - 1];
  if (isSorted) return [x, y];
  const xs = [], ys = [];
  for (let i = 0, last = -Infinity; i < x.length; i++) if (x[i] >= last) { xs.push(last = x[i]); ys.push(y[i]); }
  return [xs, ys];
}
function aligned(curves) {
  const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x;
  const isPrefix = x => { for (let i = 0; i < x.length; i++) if (x[i] !== longest[i]) return false; return true; };
  if (curves.every(curve => curve.x === longest || isPrefix(curve.x))) {
    return [longest, ...curves.map(curve => curve.y.length === longest.length ? curve.y
      : curve.y.concat(new Array(longest.length - curve.y.length).fill(null)))];
  }
  return uPlot.join(curves.map(curve => [curve.x, curve.y]));
}

function lastOf(values) {  // what the legend shows while nothing is pointed at
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

const waiting = [];  // charts are drawn one in a task, so that the page answers meanwhile
function later(work) {
  if (waiting.push(work) === 1) setTimeout(workOne, 0);
}
function workOne() {
  try { waiting[0](); }
  finally { waiting.shift(); if (waiting.length) setTimeout(workOne, 0); }
}
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.isVisible = entry.isIntersecting;
    if (chart.isVisible && chart.isStale) chart.refresh();
  }
}, { rootMargin: "150px" });
const resized = new ResizeObserver(entries => {
  for (const entry of entries) {
    const plot = entry.target.chart.plot, width = Math.floor(entry.contentRect.width);
    if (plot && width > 0 && width !== plot.width) plot.setSize({ width, height: PLOT_HEIGHT });
  }
});

class Chart {
  // curves(): [{label, colour, dash, x, y}]; options: {name, title, unit, format, xKind, marks, perRank}
  constructor(options, curves) {
    Object.assign(this, { options, curves, plot: null, isVisible: false, isStale: true, isQueued: false, key: "" });
    this.holder = h("div", { class: "plot" });
    this.note = h("div", { class: "small warn" });
    const title = options.unit ? `${options.title} [${options.unit}]` : options.title;
    this.element = h("div", { class: "chart", tabindex: 0, role: "group",
        "aria-label": `Curve of ${title}. Plus and minus zoom, left and right move, 0 shows all.`, onkeydown: event => this.press(event) },
      h("div", { class: "head" }, h("h3", { text: title }), options.button || null), this.holder, this.note);
    this.element.chart = this.holder.chart = this;
    observer.observe(this.element);
    resized.observe(this.holder);
  }
  refresh() {
    this.isStale = true;
    if (!this.isVisible || this.isQueued) return;
    this.isQueued = true;
    later(() => { this.isQueued = false; if (this.element.isConnected) this.draw(); });
  }
  draw() {
    this.isStale = false;
    const curves = this.curves().map(curve => { const [x, y] = ascending(curve.x, curve.y); return { ...curve, x, y }; })
                       .filter(curve => curve.x.length);
    if (state.log && this.options.canLog) for (const curve of curves) curve.y = curve.y.map(v => (v > 0 ? v : null));
    this.note.textContent = this.options.note ? this.options.note() : "";
    const xKind = this.options.xKind || state.x;
    const key = JSON.stringify([xKind, state.log && this.options.canLog, isDark(), curves.map(c => [c.label, c.colour, c.dash])]);
    if (!curves.length) {
      this.destroy();
      this.holder.replaceChildren(h("p", { class: "soft", text: "No values." }));
      return;
    }
    const data = aligned(curves);
    this.last = data[0][data[0].length - 1]; this.first = data[0][0];
    if (this.plot && key === this.key) {
      this.plot.setData(data, !this.zoomed());
      if (this.zoomed()) this.applyZoom();
    } else {
      this.destroy();
      this.holder.replaceChildren();
      this.key = key;
      this.plot = new uPlot(this.settings(curves, xKind), data, this.holder);
      this.applyZoom();
    }
  }
  zoomed() { return this.options.xKind ? this.ownZoom : zoomRange(); }
  settings(curves, xKind) {
    const text = css("--soft"), grid = { stroke: css("--grid"), width: 1 };
    const format = this.options.format, isLog = state.log && this.options.canLog;
    const xLabel = { iteration: "training iteration", time: "seconds since the start", training: "seconds of training" }[xKind];
    const xFormat = xKind === "iteration" ? (_, v) => number(v) : (_, v) => v === null ? "–" : seconds(v);
    return {
      width: Math.max(120, Math.floor(this.holder.clientWidth)), height: PLOT_HEIGHT,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      cursor: { sync: { key: `raysgd-${xKind}` }, drag: { x: true, y: false, setScale: false },
                bind: { dblclick: () => () => { this.setZoom(null); } } },
      legend: { live: true },
      series: [{ label: xLabel, value: (plot, v, _, place) => xFormat(plot, place === null ? this.last : v) }, ...curves.map((curve, i) => ({
        label: curve.label, stroke: curve.colour, width: 1.5, dash: curve.dash, spanGaps: true,
        points: { show: curve.y.length < 60, size: 5 }, value: (plot, v, _, place) => format(place === null ? lastOf(plot.data[i + 1]) : v) }))],
      axes: [{ stroke: text, grid, ticks: grid, label: xLabel, labelSize: 18, size: 32, font: "11px system-ui", labelFont: "11px system-ui" },
             { stroke: text, grid, ticks: grid, size: 62, font: "11px system-ui", values: (_, all) => all.map(v => v === null ? "" : format(v)) }],
      hooks: {
        setSelect: [plot => {
          if (plot.select.width > 4) this.setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          if (plot.select.width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        draw: [plot => this.drawMarks(plot, xKind)],
      },
    };
  }
  drawMarks(plot, xKind) {  // of values that are not finite, which no curve has
    if (!this.options.marks) return;
    const context = plot.ctx, ratio = devicePixelRatio || 1;
    context.save();
    context.fillStyle = css("--bad");
    context.font = `${10 * ratio}px system-ui`;
    context.textAlign = "left";
    let right = -Infinity;
    for (const [x, text] of this.options.marks(xKind)) {
      const left = plot.valToPos(x, "x", true);
      if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) continue;
      context.fillRect(left - ratio, plot.bbox.top, 2 * ratio, 7 * ratio);
      if (left > right) { context.fillText(text, left + 3 * ratio, plot.bbox.top + 9 * ratio); right = left + 45 * ratio; }
    }
    context.restore();
  }
  setZoom(range) { if (this.options.xKind) { this.ownZoom = range; this.applyZoom(); } else setZoom(range); }
  applyZoom() {
    if (!this.plot) return;
    const range = this.zoomed();
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
    else this.plot.setData(this.plot.data, true);
  }
  press(event) {
    if (event.target !== this.element || !this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.plot.scales.x, middle = (min + max) / 2, half = (max - min) / 2;
    const steps = { "+": [middle - half / 2, middle + half / 2], "=": [middle - half / 2, middle + half / 2],
                    "-": [middle - 2 * half, middle + 2 * half], ArrowLeft: [min - half / 2, max - half / 2],
                    ArrowRight: [min + half / 2, max + half / 2], 0: null, Escape: null };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const range = steps[event.key];
    this.setZoom(range && (range[0] > this.first || range[1] < this.last) ? range : null);
  }
  destroy() { if (this.plot) this.plot.destroy(); this.plot = null; this.key = ""; }
  remove() { observer.unobserve(this.element); resized.unobserve(this.holder); this.destroy(); this.element.remove(); }
}
const zoomRange = () => state.zoom.length === 2 && state.zoom.every(end => Number.isFinite(Number(end))) ? state.zoom.map(Number) : null;
function setZoom(range) {
  setState({ zoom: range ? range.map(String) : [] });
  byId("reset").disabled = !range;
  for (const chart of page.charts.values()) if (!chart.options.xKind) later(() => chart.applyZoom());
}

